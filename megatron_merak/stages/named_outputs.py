"""What the last stage of a run hands out, by the names of the model's outputs."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..graph.capture.outputs import SAME
from ..runtime.executor import Executor
from .blueprint import Programs
from .traced import Batch


def named_outputs(
    executor: Executor, programs: Mapping[int, Programs], batches: Sequence[Batch], training: bool
) -> list[dict[str, Tensor]] | None:
    """Per micro-batch of the executor's last run its loss and outputs, on ranks of the last stage, else None.

    programs: of this rank's stages. batches: as they ran. The executor forgets the outputs.
    """
    if not executor.losses:
        return None
    results, executor.results = executor.results, []  # logits may be the largest tensors of all
    last, found = programs[executor.schedule.stages - 1], []
    for batch, loss, result in zip(batches, executor.losses, results, strict=True):
        program = last(batch, training)
        named = zip(program.results, program.named, strict=True)
        called = {each: result[value] for value, names in named if value in result for each in names.split(SAME)}
        found.append({"loss": loss[0]} | called)
    return found
