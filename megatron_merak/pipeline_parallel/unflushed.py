"""Schedules that update weights while micro-batches are in flight: which versions of the weights
exist, and whether each is there when an op needs it.
"""

from megatron_merak.counting import counted
from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule, Updates, ops_of


def ops_of_stage(schedule: Schedule, stage: int) -> list[Op]:
    """Return the compute ops of a stage, in order."""
    program = schedule.ranks[schedule.rank_of(stage)]
    return [
        op for entry in program for op in ops_of(entry) if op.stage == stage and op.kind.is_compute
    ]


def updates_after(schedule: Schedule, op: Op) -> bool:
    """Whether a stage updates its weights right after an op; after its last one the step does."""
    updates = schedule.updates
    done = op.microbatch + 1
    if updates is None or op.kind is not Kind.B or done == schedule.microbatches:
        return False
    return done % updates.every == 0


def held_versions(schedule: Schedule) -> tuple[int, ...]:
    """Return how many versions of its weights each stage holds at a time, at most."""
    return tuple(_held(schedule, stage) for stage in range(schedule.stages))


def _held(schedule: Schedule, stage: int) -> int:
    updates = schedule.updates
    if updates is None:
        return 1
    ops = ops_of_stage(schedule, stage)
    last_use = {updates.version(op): at for at, op in enumerate(ops)}
    newest = 0
    most = 1
    for at, op in enumerate(ops):
        newest += updates_after(schedule, op)
        older = [version for version in range(newest) if last_use.get(version, -1) > at]
        most = max(most, len(older) + 1)
    return most


def updates_text(schedule: Schedule) -> str:
    """Return how a schedule updates weights on its way, how stale its gradients are, and what it
    holds; "" where it does not.
    """
    updates = schedule.updates
    if updates is None:
        return ""
    last = [ops_of_stage(schedule, stage)[-1] for stage in range(schedule.stages)]
    late = " ".join(str(updates.staleness(op)) for op in last)
    held = " ".join(map(str, held_versions(schedule)))
    every = counted(updates.every, "micro-batch")
    return (
        f"updates weights every {every}, without a flush; by stage, updates that gradients are late: "
        f"{late}, versions of the weights held: {held}"
    )


def check_updates(schedule: Schedule) -> None:
    """Raise ScheduleError for updates that the ops of the schedule do not allow."""
    updates = schedule.updates
    if updates is None:
        return
    _check_size(schedule, updates)
    for stage in range(schedule.stages):
        done = 0
        for op in ops_of_stage(schedule, stage):
            if (version := updates.version(op)) > done:
                reason = (
                    f"{op} needs weights of {counted(version, 'update')}, and its stage has done "
                    f"{done}"
                )
                raise _wrong(schedule, reason, "Raise the delay of the stage")
            done += updates_after(schedule, op)


def _check_size(schedule: Schedule, updates: Updates) -> None:
    if updates.every < 1 or schedule.microbatches % updates.every:
        reason = f"{schedule.microbatches} micro-batches are not updates of {updates.every} each"
        raise _wrong(schedule, reason, "Use a number of micro-batches that divides them")
    if len(updates.delays) != schedule.stages:
        reason = f"it has {schedule.stages} stages, and delays of {len(updates.delays)}"
        raise _wrong(schedule, reason, "Give one per stage")
    if len(schedule.ranks) < schedule.stages:
        reason = "its ranks have several stages each, which are updated together"
        raise _wrong(schedule, reason, "Use one stage per rank")
    if not schedule.ordered_sums:
        reason = "an update follows a backward, and its backwards have any order"
        raise _wrong(schedule, reason, "Order its backwards by micro-batch")
    if any(op.kind is Kind.W for entry in schedule.entries() for op in ops_of(entry)):
        raise _wrong(schedule, "its weight gradients are ops of their own", "Leave out its W ops")


def _wrong(schedule: Schedule, reason: str, remedy: str) -> ScheduleError:
    return ScheduleError("schedule", schedule.name, reason, remedy)
