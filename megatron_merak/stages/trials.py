"""Try two ways of running the same samples on one batch: do they compute the same loss and
gradient?

A trial is taken to hold for batches like the one tried.

A first step computes the loss and gradient of one way; a second one, with weights +1 and -1, the
difference of the two ways, which must be rounding:

    step 1   + whole batch                                   main_grad: the gradient
    step 2   + whole batch  - first half  - second half      main_grad: the difference
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MerakError
from ..graph.capture.empty import is_fake
from ..parallel.agree import gather_json, together
from .blueprint import ModelTask
from .traced import OwnLoss


@dataclass(frozen=True)
class Tolerance:
    """The largest differences that count as rounding.

    loss, output: relative to the value.
    gradient:     of each parameter, relative to its norm, in addition to ``noise``.
    noise:        relative to the norm of the whole gradient.
    """

    loss: float
    output: float
    gradient: float
    noise: float


_STEP = 16.0  # by which a loss scale is lowered until a gradient is finite
TOLERANCES: Mapping[str, Tolerance] = {
    "float32": Tolerance(1e-5, 1e-4, 1e-3, 1e-5),
    "bfloat16": Tolerance(2e-3, 2e-2, 2e-2, 2e-3),
    "float16": Tolerance(5e-4, 5e-3, 1e-2, 1e-3),
}


def difference(
    engine, one: Mapping, others: Sequence[Mapping], loss: OwnLoss | None = None
) -> str | None:
    """How loss and gradient of batch ``one`` differ from the sums of those of ``others``: "" if
    only by rounding.

    engine: a CapturedModel. Its gradient is overwritten; weights and running statistics stay.
    loss:   to compute; None: the one that the model was traced with.

    None if all gradients are zero, which tells nothing. Collective over all ranks, which get the
    same answer.
    """
    mesh = engine.mesh
    buffer = engine.buffer
    task = ModelTask(loss, dropout=False)
    with _undisturbed(engine):
        try:
            with together(mesh.control, "cpu"):
                engine.admit((one, *others), True, task)
        except MerakError as error:
            return f"{error.what} {error.value}: {error.reason}"
        total = _finite_gradients(engine, one, task)
        sizes = _norms(buffer)
        gap = engine.gradients([one, *others], [1.0, *[-1.0] * len(others)], task)
        mismatch = _mismatch(total, gap, sizes, _norms(buffer), tolerance=TOLERANCES[engine.dtype])
    reports = gather_json([mismatch, sum(sizes.values())], mesh.control, "cpu")
    if not any(size for _, size in reports):
        return None
    return next((text for text, _ in reports if text), "")


def _finite_gradients(engine, batch: Mapping, task: ModelTask) -> float:
    """The loss of a batch and, in ``main_grad``, its gradient; lowers the fp16 loss scale until
    that is finite.
    """
    optimizer = engine.optimizer
    loss = engine.gradients([batch], [1.0], task)
    while optimizer.scaler.scale > 1 and not math.isfinite(optimizer.grad_norm()):
        optimizer.scaler.scale = max(optimizer.scaler.scale / _STEP, 1.0)
        loss = engine.gradients([batch], [1.0], task)
    return loss


def _norms(buffer) -> dict[str, float]:
    """The norm of this rank's own shard of each parameter's gradient."""
    owned = [(name, own) for name in buffer.slots for own in buffer.own_grad(name)]
    norms = torch.stack(torch._foreach_norm([own for _, own in owned])).tolist() if owned else []
    squares = dict.fromkeys(buffer.slots, 0.0)
    for (name, _), norm in zip(owned, norms, strict=True):
        squares[name] += norm**2
    return {name: square**0.5 for name, square in squares.items()}


def _mismatch(
    loss: float, gap: float, sizes: dict[str, float], gaps: dict[str, float], tolerance: Tolerance
) -> str:
    """What differs by more than rounding: "" for nothing.

    gap, gaps:   differences of the loss, and of each parameter's gradient, by norm.
    loss, sizes: what these are relative to.
    """
    if not abs(gap) <= tolerance.loss * abs(loss) + 1e-6:
        return f"the loss changes by {_share(gap, loss)}"
    noise = tolerance.noise * sum(size**2 for size in sizes.values()) ** 0.5
    for name, size in sizes.items():
        if not gaps[name] <= tolerance.gradient * size + noise:
            return f"the gradient of {name} changes by {_share(gaps[name], size)}"
    return ""


def _share(gap: float, size: float) -> str:
    return f"{abs(gap / size):.2%}" if size else f"{abs(gap):.3g}"


@contextmanager
def _undisturbed(engine) -> Iterator[None]:
    """Restore running statistics, loss scale and preludes afterwards."""
    scaler = engine.optimizer.scaler
    scale = scaler.scale
    restore = snapshot(engine)
    try:
        yield
    finally:
        scaler.scale = scale
        restore()


def snapshot(engine) -> Callable[[], None]:
    """Return a function that restores the running statistics and preludes of a CapturedModel to
    those of now.
    """
    statistics = [
        (buffer, buffer.detach().clone())
        for buffer in engine.model.buffers()
        if not is_fake(buffer)
    ]
    preludes = {prelude: prelude.state() for prelude in _preludes(engine)}

    def restore() -> None:
        with torch.no_grad():
            for buffer, saved in statistics:
                if not torch.equal(buffer, saved):
                    buffer.copy_(saved)
        for prelude in _preludes(engine):
            prelude.restore(preludes.get(prelude))

    return restore


def _preludes(engine) -> list:
    return [program.prelude for programs in engine.programs.values() for program in programs.all()]


def outputs_differ(plain: Tensor, padded: Tensor, dtype: str) -> bool:
    """Whether two outputs of one shape differ by more than rounding in ``dtype``."""
    if plain.shape != padded.shape or plain.dtype != padded.dtype:
        return True
    if not plain.is_floating_point():
        return not torch.equal(plain, padded)
    gap = (plain.double() - padded.double()).abs()
    size = plain.double().abs()
    return bool(plain.numel()) and not gap.max() <= TOLERANCES[dtype].output * size.max()
