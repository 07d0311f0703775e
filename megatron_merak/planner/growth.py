"""What a plan does with batches that grow: the same stages, and its schedule with fewer micro-batches."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_merak.counting import counted
from megatron_merak.pipeline_parallel.passes import resize
from megatron_merak.plan import Plan, time_text
from megatron_merak.planner.predict import priced
from megatron_merak.planner.tables import align

_SHOWN = 6  # sizes of a long ramp


def growth_table(plan: Plan, phases: Sequence[tuple[int, int]]) -> str:
    """The batch sizes of a run, the steps of each, and what a step takes by the model; empty for one size.

    phases: (samples per step, steps), see ``Batches.phases``.
    """
    if len(phases) < 2:
        return ""
    rows = [("global batch", "steps", "micro-batches", "predicted step")]
    for size, steps in _some(phases):
        micro_batches = size // (plan.micro_batch_size * plan.grid.dp)
        made = priced(replace(plan, schedule=resize(plan.schedule, micro_batches)))
        rows.append((f"{size:,}", f"{steps:,}", f"{micro_batches:,}", time_text(made.predicted_time)))
    lines = align(rows, ())
    if len(phases) > _SHOWN:
        lines.insert(-1, f"... and {counted(len(phases) - _SHOWN, 'size')} more")
    return "\n".join(["The batch grows:", *lines, f"{counted(sum(steps for _, steps in phases), 'step')} in all"])


def _some(phases: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """The first and the last of many."""
    return phases if len(phases) <= _SHOWN else [*phases[: _SHOWN - 1], phases[-1]]
