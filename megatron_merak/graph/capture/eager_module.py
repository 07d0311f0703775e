"""Modules that decide by values, such as a loop over the experts that were chosen: single nodes that run them as is.

Such a node computes with the module's own code, so that its loss and gradients are the model's, whole on every rank.
"""

import gc
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatron_merak.errors import TraceError
from megatron_merak.graph.ir.opaque import CustomFunction, Look, Opaque, sharing, without_tensors

_CONSTANT = (bool, int, float, str, torch.dtype, torch.device, type(None))


class ByValue(TraceError):
    """The forward decides by values, in modules whose classes are named ``around``, innermost first."""

    def __init__(self, model: str, reason: str, remedy: str, around: Sequence[str]):
        super().__init__("model", model, reason, remedy)
        self.around = tuple(around)


class Unfit(TraceError):
    """Modules of a class cannot be single nodes."""


@dataclass(frozen=True)
class Islands:
    """The classes of modules, by name, that are traced as single nodes, and those that cannot be."""

    chosen: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()

    def grown(self, model: nn.Module, error: ByValue) -> "Islands | None":
        """With the innermost class that ``error`` is in and that may be one; None if there is none."""
        known = {title(type(m)): type(m) for m in model.modules()}
        for name in error.around:
            if name in known and name not in self.unfit + self.chosen and _may_be(known[name], model):
                return replace(self, chosen=(*self.chosen, name))
        return None

    def without(self, error: Unfit) -> "Islands":
        name = str(error.value)
        return Islands(tuple(x for x in self.chosen if x != name), (*self.unfit, name))

    def notes(self, reasons: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(f"{name} runs as it is, whole on every rank: {reasons[name]}." for name in self.chosen)


def title(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def around_error(error: BaseException) -> list[str]:
    """The classes of the modules in whose methods an error was raised, innermost first."""
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return list(dict.fromkeys(title(type(x)) for x in reversed(owners) if isinstance(x, nn.Module)))


def around_node(node: Node) -> list[str]:
    """The classes of the modules that a node was traced in, innermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return [cls if isinstance(cls, str) else title(cls) for _, cls in reversed(stack.values())]


def _may_be(cls: type, model: nn.Module) -> bool:
    """A part that someone wrote, no model within the model, and not most of it: that could not be distributed."""
    from transformers import PreTrainedModel

    if cls.__module__.startswith("torch.") or issubclass(cls, PreTrainedModel) or isinstance(model, cls):
        return False
    largest = max(_size(m) for m in model.modules() if type(m) is cls)
    return 2 * largest <= _size(model)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@contextmanager
def keep_modules(model: nn.Module, islands: Islands, opaque: Opaque) -> Iterator[None]:
    """Inside, modules of these classes are single nodes in what is traced."""
    classes = {title(type(m)): type(m) for m in model.modules()}
    inside, probes = [False], {}
    with ExitStack() as patches:
        for name in islands.chosen:
            cls = classes[name]
            patches.enter_context(mock.patch.object(cls, "forward", _kept(cls, opaque, inside, probes)))
        yield


def _kept(cls: type[nn.Module], opaque: Opaque, inside: list[bool], probes: dict[Any, Any]) -> Callable[..., Any]:
    original = cls.forward

    @wraps(original)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if inside[0]:
            return original(module, *args, **kwargs)
        inside[0] = True
        try:
            return _enter(module, args, kwargs, opaque, probes)
        finally:
            inside[0] = False

    return forward


class _Forward(nn.Module):
    """A module's forward without its hooks, which have run around the node already."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class _Run:
    module: _Forward

    def __call__(self, state: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return functional_call(self.module, state, args, kwargs)


def _enter(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], opaque: Opaque, probes: dict[Any, Any]
) -> Any:
    run = _Run(_Forward(module))
    state = {**dict(run.module.named_parameters()), **dict(run.module.named_buffers())}
    flat, arguments = tree_flatten(((state, args, kwargs), {}))
    cls = type(module)
    if not all(isinstance(x, (Tensor, *_CONSTANT)) for x in flat):
        raise _unfit(cls, "an argument is neither a tensor nor a constant")
    held = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in flat]
    key = cls, repr((held, arguments))
    if key not in probes:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            probes[key] = _probe(run, flat, arguments)
    found: _Found = probes[key]
    mode = next(x.fake_mode for x in flat if hasattr(x, "fake_mode"))
    with _disable_current_modes(), mode:
        outputs = [torch.empty(x[0], dtype=x[1]) if x else None for x in found.results]
    constant = [id(x) for x in outputs if x is not None and not (x.is_floating_point() or x.is_complex())]
    custom = CustomFunction(run, (cls.__module__, f"{cls.__name__}_forward"), without_tensors(flat), arguments)
    custom.random = True  # it may draw numbers, and return what has a gradient, for values that were not tried
    custom.flops, custom.kept = found.flops, found.kept
    return opaque.put(custom, flat, tree_unflatten(outputs, found.returned), found.shared, constant)


@dataclass(frozen=True)
class _Found:
    """results: (shape, dtype) of tensors, or None; returned: their structure; shared: the numbers of the tensors whose
    memory they may share."""

    results: list[tuple[tuple[int, ...], torch.dtype] | None]
    returned: TreeSpec
    shared: list[int]
    flops: int
    kept: int


def _probe(run: _Run, flat: list[Any], arguments: TreeSpec) -> _Found:
    """What the module returns for made-up values, indices being all 0 or all 1. Raises Unfit if that depends on them,
    or if it does more than return it."""
    cls = type(run.module.module)
    found: list[_Found] = []
    why = ""
    for trial in range(3):
        try:
            found.append(_try(run, flat, arguments, trial))
        except Unfit:
            raise
        except Exception as error:  # an index that is out of range there, or a code that cannot run
            why = f"{type(error).__name__}: {error}"
    if not found:
        raise _unfit(cls, f"it does not run on made-up values ({why[:200]})")
    if any((x.results, x.returned, x.shared) != (y.results, y.returned, y.shared) for x in found for y in found):
        raise _unfit(cls, "what it returns depends on values otherwise than by value")
    flops, kept = max(x.flops for x in found), max(x.kept for x in found)
    return replace(found[-1], flops=flops, kept=kept)


def _try(run: _Run, flat: list[Any], arguments: TreeSpec, trial: int) -> _Found:
    cls = type(run.module.module)
    generator = torch.Generator().manual_seed(trial)
    made = [_made_up(x, trial % 2, generator) if isinstance(x, Tensor) else x for x in flat]
    tensors = [x for x in made if isinstance(x, Tensor)]
    before = _attributes(run.module.module)
    (state, args, kwargs), _ = tree_unflatten(made, arguments)
    saved: dict[int, torch.UntypedStorage] = {}

    def save(tensor: Tensor) -> None:
        """Of a result, the tensor itself would keep itself alive."""
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()

    with (
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(save, lambda nothing: nothing),
        Look(tensors) as look,
    ):
        outputs = run(state, args, kwargs)
    for tensor in tensors:
        saved.pop(tensor.untyped_storage()._cdata, None)
    kept = sum(storage.nbytes() for storage in saved.values())
    results, returned = tree_flatten(outputs)
    shared = sharing(tensors, results)
    if not all(isinstance(x, Tensor | None) for x in results):
        raise _unfit(cls, "it returns something that is no tensor")
    told = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else None for x in results]
    known = dict.fromkeys(map(id, tensors))
    alive = [weakref.ref(x) for x in look.known.values() if id(x) not in known]
    flops, why = look.flops, look.why
    if look.written or len(shared) > 1:
        why = "it changes its arguments or buffers, or returns several of them"
    del outputs, results, look.known, look
    gc.collect()
    if any(x() is not None for x in alive) or _attributes(run.module.module) != before:
        why = why or "it keeps values outside of what it returns"
    if why:
        raise _unfit(cls, why)
    return _Found(told, returned, shared, flops, kept)


def _made_up(like: Tensor, value: int, generator: torch.Generator) -> Tensor:
    if like.is_floating_point():
        return torch.randn(like.shape, generator=generator).mul_(0.1).to(like.dtype).requires_grad_()
    return torch.full(like.shape, value, dtype=like.dtype)


def _attributes(module: nn.Module) -> list[tuple[str, str, int]]:
    found = [(name, key, id(value)) for name, part in module.named_modules() for key, value in vars(part).items()]
    return sorted(found)


def _unfit(cls: type, why: str) -> Unfit:
    return Unfit("module", title(cls), why, "Write it with tensor operations")
