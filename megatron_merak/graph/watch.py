"""What a trace does not show: custom autograd Functions, gradient hooks and random numbers drawn by the host."""

import random
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
from torch.autograd.function import FunctionCtx

from megatron_merak.errors import TraceError

_LARGEST = 1 << 22  # values in one tensor that a check of a Function is worth
_SIZES = (2, 3, 4, 5, 6, 7)
_PYTHON = ("random", "uniform", "gauss", "randint", "randrange", "choice", "sample", "shuffle")
_NUMPY = ("random", "rand", "randn", "uniform", "normal", "randint", "choice", "permutation", "shuffle")


@dataclass(frozen=True)
class Like:
    """A tensor argument, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class Seen:
    """functions: each custom Function that was applied, with its arguments. hooked, drawn: lines that put a gradient
    hook on a tensor or drew a random number on the host. seeded: the model sets the host's seed itself."""

    functions: dict[tuple[type[Function], str], tuple[Any, ...]] = field(default_factory=dict)
    hooked: list[str] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)
    seeded: bool = False


@contextmanager
def watch() -> Iterator[Seen]:
    """Record what happens in a trace; the host's random generators are as before afterwards."""
    seen = Seen()
    apply = Function.__dict__["apply"].__func__
    hook, seed = Tensor.register_hook, numpy.random.seed

    def applied(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if cls.__module__ == "torch._library.autograd":  # a custom operation: the graph holds it, gradient and all
            return apply(cls, *args, **kwargs)
        held = tuple(Like(tuple(a.shape), a.dtype) if isinstance(a, Tensor) else a for a in args)
        seen.functions.setdefault((cls, repr(held)), (held, kwargs))
        return apply(cls, *args, **kwargs)

    def hooked(tensor: Tensor, *args: Any) -> Any:
        seen.hooked.append(place())
        return hook(tensor, *args)

    def seeded(*args: Any) -> None:
        seen.seeded = True
        seed(*args)

    def drawing(draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            if not seen.seeded:
                seen.drawn.append(place())
            return draw(*args, **kwargs)

        return drawn

    before = random.getstate(), numpy.random.get_state()
    with ExitStack() as patches:
        patches.callback(random.setstate, before[0])
        patches.callback(numpy.random.set_state, before[1])
        patches.enter_context(mock.patch.object(Function, "apply", classmethod(applied)))
        patches.enter_context(mock.patch.object(Tensor, "register_hook", hooked))
        patches.enter_context(mock.patch.object(numpy.random, "seed", seeded))
        for owner, name in [(random, name) for name in _PYTHON] + [(numpy.random, name) for name in _NUMPY]:
            patches.enter_context(mock.patch.object(owner, name, drawing(getattr(owner, name))))
        yield seen


def place(error: BaseException | None = None) -> str:
    """The model's own line in the current stack, or where ``error`` was raised: "file:line in function: code"."""
    frames = traceback.extract_tb(error.__traceback__) if error else traceback.extract_stack()[:-2]
    own = [f for f in frames if not _foreign(f.filename)]
    frame = own[-1] if own else frames[-1] if frames else None
    return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" if frame else "an unknown line"


def _foreign(path: str) -> bool:
    parts = path.replace("\\", "/").split("/")
    return "torch" in parts or "megatron_merak" in parts or path.startswith("<") or "contextlib.py" in parts


def check_functions(model: str, seen: Seen) -> tuple[str, ...]:
    """One note per custom Function whose own backward is what autograd makes of its forward; TraceError for others.

    A graph holds a Function's forward only. So both are computed here, in fp64 on random values of several ranges.
    """
    notes: dict[str, None] = {}
    for (cls, _), (args, kwargs) in seen.functions.items():
        name = f"{cls.__module__}.{cls.__qualname__}"
        difference = _difference(cls, args) if not kwargs else "it takes keyword arguments"
        if difference:
            reason = f"its backward would be lost and replaced by that of its forward's operations: {difference}"
            remedy = f"Replace it in {model} by operations that differentiate the same way, or by torch's own"
            raise TraceError("autograd.Function", name, reason, remedy)
        notes[f"The gradient of {name} is taken from its forward's operations, which give the same."] = None
    return tuple(notes)


def _difference(cls: type[Function], args: tuple[Any, ...]) -> str:
    """Nothing if the Function's gradients are those of its forward, else why not, or why that cannot be told."""
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
        torch.manual_seed(trial)
        outputs = cls.apply(*made) if own else _forward(cls, made)
        outputs = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if isinstance(o, Tensor)]
        outputs = [o for o in outputs if o.is_floating_point()]
        if not all(o.isfinite().all() for o in outputs):
            return None
        weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outputs]
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


def _forward(cls: type[Function], args: list[Any]) -> Any:
    if cls.setup_context is not Function.setup_context:
        return cls.forward(*args)
    ctx = FunctionCtx()
    ctx.needs_input_grad = tuple(isinstance(a, Tensor) and a.requires_grad for a in args)  # type: ignore[attr-defined]
    return cls.forward(ctx, *args)
