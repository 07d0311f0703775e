"""The outputs of the last stage, by the names of the model's outputs."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..graph.capture.outputs import SAME
from ..runtime.executor import Executor
from .blueprint import ModelTask, Programs
from .traced import Batch


def named_outputs(
    executor: Executor,
    programs: Mapping[int, Programs],
    batches: Sequence[Batch],
    training: bool,
    task: ModelTask | None,
) -> list[dict[str, Tensor]] | None:
    """Return loss and outputs of each micro-batch of the executor's last run, None except on ranks
    of the last stage.

    programs: of this rank's stages.
    batches:  the prepared micro-batches of that run.
    training: whether it was a training step.
    task:     of that run.

    Removes the outputs from the executor.
    """
    run = executor.last
    if not run.losses:
        return None
    # logits may be the largest tensors of all
    results = run.results
    run.results = []
    last = programs[executor.schedule.stages - 1]
    outputs = []
    for batch, loss, result in zip(batches, run.losses, results, strict=True):
        program = last(batch, training, task)
        named = zip(program.results, program.named, strict=True)
        by_name = {
            each: result[value]
            for value, names in named
            if value in result
            for each in names.split(SAME)
        }
        outputs.append({"loss": loss[0]} | by_name)
    return outputs
