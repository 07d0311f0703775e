"""What an optimizer's class of torch is like, found by running it on a few numbers.

Nothing says of a class of a user whether shards of a parameter can be stepped on their own, or what its state is. A
few steps on random parameters of a dozen elements do.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError

_EXTENTS = (
    3,
    5,
    2,
    7,
    11,
    13,
    17,
)  # all different, so that a dimension of state tells which one of the parameter it is
_SCALES = (0.1, 1.0, 100.0)  # of the gradients of three steps
_LEFT_OUT = ("params", "param_names", "initial_lr")
_OWN = "Give one of torch.optim's, or one that steps each parameter by its own gradient"


@dataclass(frozen=True)
class Entry:
    """One entry of the state of a parameter.

    dims: the parameter's dimensions that it has, all of them for what is ``alike``; None for one of extent 1. dtype: of
    a tensor. number: the Python type of what is no tensor. placed: it is on the parameter's device.
    """

    alike: bool
    dims: tuple[int | None, ...] = ()
    dtype: torch.dtype = torch.float32
    number: type | None = None
    placed: bool = False

    def zeros(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """What is loaded into, for a parameter of ``shape``."""
        return torch.zeros(self._extents(shape), dtype=self.dtype, device=device if self.placed else "cpu")

    def nbytes(self, shape: Sequence[int]) -> int:
        return prod(self._extents(shape)) * self.dtype.itemsize

    def _extents(self, shape: Sequence[int]) -> list[int]:
        return [1 if dim is None else (*shape, 1)[dim] for dim in self.dims]

    def stored(self, value: Any) -> Tensor:
        """A copy of a value as a tensor."""
        return torch.tensor(value, dtype=self.dtype) if self.number else value.detach().clone()

    def live(self, stored: Tensor) -> Any:
        """The inverse."""
        return self.number(stored.item()) if self.number else stored.clone()


@dataclass(frozen=True)
class Traits:
    """elementwise: an element's update depends on nothing but that element's own past, and is zero for zeros.
    alone: a parameter's does not depend on other parameters. state: the entries of parameters, by their dimensions.
    """

    elementwise: bool
    alone: bool
    state: Mapping[int, Mapping[str, Entry]]


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group of ``param_groups``."""
    return {name: value for name, value in group.items() if name not in _LEFT_OUT}


def remake(prototype: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer like ``prototype`` for other parameters. Raises ConfigError where its class cannot be called so."""
    kind, known = type(prototype), {**vars(prototype), **prototype.defaults}
    named = [name for name in signature(kind.__init__).parameters if name in known]
    try:
        return kind([dict(group) for group in groups], **{name: known[name] for name in named})
    except Exception as error:
        reason = f"it cannot be made for shards of the parameters: {_told(error)}"
        remedy = "Let its __init__ take param_groups, and its defaults as keywords"
        raise ConfigError("optimizer", kind.__name__, reason, remedy) from error


def check_remade(prototype: torch.optim.Optimizer, made: torch.optim.Optimizer) -> None:
    """Raises ConfigError where ``made``, which `remake` made, does not do what ``prototype`` would have done."""
    kind, hooks = type(prototype).__name__, (prototype._optimizer_step_pre_hooks, prototype._optimizer_step_post_hooks)
    if any(hooks):
        raise ConfigError("optimizer", kind, "it has hooks, which others like it have not", "Use a callback instead")
    if callable(getattr(prototype, "train", None)) and callable(getattr(prototype, "eval", None)):
        reason = "it has a train() and an eval(): its weights in an evaluation are others than in training"
        raise ConfigError("optimizer", kind, reason, "Take one whose weights are the same in both")
    for name, value in vars(prototype).items():
        if isinstance(value, torch.optim.Optimizer) or any(isinstance(x, torch.optim.Optimizer) for x in _items(value)):
            remedy = "Join them by megatron_merak.optimizer.chained.Chained"
            raise ConfigError("optimizer", kind, f"it hands its parameters to other optimizers ({name})", remedy)
        plain = isinstance(value, bool | int | float | str) and not name.startswith("_")
        if plain and vars(made).get(name) != value:
            reason = f"{name} is {value!r}, and {vars(made).get(name)!r} in others of its class"
            raise ConfigError("optimizer", kind, reason, f"Let its __init__ take {name}, or keep it in its defaults")


def probe(
    prototype: torch.optim.Optimizer, options: Mapping[str, Any], dims: Iterable[int], device: torch.device
) -> Traits:
    """``dims``: how many dimensions the parameters of a group have. Raises ConfigError for a class that is of no use
    here: its steps need a closure, are random, or keep state that is not fp32 or has a shape of its own."""
    kind, alone, elementwise, state = type(prototype).__name__, True, True, {}
    own = {**options, "lr": 0.01}
    with torch.random.fork_rng(devices=()), torch.enable_grad():
        torch.default_generator.manual_seed(1234)
        for count in sorted({max(each, 1) for each in dims}):
            shape = _EXTENTS[:count]
            values, grads = _random(shape, device, 0), [_random(shape, device, step + 1) for step in range(3)]
            others, other_grads = _random(shape, device, 7), [_random(shape, device, step + 8) for step in range(3)]
            try:
                (after,), made = _run(prototype, own, [values], [grads])
                (again, _), _ = _run(prototype, own, [values, others], [grads, other_grads])
                (repeated,), _ = _run(prototype, own, [values], [grads])
            except ConfigError:
                raise
            except Exception as error:
                raise ConfigError("optimizer", kind, f"a step of it fails: {_told(error)}", _OWN) from error
            if not torch.equal(after, repeated):
                raise ConfigError("optimizer", kind, "its steps are random, and ranks would drift apart", _OWN)
            check_remade(prototype, made)
            alone &= _same(after, again)
            elementwise &= _is_elementwise(prototype, own, values, grads, after)
            state[count] = _entries(kind, made, shape)
    return Traits(elementwise and alone, alone, state)


def _run(
    prototype: torch.optim.Optimizer, options: Mapping, values: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]
) -> tuple[list[Tensor], torch.optim.Optimizer]:
    parameters = [nn.Parameter(value.clone()) for value in values]
    made = remake(prototype, [{**options, "params": parameters}])
    for step, scale in enumerate(_SCALES):
        for parameter, own in zip(parameters, grads, strict=True):
            parameter.grad = scale * own[step]
        made.step()
    return [parameter.detach() for parameter in parameters], made


def _is_elementwise(
    prototype: torch.optim.Optimizer, options: Mapping, values: Tensor, grads: Sequence[Tensor], after: Tensor
) -> bool:
    """Whether two parts of the parameter, and zeros beside them, come to the same."""
    cut, zeros = values.numel() // 2, torch.zeros(4, device=values.device)
    flat, parts = [grad.flatten() for grad in grads], [values.flatten()[:cut], values.flatten()[cut:], zeros]
    of_parts = [[grad[:cut] for grad in flat], [grad[cut:] for grad in flat], [zeros] * len(flat)]
    try:
        (first, second, none), _ = _run(prototype, options, parts, of_parts)
    except Exception:
        return False
    return _same(torch.cat((first, second)), after.flatten()) and torch.equal(none, zeros)


def _entries(kind: str, made: torch.optim.Optimizer, shape: tuple[int, ...]) -> dict[str, Entry]:
    (parameter,) = made.param_groups[0]["params"]
    found = {}
    for key, value in made.state[parameter].items():
        if value is None:
            continue
        if isinstance(value, bool | int | float):
            found[key] = Entry(False, dtype=_WIDE[type(value)], number=type(value))
            continue
        if not isinstance(value, Tensor) or any(extent not in (1, *shape) for extent in value.shape):
            told = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            reason = f"its state {key!r} of a parameter of shape {shape} is {told}, which no shards can be cut from"
            raise ConfigError("optimizer", kind, reason, _OWN)
        alike = tuple(value.shape) == shape
        if alike and value.dtype != torch.float32:
            reason = f"its state {key!r} is {str(value.dtype).removeprefix('torch.')}, and state is kept in fp32"
            raise ConfigError("optimizer", kind, reason, "Take the variant of it that keeps 32 bits")
        dims = tuple(None if extent == 1 else shape.index(extent) for extent in value.shape)
        found[key] = Entry(alike, dims, value.dtype, placed=value.device.type == parameter.device.type)
    return found


_WIDE = {bool: torch.bool, int: torch.int64, float: torch.float64}


def _random(shape: Sequence[int], device: torch.device, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
