"""Watches a trace for what it does not record: custom Functions, gradient hooks, host random
numbers, the clock.
"""

import pickle
import random
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import _disable_current_modes

from megatron_merak.graph.capture.overriding import overriding
from megatron_merak.graph.ir.opaque import Opaque, forward_of, keep_functions

_LARGEST = 1 << 22  # elements; Functions with a larger argument are not checked
_SIZES = (2, 3, 4, 5, 6, 7)
_GENERATORS = (random.Random, numpy.random.RandomState)
_CLOCKS = ("time", "time_ns", "perf_counter", "monotonic", "process_time")
_STANDARD = sysconfig.get_path("stdlib")
_NO_DRAWS = ("seed", "getstate", "setstate", "get_state", "set_state")


@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of a tensor argument."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class TraceEvents:
    """What a forward did during a trace. Lines are those of the model's code.

    opaque:    the custom Functions that are kept as single nodes.
    functions: (custom Function, its arguments) -> how its backward differs from the gradient of its
               forward's operations; "" if it does not.
    hooked:    lines that put a gradient hook on a tensor.
    drawn:     lines that drew a random number on the host.
    reseeded:  lines that set torch's seed.
    clocked:   lines that read the clock.
    seeded:    whether the model sets the host's seed itself.
    """

    opaque: Opaque
    functions: dict[tuple[type[Function], str], str] = field(default_factory=dict)
    hooked: list[str] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)
    reseeded: list[str] = field(default_factory=list)
    clocked: list[str] = field(default_factory=list)
    seeded: bool = False


@contextmanager
def watch() -> Iterator[TraceEvents]:
    """Record what happens in a trace. Restores the host's random generators afterwards; torch's
    seed is not changed.

    A custom Function is traced through if its backward equals the gradient of its forward, else
    kept as a single node. What other threads do meanwhile (loggers, downloads, prefetching) is not
    the model's, and is not recorded.
    """
    before = _state()
    here = threading.get_ident()
    others_drew = False
    hook = Tensor.register_hook
    seed = numpy.random.seed
    generator = numpy.random.default_rng
    reseed = torch.manual_seed

    def elsewhere() -> bool:
        return threading.get_ident() != here

    def hooked(tensor: Tensor, *args: Any) -> Any:
        if not elsewhere():
            events.hooked.append(model_line())
        return hook(tensor, *args)

    def seeded(*args: Any) -> None:
        nonlocal others_drew
        if elsewhere():
            others_drew = True
        else:
            events.seeded = True
        seed(*args)

    def reseeded(value: int) -> torch.Generator:
        if elsewhere():
            return reseed(value)
        events.reseeded.append(model_line())
        return torch.default_generator

    def default_rng(seed: Any = None) -> numpy.random.Generator:
        if seed is None and not elsewhere():
            events.drawn.append(model_line())
        return generator(seed)

    def compare() -> None:
        """Compare generator states too, since functions that the model imported by name are not
        patched.
        """
        known = events.drawn or events.seeded or others_drew
        if not known and pickle.dumps(before) != pickle.dumps(_state()):
            events.drawn.append("its forward")
        random.setstate(before[0])
        numpy.random.set_state(before[1])

    def drawing(draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            nonlocal others_drew
            if elsewhere():
                others_drew = True
            elif not events.seeded:
                events.drawn.append(model_line())
            return draw(*args, **kwargs)

        return drawn

    with ExitStack() as patches:
        events = TraceEvents(patches.enter_context(keep_functions()))
        patches.callback(compare)
        patches.enter_context(overriding(Function, "apply", _patched_apply(events)))
        patches.enter_context(overriding(Tensor, "register_hook", hooked))
        patches.enter_context(overriding(numpy.random, "seed", seeded))
        patches.enter_context(overriding(numpy.random, "default_rng", default_rng))
        patches.enter_context(overriding(torch, "manual_seed", reseeded))
        for owner, name in _drawing_functions():
            patches.enter_context(overriding(owner, name, drawing(getattr(owner, name))))
        for name in _CLOCKS:
            patches.enter_context(overriding(time, name, _watch_clock(getattr(time, name), events)))
        yield events


def _watch_clock(read: Callable[[], Any], events: TraceEvents) -> Callable[[], Any]:
    here = threading.get_ident()

    def clocked() -> Any:
        path = sys._getframe(1).f_code.co_filename
        own = threading.get_ident() == here and not _is_library(path)
        if own and ("site-packages" in path or not path.startswith(_STANDARD)):
            events.clocked.append(model_line())
        return read()

    return clocked


def _state() -> tuple[Any, Any]:
    return random.getstate(), numpy.random.get_state()


def _drawing_functions() -> list[tuple[Any, str]]:
    """Return (module, name) of every function that draws from the host's generators."""
    every = [(random, name) for name in random.__all__] + [
        (numpy.random, name) for name in numpy.random.__all__
    ]
    bound = [
        (owner, name)
        for owner, name in every
        if isinstance(_generator_of(owner, name), _GENERATORS)
    ]
    return [(owner, name) for owner, name in bound if name not in _NO_DRAWS]


def _generator_of(module: Any, name: str) -> Any:
    return getattr(getattr(module, name), "__self__", None)


def _patched_apply(events: TraceEvents) -> Any:
    """Return the ``Function.apply`` to use while a model is traced."""
    # As it is stored: ``Function.apply`` is bound to Function, whatever class it is called for.
    apply = Function.__dict__["apply"].__func__
    here = threading.get_ident()
    inside = [False]

    def applied(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        # The graph contains operations of torch.library as they are, with their gradient.
        custom = cls.__module__ == "torch._library.autograd"
        if custom or inside[0] or threading.get_ident() != here:
            return apply(cls, *args, **kwargs)
        specs = tuple(
            TensorSpec(tuple(a.shape), a.dtype) if isinstance(a, Tensor) else a for a in args
        )
        key = (cls, repr((specs, kwargs)))
        inside[0] = True
        try:
            if key not in events.functions:
                with _disable_current_modes(), torch._C.DisableTorchFunction():
                    events.functions[key] = (
                        "it takes keyword arguments" if kwargs else _gradient_difference(cls, specs)
                    )
            if events.functions[key]:
                return events.opaque.apply(cls, args, kwargs)
        finally:
            inside[0] = False
        return apply(cls, *args, **kwargs)

    return classmethod(applied)


def model_line(error: BaseException | None = None) -> str:
    """Return the model's line in the current stack, or where ``error`` was raised: "file:line in
    function: code".
    """
    frames = traceback.extract_tb(error.__traceback__) if error else traceback.extract_stack()[:-2]
    own = [f for f in frames if not _is_library(f.filename)]
    frame = own[-1] if own else frames[-1] if frames else None
    return (
        f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
        if frame
        else "an unknown line"
    )


def _is_library(path: str) -> bool:
    parts = path.replace("\\", "/").split("/")
    return (
        "torch" in parts
        or "megatron_merak" in parts
        or path.startswith("<")
        or "contextlib.py" in parts
    )


def function_notes(events: TraceEvents) -> tuple[str, ...]:
    """Return one sentence per custom Function that was applied."""
    notes: dict[str, None] = {}
    for (cls, _), difference in events.functions.items():
        name = f"{cls.__module__}.{cls.__qualname__}"
        if difference:
            note = (
                f"{name} is computed as it is, replicated on every rank, for its backward is "
                f"its own: {difference}."
            )
        else:
            note = (
                f"The gradient of {name} is taken from its forward's operations, which give "
                "the same."
            )
        notes[note] = None
    return tuple(notes)


def _gradient_difference(cls: type[Function], args: tuple[Any, ...]) -> str:
    """Return "" if a Function's backward is the gradient of its forward, else how it differs or why
    that is unknown.

    Both are computed in fp64 on random values of several ranges.
    """
    tensors = [a for a in args if isinstance(a, TensorSpec)]
    extents = sorted({n for a in tensors for n in a.shape if n > 1})
    small = {n: min(n, _SIZES[i % len(_SIZES)]) for i, n in enumerate(extents)}
    why = "no values of its arguments' shapes could be tried"
    for sizes in (small, {n: n for n in extents}):
        if any(torch.Size(sizes.get(n, n) for n in a.shape).numel() > _LARGEST for a in tensors):
            continue
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                compared = 0
                worst = 0.0
                for trial in range(10):
                    error = _max_error(cls, args, sizes, trial)
                    compared += error is not None
                    worst = max(worst, error or 0.0)
        except Exception as error:  # whatever the user's code raises for unusual values
            text = " ".join(str(error).split())[:200]
            why = f"the two could not be compared ({type(error).__name__}: {text})"
            continue
        if not compared:
            return "no random values gave finite results"
        return f"the two differ by {worst:.1e} of the largest gradient" if worst > 1e-6 else ""
    return why


def _max_error(
    cls: type[Function], args: tuple[Any, ...], sizes: dict[int, int], trial: int
) -> float | None:
    """Return the largest relative difference of the two gradients in one trial; None if the forward
    is not finite.
    """
    results = []
    for own in (True, False):
        generator = torch.Generator().manual_seed(trial)
        values = [
            _random_values(a, sizes, trial, generator) if isinstance(a, TensorSpec) else a
            for a in args
        ]
        torch.default_generator.manual_seed(trial)
        outputs = cls.apply(*values) if own else forward_of(cls, tuple(values), {})[0]
        outputs = [
            o
            for o in (outputs if isinstance(outputs, tuple) else (outputs,))
            if isinstance(o, Tensor)
        ]
        outputs = [o for o in outputs if o.is_floating_point()]
        if not all(o.isfinite().all() for o in outputs):
            return None
        scale = (1.0, 1e6, 1e-6)[trial % 3]  # some Functions clamp the gradient that they receive
        weights = [
            scale * torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outputs
        ]
        total = sum(
            ((o.double() * w).sum() for o, w in zip(outputs, weights, strict=True)),
            torch.zeros(()).double(),
        )
        inputs = [m for m in values if isinstance(m, Tensor) and m.requires_grad]
        grads = (
            torch.autograd.grad(total, inputs, allow_unused=True)
            if total.requires_grad
            else (None,) * len(inputs)
        )
        pairs = zip(grads, inputs, strict=True)
        results.append(
            [torch.zeros_like(x) if g is None else g for g, x in pairs]
            + [o.detach() for o in outputs]
        )
    return max((_relative_error(a, b) for a, b in zip(*results, strict=True)), default=0.0)


def _relative_error(a: Tensor, b: Tensor) -> float:
    if not (a.isfinite() == b.isfinite()).all():
        return float("inf")
    a = a.nan_to_num()
    b = b.nan_to_num()
    return ((a - b).abs().max() / (a.abs().max() + 1e-30)).item() if a.numel() else 0.0


def _random_values(
    like: TensorSpec, sizes: dict[int, int], trial: int, generator: torch.Generator
) -> Tensor:
    shape = [sizes.get(n, n) for n in like.shape]
    if like.dtype.is_complex:
        raise TypeError("complex arguments")
    if not like.dtype.is_floating_point:
        return torch.randint(0, 2, shape, generator=generator).to(like.dtype)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    scale = (1.0, 1.0, 1e-8, 1e4, 0.0)[trial % 5]
    values = normal * scale if trial < 5 else normal.abs() * scale
    return values.requires_grad_()
