"""The table of a plan's growing batch sizes: the same stages, and its schedule with fewer
micro-batches.
"""

from collections.abc import Sequence
from dataclasses import replace

from megatron_merak.counting import counted
from megatron_merak.pipeline_parallel.passes import resize
from megatron_merak.plan import Plan, time_text
from megatron_merak.planner.predict import priced
from megatron_merak.planner.tables import align

_SHOWN = 6  # at most that many sizes are shown


def growth_table(plan: Plan, phases: Sequence[tuple[int, int]]) -> str:
    """Return a table of the batch sizes of a run, their steps and predicted step times; empty for a
    single size.

    phases: (samples per step, steps), see ``Batches.phases``.
    """
    if len(phases) < 2:
        return ""
    rows = [("global batch", "steps", "micro-batches", "predicted step")]
    for size, steps in _shown(phases):
        micro_batches = size // (plan.micro_batch_size * plan.grid.dp)
        resized = priced(replace(plan, schedule=resize(plan.schedule, micro_batches)))
        rows.append(
            (f"{size:,}", f"{steps:,}", f"{micro_batches:,}", time_text(resized.predicted_time))
        )
    lines = align(rows, ())
    if len(phases) > _SHOWN:
        lines.insert(-1, f"... and {counted(len(phases) - _SHOWN, 'size')} more")
    return "\n".join(
        ["The batch grows:", *lines, f"{counted(sum(steps for _, steps in phases), 'step')} in all"]
    )


def _shown(phases: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Return the phases to show: the first ones and the last."""
    return phases if len(phases) <= _SHOWN else [*phases[: _SHOWN - 1], phases[-1]]
