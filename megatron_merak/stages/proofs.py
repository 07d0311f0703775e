"""Two ways to run the same samples: whether a step computes the same by either, shown before training relies on it.

The loss and the gradient of one way less those of the other are computed by the engine in a single step, in place of
the gradient, and compared with the loss and the gradient themselves:

    step 1   + whole                                   main_grad: the gradient
    step 2   + whole  - first half  - second half      main_grad: what is left of it, rounding if the ways agree
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MerakError
from ..graph.capture.empty import is_fake
from ..parallel.agree import gather_json, together


@dataclass(frozen=True)
class Tolerance:
    """What counts as rounding. loss, output: as a share of the value. gradient: of each parameter's, as a share of its
    own norm, beyond ``noise`` of the norm of all."""

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


def difference(engine, one: Mapping, others: Sequence[Mapping]) -> str | None:
    """What the step of batch ``one`` and the steps of ``others`` added up do not have in common: "" for nothing, None
    where all gradients are zero and tell nothing. Collective over all ranks, which get the same answer.

    engine: a CapturedTrainer. The gradients of its step are lost; weights and running statistics stay.
    """
    mesh, buffer = engine.mesh, engine.buffer
    with _undisturbed(engine):
        try:
            with together(mesh.control, "cpu"):
                for programs in engine.programs.values():
                    for batch in (one, *others):
                        programs(engine.blueprint.traced.prepared(batch), True)
        except MerakError as error:
            return f"{error.what} {error.value}: {error.reason}"
        loss = _finite_gradients(engine, one)
        sizes = _norms(buffer)
        gap = engine.gradients([one, *others], [1.0, *[-1.0] * len(others)])
        found = _told(loss, gap, sizes, _norms(buffer), TOLERANCES[engine.dtype])
    told = gather_json([found, sum(sizes.values())], mesh.control, "cpu")
    if not any(size for _, size in told):
        return None
    return next((text for text, _ in told if text), "")


def _finite_gradients(engine, batch: Mapping) -> float:
    """The loss of a batch and, in ``main_grad``, its gradient: in fp16 of a loss scale at which that is finite."""
    optimizer = engine.optimizer
    loss = engine.gradients([batch], [1.0])
    while optimizer.scaler.scale > 1 and not math.isfinite(optimizer.grad_norm()):
        optimizer.scaler.scale = max(optimizer.scaler.scale / _STEP, 1.0)
        loss = engine.gradients([batch], [1.0])
    return loss


def _norms(buffer) -> dict[str, float]:
    """The norm of what this rank owns of each parameter's gradient."""
    owned = [(name, own) for name in buffer.slots for own in buffer.own_grad(name)]
    norms = torch.stack(torch._foreach_norm([own for _, own in owned])).tolist() if owned else []
    squares = dict.fromkeys(buffer.slots, 0.0)
    for (name, _), norm in zip(owned, norms, strict=True):
        squares[name] += norm**2
    return {name: square**0.5 for name, square in squares.items()}


def _told(loss: float, gap: float, sizes: dict[str, float], gaps: dict[str, float], tolerance: Tolerance) -> str:
    if not abs(gap) <= tolerance.loss * abs(loss) + 1e-6:
        return f"the loss changes by {_share(gap, loss)}"
    noise = tolerance.noise * sum(size**2 for size in sizes.values()) ** 0.5
    for name, size in sizes.items():
        if not gaps[name] <= tolerance.gradient * size + noise:
            return f"the gradient of {name} changes by {_share(gaps[name], size)}"
    return ""


def _share(gap: float, whole: float) -> str:
    return f"{abs(gap / whole):.2%}" if whole else f"{abs(gap):.3g}"


@contextmanager
def _undisturbed(engine) -> Iterator[None]:
    """Without dropout inside, and with the running statistics and the loss scale of before afterwards."""
    scaler = engine.optimizer.scaler
    scale = scaler.scale
    statistics = [(buffer, buffer.detach().clone()) for buffer in engine.model.buffers() if not is_fake(buffer)]
    preludes = {prelude: prelude.state() for prelude in _preludes(engine)}
    for programs in engine.programs.values():
        programs.drops = False
    try:
        yield
    finally:
        scaler.scale = scale
        for programs in engine.programs.values():
            programs.drops = True
        with torch.no_grad():
            for buffer, saved in statistics:
                if not torch.equal(buffer, saved):
                    buffer.copy_(saved)
        for prelude in _preludes(engine):
            prelude.restore(preludes.get(prelude))


def _preludes(engine) -> list:
    return [program.prelude for programs in engine.programs.values() for program in programs.made()]


def outputs_differ(plain: Tensor, padded: Tensor, dtype: str) -> bool:
    """Whether two outputs of one shape differ by more than rounding in ``dtype``."""
    if plain.shape != padded.shape or plain.dtype != padded.dtype:
        return True
    if not plain.is_floating_point():
        return not torch.equal(plain, padded)
    gap, size = (plain.double() - padded.double()).abs(), plain.double().abs()
    return bool(plain.numel()) and not gap.max() <= TOLERANCES[dtype].output * size.max()
