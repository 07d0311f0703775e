"""Steps of an engine that are timed and then forgotten, and what they change of the user's model."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..graph.capture.empty import is_fake
from ..optimizer.base import Rates
from ..stages.captured import CapturedModel
from ..stages.traced import Batch


def time_steps(
    engine: CapturedModel, batches: Sequence[Batch], rates: Rates, count: int
) -> list[float]:
    """Return the seconds of so many steps on the same micro-batches."""
    # fp16 skips the first steps of a run until it has found a scale
    engine.optimizer.scaler.scale = 1.0
    engine.freeze(())
    clock = engine.mesh.clock
    seconds = []
    for _ in range(count):
        began = clock.now()
        with clock.kernels():
            engine.update(rates, engine.backward(batches))
        seconds.append(clock.now() - began)
    engine.gatherer.finish()
    return seconds


def values_of_buffers(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return the buffers of a model that have memory, with copies of their values."""
    return [(each, each.detach().clone()) for each in model.buffers() if not is_fake(each)]


def restore_buffers(buffers: list[tuple[Tensor, Tensor]]) -> None:
    """Set buffers to the values that they had."""
    with torch.no_grad():
        for buffer, values in buffers:
            if not torch.equal(buffer, values):
                buffer.copy_(values)
