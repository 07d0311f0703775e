"""Modules with data-dependent control flow, such as a loop over the chosen experts, captured as
single nodes.

Such a node runs the module's own eager code, replicated on every rank.
"""

import gc
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatron_merak.errors import TraceError
from megatron_merak.graph.capture.overriding import overriding
from megatron_merak.graph.ir.opaque import (
    CustomFunction,
    Opaque,
    SideEffects,
    sharing,
    without_tensors,
)

_CONSTANT = (bool, int, float, str, torch.dtype, torch.device, type(None))


class DataDependentForward(TraceError):
    """The forward branches on values, inside modules of the classes named ``around``, innermost
    first.
    """

    def __init__(self, model: str, reason: str, remedy: str, around: Sequence[str]):
        super().__init__("model", model, reason, remedy)
        self.around = tuple(around)


class CannotKeepModule(TraceError):
    """The modules of a class cannot be captured as single nodes."""


@dataclass(frozen=True)
class EagerModules:
    """The names of module classes to capture as single nodes, ``chosen``, and of those that cannot
    be, ``refused``.
    """

    chosen: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    def with_innermost(
        self, model: nn.Module, error: DataDependentForward
    ) -> "EagerModules | None":
        """Return a copy that also has the innermost class around ``error`` that may be kept; None
        if there is none.
        """
        classes = {title(type(m)): type(m) for m in model.modules()}
        for name in error.around:
            if (
                name in classes
                and name not in self.refused + self.chosen
                and _may_be_kept(classes[name], model)
            ):
                return replace(self, chosen=(*self.chosen, name))
        return None

    def refusing(self, error: CannotKeepModule) -> "EagerModules":
        name = str(error.value)
        return EagerModules(tuple(x for x in self.chosen if x != name), (*self.refused, name))

    def notes(self, reasons: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(
            f"{name} runs as it is, replicated on every rank: {reasons[name]}."
            for name in self.chosen
        )


def title(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def around_error(error: BaseException) -> list[str]:
    """Return the names of the classes of the modules in whose methods an error was raised,
    innermost first.
    """
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return list(dict.fromkeys(title(type(x)) for x in reversed(owners) if isinstance(x, nn.Module)))


def around_node(node: Node) -> list[str]:
    """Return the names of the classes of the modules that a node was traced in, innermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return [cls if isinstance(cls, str) else title(cls) for _, cls in reversed(stack.values())]


def _may_be_kept(cls: type, model: nn.Module) -> bool:
    """Whether modules of a class may be captured as single nodes, which every rank runs in full.

    Not so for classes of torch, for whole models, and for a module with most of the parameters: the
    model would then hardly be distributed.
    """
    from transformers import PreTrainedModel

    if (
        cls.__module__.startswith("torch.")
        or issubclass(cls, PreTrainedModel)
        or isinstance(model, cls)
    ):
        return False
    largest = max(_numel(m) for m in model.modules() if type(m) is cls)
    return 2 * largest <= _numel(model)


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@contextmanager
def keep_modules(model: nn.Module, eager: EagerModules, opaque: Opaque) -> Iterator[None]:
    """Capture modules of the chosen classes as single nodes, inside the context."""
    classes = {title(type(m)): type(m) for m in model.modules()}
    inside = [False]
    probes: dict[Any, Any] = {}
    with ExitStack() as patches:
        for name in eager.chosen:
            cls = classes[name]
            patches.enter_context(
                overriding(cls, "forward", _patched_forward(cls, opaque, inside, probes))
            )
        yield


def _patched_forward(
    cls: type[nn.Module], opaque: Opaque, inside: list[bool], probes: dict[Any, Any]
) -> Callable[..., Any]:
    original = cls.forward

    @wraps(original)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if inside[0]:
            return original(module, *args, **kwargs)
        inside[0] = True
        try:
            return _run_as_node(module, args, kwargs, opaque, probes=probes)
        finally:
            inside[0] = False

    return forward


class _Forward(nn.Module):
    """Runs a module's forward without its hooks, which already run outside of the node."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class _Run:
    module: _Forward

    def __call__(
        self, state: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return functional_call(self.module, state, args, kwargs)


def _run_as_node(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    opaque: Opaque,
    probes: dict[Any, Any],
) -> Any:
    run = _Run(_Forward(module))
    state = {**dict(run.module.named_parameters()), **dict(run.module.named_buffers())}
    flat, spec = tree_flatten(((state, args, kwargs), {}))
    cls = type(module)
    if not all(isinstance(x, (Tensor, *_CONSTANT)) for x in flat):
        raise _cannot_keep(cls, "an argument is neither a tensor nor a constant")
    signature = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in flat]
    key = cls, repr((signature, spec))
    if key not in probes:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            probes[key] = _probe(run, flat, spec)
    probe: _ProbeResult = probes[key]
    mode = next(x.fake_mode for x in flat if hasattr(x, "fake_mode"))
    with _disable_current_modes(), mode:
        outputs = [torch.empty(x[0], dtype=x[1]) if x else None for x in probe.results]
    constant = [
        id(x) for x in outputs if x is not None and not (x.is_floating_point() or x.is_complex())
    ]
    custom = CustomFunction(
        run, (cls.__module__, f"{cls.__name__}_forward"), without_tensors(flat), spec
    )
    # for other values it may draw random numbers, or return tensors with a gradient
    custom.random = True
    custom.flops = probe.flops
    custom.saved_bytes = probe.saved_bytes
    return opaque.put(custom, flat, tree_unflatten(outputs, probe.spec), probe.aliased, constant)


@dataclass(frozen=True)
class _ProbeResult:
    """What a module does when it runs.

    results:     (shape, dtype) of each tensor that it returns, None for each None.
    spec:        the tree that it returns.
    aliased:     numbers of the tensor arguments whose memory its results may share.
    flops:       FLOPs of its forward.
    saved_bytes: bytes that it saves for its backward besides its arguments.
    """

    results: list[tuple[tuple[int, ...], torch.dtype] | None]
    spec: TreeSpec
    aliased: list[int]
    flops: int
    saved_bytes: int


def _probe(run: _Run, flat: list[Any], spec: TreeSpec) -> _ProbeResult:
    """Run the module on random values, with indices all 0 or all 1, and describe what it does.

    Raises CannotKeepModule if the shapes that it returns depend on values, or if it has side
    effects.
    """
    cls = type(run.module.module)
    results: list[_ProbeResult] = []
    why = ""
    for trial in range(3):
        try:
            results.append(_run_once(run, flat, spec, trial))
        except CannotKeepModule:
            raise
        except Exception as error:  # an index out of range, or code that cannot run here
            why = f"{type(error).__name__}: {error}"
    if not results:
        raise _cannot_keep(cls, f"it does not run on random values ({why[:200]})")
    if any(
        (x.results, x.spec, x.aliased) != (y.results, y.spec, y.aliased)
        for x in results
        for y in results
    ):
        raise _cannot_keep(
            cls, "the shapes, dtypes or aliasing of what it returns depend on values"
        )
    flops = max(x.flops for x in results)
    saved_bytes = max(x.saved_bytes for x in results)
    return replace(results[-1], flops=flops, saved_bytes=saved_bytes)


def _run_once(run: _Run, flat: list[Any], spec: TreeSpec, trial: int) -> _ProbeResult:
    cls = type(run.module.module)
    generator = torch.Generator().manual_seed(trial)
    values = [_random_like(x, trial % 2, generator) if isinstance(x, Tensor) else x for x in flat]
    tensors = [x for x in values if isinstance(x, Tensor)]
    before = _attributes(run.module.module)
    (state, args, kwargs), _ = tree_unflatten(values, spec)
    saved: dict[int, torch.UntypedStorage] = {}

    def save(tensor: Tensor) -> None:
        """Keep only the storage: a saved result would keep itself alive."""
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()

    with (
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(save, lambda nothing: nothing),
        SideEffects(tensors) as effects,
    ):
        outputs = run(state, args, kwargs)
    for tensor in tensors:
        saved.pop(tensor.untyped_storage()._cdata, None)
    saved_bytes = sum(storage.nbytes() for storage in saved.values())
    leaves, output_spec = tree_flatten(outputs)
    aliased = sharing(tensors, leaves)
    if not all(isinstance(x, Tensor | None) for x in leaves):
        raise _cannot_keep(cls, "it returns something that is not a tensor")
    signatures = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else None for x in leaves]
    argument_ids = dict.fromkeys(map(id, tensors))
    alive = [weakref.ref(x) for x in effects.tensors.values() if id(x) not in argument_ids]
    flops = effects.flops
    why = effects.why
    if effects.written or len(aliased) > 1:
        why = "it changes its arguments or buffers, or returns several of them"
    # Only what the module keeps may live on: no name here, and no cycle of autograd's functions.
    del outputs, leaves, effects.tensors, effects
    gc.collect()
    if any(x() is not None for x in alive) or _attributes(run.module.module) != before:
        why = why or "it keeps values outside of what it returns"
    if why:
        raise _cannot_keep(cls, why)
    return _ProbeResult(signatures, output_spec, aliased, flops, saved_bytes=saved_bytes)


def _random_like(like: Tensor, value: int, generator: torch.Generator) -> Tensor:
    if like.is_floating_point():
        return (
            torch.randn(like.shape, generator=generator).mul_(0.1).to(like.dtype).requires_grad_()
        )
    return torch.full(like.shape, value, dtype=like.dtype)


def _attributes(module: nn.Module) -> list[tuple[str, str, int]]:
    attributes = [
        (name, key, id(value))
        for name, part in module.named_modules()
        for key, value in vars(part).items()
    ]
    return sorted(attributes)


def _cannot_keep(cls: type, why: str) -> CannotKeepModule:
    return CannotKeepModule("module", title(cls), why, "Write it with tensor operations")
