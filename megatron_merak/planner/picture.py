"""The view of a plan: its simulated step, and the memory of each pipeline rank during the step."""

from megatron_merak.counting import counted
from megatron_merak.pipeline_parallel.ops import Op
from megatron_merak.pipeline_parallel.pictures.palette import time_text
from megatron_merak.pipeline_parallel.pictures.view import Curve, View
from megatron_merak.pipeline_parallel.simulate import Timeline
from megatron_merak.plan import Plan, prediction
from megatron_merak.planner.memory import rank_memory
from megatron_merak.planner.predict import ending, step_time, timeline
from megatron_merak.planner.saved import Footprint, Moment, footprint, rank_moments


def view(plan: Plan, title: str = "") -> View:
    """Return the view of one step of the plan."""
    grid = plan.grid
    step = timeline(plan)
    detail = (
        f"{counted(grid.size, 'rank')} of {plan.cluster} = tp {grid.tp} x cp {grid.cp} x dp "
        f"{grid.dp} x pp {grid.pp}, "
    )
    samples = counted(plan.micro_batch_size, "sample")
    detail += f"{counted(len(plan.units), 'unit')}, {samples} per micro-batch; {_step_text(plan)}"
    curves = memory_curves(plan, step)
    seconds = step_time(plan, step)
    return View(
        step,
        title,
        "modelled",
        detail,
        memory=curves,
        capacity=_capacity(plan),
        step=seconds,
    )


def _capacity(plan: Plan) -> int:
    """Return what plans use of a rank's memory; 0 where it is unknown, or not the same of all."""
    sizes = {device.usable for device in plan.cluster.devices}
    return sizes.pop() if len(sizes) == 1 else 0


def _step_text(plan: Plan) -> str:
    """Return the predicted time of a step, and of its end, which a timeline of forwards and
    backwards omits.
    """
    end = ending(plan)
    text = f"{prediction(plan)}; {time_text(end.total)} of it behind the pipeline"
    return text + f" (gradients {time_text(end.reductions)}, optimizer {time_text(end.optimizer)})"


def memory_curves(plan: Plan, step: Timeline) -> tuple[Curve, ...]:
    """Return the memory of each pipeline rank over a step; the peak is the one that the plan
    predicts.

    Weights, gradients, optimizer state, transfer buffers and working memory of the largest unit
    count throughout the step. What micro-batches keep changes at the start and end of ops.
    """
    when = {event.op: (event.start, event.end) for event in step.events}
    curves = []
    for rank, total in enumerate(rank_memory(plan)):
        footprints = {
            stage: footprint(plan.units, plan.stages[stage]) for stage in plan.stages_of(rank)
        }
        curves.append(_curve(plan, rank, footprints, when, base=total.total - total.activations))
    return tuple(curves)


def _curve(
    plan: Plan,
    rank: int,
    footprints: dict[int, Footprint],
    when: dict[Op, tuple[float, float]],
    base: int,
) -> Curve:
    points: list[tuple[float, int]] = [(0.0, base)]
    for ops, running, after in rank_moments(plan.schedule, rank):
        start, end = when[ops[0]]
        for time, moment in ((start, running), (end, after)):
            if points[-1][0] == time:
                # the next op starts at once: the state between the ops has no duration
                points.pop()
            points.append((time, base + _saved(moment, footprints)))
    return tuple(points)


def _saved(moment: Moment, footprints: dict[int, Footprint]) -> int:
    return sum(count * getattr(footprints[stage], state) for (stage, state), count in moment)
