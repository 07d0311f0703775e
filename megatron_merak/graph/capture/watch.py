"""What a trace does not show by itself: custom Functions, gradient hooks and random numbers drawn by the host."""

import pickle
import random
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import _disable_current_modes

from megatron_merak.graph.ir.opaque import Opaque, forward_of, keep_functions

_LARGEST = 1 << 22  # values in one tensor that a check of a Function is worth
_SIZES = (2, 3, 4, 5, 6, 7)
_GENERATORS = (random.Random, numpy.random.RandomState)
_CLOCKS = ("time", "time_ns", "perf_counter", "monotonic", "process_time")
_STANDARD = sysconfig.get_path("stdlib")
_NO_DRAWS = ("seed", "getstate", "setstate", "get_state", "set_state")


@dataclass(frozen=True)
class Like:
    """A tensor argument, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class Seen:
    """functions: each custom Function that was applied and the values it was applied to -> how its own gradient differs
    from that of its forward's operations. opaque: those that differ. hooked, drawn: lines that put a gradient hook on a
    tensor or drew a random number on the host. reseeded: lines that set torch's seed. clocked: lines that read the
    clock. seeded: the model sets the host's seed itself. outputs: what the traced outputs are called."""

    opaque: Opaque
    functions: dict[tuple[type[Function], str], str] = field(default_factory=dict)
    hooked: list[str] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)
    reseeded: list[str] = field(default_factory=list)
    clocked: list[str] = field(default_factory=list)
    seeded: bool = False
    outputs: list[str] = field(default_factory=list)


@contextmanager
def watch() -> Iterator[Seen]:
    """Record what happens in a trace; the host's random generators are as before afterwards, torch's seed is not set.

    A custom Function is traced through where autograd makes its own backward of its forward, and else kept as it is.
    """
    before = _state()
    hook, seed, generator = Tensor.register_hook, numpy.random.seed, numpy.random.default_rng

    def hooked(tensor: Tensor, *args: Any) -> Any:
        seen.hooked.append(place())
        return hook(tensor, *args)

    def seeded(*args: Any) -> None:
        seen.seeded = True
        seed(*args)

    def reseeded(value: int) -> torch.Generator:
        seen.reseeded.append(place())
        return torch.default_generator

    def made(seed: Any = None) -> numpy.random.Generator:
        if seed is None:
            seen.drawn.append(place())
        return generator(seed)

    def compare() -> None:
        """A name that was imported before is not replaced."""
        if not (seen.drawn or seen.seeded) and pickle.dumps(before) != pickle.dumps(_state()):
            seen.drawn.append("its forward")
        random.setstate(before[0])
        numpy.random.set_state(before[1])

    def drawing(draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            if not seen.seeded:
                seen.drawn.append(place())
            return draw(*args, **kwargs)

        return drawn

    with ExitStack() as patches:
        seen = Seen(patches.enter_context(keep_functions()))
        patches.callback(compare)
        patches.enter_context(mock.patch.object(Function, "apply", _applied(seen)))
        patches.enter_context(mock.patch.object(Tensor, "register_hook", hooked))
        patches.enter_context(mock.patch.object(numpy.random, "seed", seeded))
        patches.enter_context(mock.patch.object(numpy.random, "default_rng", made))
        patches.enter_context(mock.patch.object(torch, "manual_seed", reseeded))
        for owner, name in _draws():
            patches.enter_context(mock.patch.object(owner, name, drawing(getattr(owner, name))))
        for name in _CLOCKS:
            patches.enter_context(mock.patch.object(time, name, _reading(getattr(time, name), seen)))
        yield seen


def _reading(read: Callable[[], Any], seen: Seen) -> Callable[[], Any]:
    def clocked() -> Any:
        path = sys._getframe(1).f_code.co_filename
        if not _foreign(path) and ("site-packages" in path or not path.startswith(_STANDARD)):
            seen.clocked.append(place())
        return read()

    return clocked


def _state() -> tuple[Any, Any]:
    return random.getstate(), numpy.random.get_state()


def _draws() -> list[tuple[Any, str]]:
    """(module, name) of every function that draws from the host's generators."""
    every = [(random, name) for name in random.__all__] + [(numpy.random, name) for name in numpy.random.__all__]
    bound = [(owner, name) for owner, name in every if isinstance(_owner(owner, name), _GENERATORS)]
    return [(owner, name) for owner, name in bound if name not in _NO_DRAWS]


def _owner(module: Any, name: str) -> Any:
    return getattr(getattr(module, name), "__self__", None)


def _applied(seen: Seen) -> Any:
    """``Function.apply`` while a model is traced."""
    apply, inside = Function.__dict__["apply"].__func__, [False]

    def applied(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        custom = cls.__module__ == "torch._library.autograd"  # the graph holds such an operation, gradient and all
        if custom or inside[0]:
            return apply(cls, *args, **kwargs)
        held = tuple(Like(tuple(a.shape), a.dtype) if isinstance(a, Tensor) else a for a in args)
        key = (cls, repr((held, kwargs)))
        inside[0] = True
        try:
            if key not in seen.functions:
                with _disable_current_modes(), torch._C.DisableTorchFunction():
                    seen.functions[key] = "it takes keyword arguments" if kwargs else _difference(cls, held)
            if seen.functions[key]:
                return seen.opaque.apply(cls, args, kwargs)
        finally:
            inside[0] = False
        return apply(cls, *args, **kwargs)

    return classmethod(applied)


def place(error: BaseException | None = None) -> str:
    """The model's own line in the current stack, or where ``error`` was raised: "file:line in function: code"."""
    frames = traceback.extract_tb(error.__traceback__) if error else traceback.extract_stack()[:-2]
    own = [f for f in frames if not _foreign(f.filename)]
    frame = own[-1] if own else frames[-1] if frames else None
    return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" if frame else "an unknown line"


def _foreign(path: str) -> bool:
    parts = path.replace("\\", "/").split("/")
    return "torch" in parts or "megatron_merak" in parts or path.startswith("<") or "contextlib.py" in parts


def function_notes(seen: Seen) -> tuple[str, ...]:
    """One sentence per custom Function that was applied."""
    notes: dict[str, None] = {}
    for (cls, _), difference in seen.functions.items():
        name = f"{cls.__module__}.{cls.__qualname__}"
        if difference:
            note = f"{name} is computed as it is, replicated on every rank, for its backward is its own: {difference}."
        else:
            note = f"The gradient of {name} is taken from its forward's operations, which give the same."
        notes[note] = None
    return tuple(notes)


def _difference(cls: type[Function], args: tuple[Any, ...]) -> str:
    """Nothing if the Function's gradients are those of its forward, else why not, or why that cannot be told.

    Both are computed here, in fp64 on random values of several ranges.
    """
    like = [a for a in args if isinstance(a, Like)]
    extents = sorted({n for a in like for n in a.shape if n > 1})
    small = {n: min(n, _SIZES[i % len(_SIZES)]) for i, n in enumerate(extents)}
    why = "no values of its arguments' shapes could be tried"
    for sizes in (small, {n: n for n in extents}):
        if any(torch.Size(sizes.get(n, n) for n in a.shape).numel() > _LARGEST for a in like):
            continue
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                compared, worst = 0, 0.0
                for trial in range(10):
                    error = _compare(cls, args, sizes, trial)
                    compared += error is not None
                    worst = max(worst, error or 0.0)
        except Exception as error:  # whatever the user's code raises for values that it was not made for
            text = " ".join(str(error).split())[:200]
            why = f"the two could not be compared ({type(error).__name__}: {text})"
            continue
        if not compared:
            return "no random values gave finite results"
        return f"the two differ by {worst:.1e} of the largest gradient" if worst > 1e-6 else ""
    return why


def _compare(cls: type[Function], args: tuple[Any, ...], sizes: dict[int, int], trial: int) -> float | None:
    """Largest relative difference between the two gradients in one trial; None where the forward is not finite."""
    results = []
    for own in (True, False):
        generator = torch.Generator().manual_seed(trial)
        made = [_draw(a, sizes, trial, generator) if isinstance(a, Like) else a for a in args]
        torch.default_generator.manual_seed(trial)
        outputs = cls.apply(*made) if own else forward_of(cls, tuple(made), {})[0]
        outputs = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if isinstance(o, Tensor)]
        outputs = [o for o in outputs if o.is_floating_point()]
        if not all(o.isfinite().all() for o in outputs):
            return None
        scale = (1.0, 1e6, 1e-6)[trial % 3]  # some Functions bound what comes back
        weights = [scale * torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outputs]
        total = sum(((o.double() * w).sum() for o, w in zip(outputs, weights, strict=True)), torch.zeros(()).double())
        inputs = [m for m in made if isinstance(m, Tensor) and m.requires_grad]
        grads = torch.autograd.grad(total, inputs, allow_unused=True) if total.requires_grad else (None,) * len(inputs)
        pairs = zip(grads, inputs, strict=True)
        results.append([torch.zeros_like(x) if g is None else g for g, x in pairs] + [o.detach() for o in outputs])
    return max((_distance(a, b) for a, b in zip(*results, strict=True)), default=0.0)


def _distance(a: Tensor, b: Tensor) -> float:
    if not (a.isfinite() == b.isfinite()).all():
        return float("inf")
    a, b = a.nan_to_num(), b.nan_to_num()
    return ((a - b).abs().max() / (a.abs().max() + 1e-30)).item() if a.numel() else 0.0


def _draw(like: Like, sizes: dict[int, int], trial: int, generator: torch.Generator) -> Tensor:
    shape = [sizes.get(n, n) for n in like.shape]
    if like.dtype.is_complex:
        raise TypeError("complex arguments")
    if not like.dtype.is_floating_point:
        return torch.randint(0, 2, shape, generator=generator).to(like.dtype)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    scale = (1.0, 1.0, 1e-8, 1e4, 0.0)[trial % 5]
    values = normal * scale if trial < 5 else normal.abs() * scale
    return values.requires_grad_()
