"""Determines the properties of a class of PyTorch optimizers by running it on small random
parameters.

A user's class does not declare whether shards of a parameter can be stepped independently, or what
its state is. A few steps on random parameters show it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError

# distinct, so that a dimension of state identifies one of the parameter
_EXTENTS = (3, 5, 2, 7, 11, 13, 17)
_SCALES = (0.1, 1.0, 100.0)  # of the gradients of three steps
_NO_OPTIONS = ("params", "param_names", "initial_lr")
_OWN = "Give one of torch.optim's, or one that steps each parameter by its own gradient"


@dataclass(frozen=True)
class StateEntry:
    """The description of one entry of a parameter's state.

    param_shaped: whether it has the shape of the parameter.
    dims:         per dimension, the parameter's dimension of the same size; None for size 1.
    dtype:        of the tensor.
    number:       the Python type, if it is a number and not a tensor.
    placed:       whether it is on the parameter's device.
    """

    param_shaped: bool
    dims: tuple[int | None, ...] = ()
    dtype: torch.dtype = torch.float32
    number: type | None = None
    placed: bool = False

    def zeros(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return a tensor to load the entry into, for a parameter of ``shape``."""
        return torch.zeros(
            self._extents(shape), dtype=self.dtype, device=device if self.placed else "cpu"
        )

    def nbytes(self, shape: Sequence[int]) -> int:
        return prod(self._extents(shape)) * self.dtype.itemsize

    def _extents(self, shape: Sequence[int]) -> list[int]:
        return [1 if dim is None else (*shape, 1)[dim] for dim in self.dims]

    def stored(self, value: Any) -> Tensor:
        """Convert a value of the optimizer's state to a tensor to save; a copy."""
        return torch.tensor(value, dtype=self.dtype) if self.number else value.detach().clone()

    def live(self, stored: Tensor) -> Any:
        """Convert a saved tensor back to a value of the optimizer's state; a copy."""
        return self.number(stored.item()) if self.number else stored.clone()


@dataclass(frozen=True)
class Traits:
    """Properties of an optimizer class.

    elementwise: an element's update depends only on that element's own history, and is zero for
                 zeros.
    independent: a parameter's update does not depend on other parameters.
    state:       the entries of a parameter, by its number of dimensions.
    """

    elementwise: bool
    independent: bool
    state: Mapping[int, Mapping[str, StateEntry]]


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a group of ``param_groups``."""
    return {name: value for name, value in group.items() if name not in _NO_OPTIONS}


def remake(
    prototype: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]
) -> torch.optim.Optimizer:
    """Return an optimizer like ``prototype`` for other parameters. Raises ConfigError where that
    fails.
    """
    kind = type(prototype)
    settings = {**vars(prototype), **prototype.defaults}
    keywords = [name for name in signature(kind.__init__).parameters if name in settings]
    try:
        return kind(
            [dict(group) for group in groups], **{name: settings[name] for name in keywords}
        )
    except Exception as error:
        reason = f"it cannot be made for shards of the parameters: {_message(error)}"
        remedy = "Let its __init__ take param_groups, and its defaults as keywords"
        raise ConfigError("optimizer", kind.__name__, reason, remedy) from error


def check_remade(prototype: torch.optim.Optimizer, remade: torch.optim.Optimizer) -> None:
    """Raise ConfigError where ``remade``, the result of `remake`, would behave differently from
    ``prototype``.
    """
    kind = type(prototype).__name__
    hooks = (prototype._optimizer_step_pre_hooks, prototype._optimizer_step_post_hooks)
    if any(hooks):
        raise ConfigError(
            "optimizer",
            kind,
            "it has hooks, which others like it have not",
            "Use a callback instead",
        )
    if callable(getattr(prototype, "train", None)) and callable(getattr(prototype, "eval", None)):
        reason = (
            "it has a train() and an eval(): its weights in an evaluation are others than "
            "in training"
        )
        raise ConfigError("optimizer", kind, reason, "Take one whose weights are the same in both")
    for name, value in vars(prototype).items():
        if isinstance(value, torch.optim.Optimizer) or any(
            isinstance(x, torch.optim.Optimizer) for x in _items(value)
        ):
            remedy = "Join them by megatron_merak.optimizer.chained.Chained"
            raise ConfigError(
                "optimizer", kind, f"it hands its parameters to other optimizers ({name})", remedy
            )
        plain = isinstance(value, bool | int | float | str) and not name.startswith("_")
        if plain and vars(remade).get(name) != value:
            reason = f"{name} is {value!r}, and {vars(remade).get(name)!r} in others of its class"
            raise ConfigError(
                "optimizer",
                kind,
                reason,
                f"Let its __init__ take {name}, or keep it in its defaults",
            )


def probe(
    prototype: torch.optim.Optimizer,
    options: Mapping[str, Any],
    dims: Iterable[int],
    device: torch.device,
) -> Traits:
    """Return the traits of an optimizer with the hyperparameters ``options``.

    dims: the numbers of dimensions of its parameters.

    Raises ConfigError for an unsupported class: one whose steps need a closure or are random, or
    whose state is not fp32 or has a shape that does not follow from the parameter's.
    """
    kind = type(prototype).__name__
    independent = True
    elementwise = True
    state = {}
    own = {**options, "lr": 0.01}
    with torch.random.fork_rng(devices=()), torch.enable_grad():
        torch.default_generator.manual_seed(1234)
        for count in sorted({max(each, 1) for each in dims}):
            shape = _EXTENTS[:count]
            values = _random(shape, device, 0)
            grads = [_random(shape, device, step + 1) for step in range(3)]
            others = _random(shape, device, 7)
            other_grads = [_random(shape, device, step + 8) for step in range(3)]
            try:
                (after,), remade = _run(prototype, own, [values], [grads])
                (beside_others, _), _ = _run(prototype, own, [values, others], [grads, other_grads])
                (repeated,), _ = _run(prototype, own, [values], [grads])
            except ConfigError:
                raise
            except Exception as error:
                raise ConfigError(
                    "optimizer", kind, f"a step of it fails: {_message(error)}", _OWN
                ) from error
            if not torch.equal(after, repeated):
                raise ConfigError(
                    "optimizer", kind, "its steps are random, and ranks would drift apart", _OWN
                )
            check_remade(prototype, remade)
            independent &= _close(after, beside_others)
            elementwise &= _is_elementwise(prototype, own, values, grads, after=after)
            state[count] = _entries(kind, remade, shape)
    return Traits(elementwise and independent, independent, state)


def _run(
    prototype: torch.optim.Optimizer,
    options: Mapping,
    values: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
) -> tuple[list[Tensor], torch.optim.Optimizer]:
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = remake(prototype, [{**options, "params": parameters}])
    for step, scale in enumerate(_SCALES):
        for parameter, own in zip(parameters, grads, strict=True):
            parameter.grad = scale * own[step]
        optimizer.step()
    return [parameter.detach() for parameter in parameters], optimizer


def _is_elementwise(
    prototype: torch.optim.Optimizer,
    options: Mapping,
    values: Tensor,
    grads: Sequence[Tensor],
    after: Tensor,
) -> bool:
    """Whether stepping two parts of the parameter, and zeros beside them, gives the same result."""
    cut = values.numel() // 2
    zeros = torch.zeros(4, device=values.device)
    flat = [grad.flatten() for grad in grads]
    parts = [values.flatten()[:cut], values.flatten()[cut:], zeros]
    of_parts = [[grad[:cut] for grad in flat], [grad[cut:] for grad in flat], [zeros] * len(flat)]
    try:
        (first, second, none), _ = _run(prototype, options, parts, of_parts)
    except Exception:
        return False
    return _close(torch.cat((first, second)), after.flatten()) and torch.equal(none, zeros)


def _entries(
    kind: str, optimizer: torch.optim.Optimizer, shape: tuple[int, ...]
) -> dict[str, StateEntry]:
    (parameter,) = optimizer.param_groups[0]["params"]
    entries = {}
    for key, value in optimizer.state[parameter].items():
        if value is None:
            continue
        if isinstance(value, bool | int | float):
            entries[key] = StateEntry(False, dtype=_STORED_DTYPES[type(value)], number=type(value))
            continue
        if not isinstance(value, Tensor) or any(
            extent not in (1, *shape) for extent in value.shape
        ):
            actual = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            reason = (
                f"its state {key!r} of a parameter of shape {shape} is {actual}, which no "
                "shards can be cut from"
            )
            raise ConfigError("optimizer", kind, reason, _OWN)
        param_shaped = tuple(value.shape) == shape
        if param_shaped and value.dtype != torch.float32:
            reason = (
                f"its state {key!r} is {str(value.dtype).removeprefix('torch.')}, and state "
                "is kept in fp32"
            )
            raise ConfigError(
                "optimizer", kind, reason, "Take the variant of it that keeps 32 bits"
            )
        dims = tuple(None if extent == 1 else shape.index(extent) for extent in value.shape)
        entries[key] = StateEntry(
            param_shaped, dims, value.dtype, placed=value.device.type == parameter.device.type
        )
    return entries


_STORED_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


def _random(shape: Sequence[int], device: torch.device, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _close(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=1e-5, atol=1e-6)


def _items(value: Any) -> Iterable[Any]:
    return (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    )


def _message(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
