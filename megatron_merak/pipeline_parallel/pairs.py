"""Pairs: the forward of one micro-batch and the backward of another in one entry; each computes
while the other communicates.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.ops import Entry, Kind, Op, Schedule, ops_of
from megatron_merak.pipeline_parallel.order import needs


def pair(schedule: Schedule, in_flight: Sequence[int] | None = None) -> Schedule:
    """Joins the forwards and backwards of each rank to pairs, ``F|B``, as far as their order
    allows.

    All ranks step together. In a step each runs its next forward and its next backward, as one
    pair, if what they need was over in the step before; a forward moves ahead of other ops as far
    as that takes, so that there are pairs all through the steady state. For S stages of 1F1B, stage
    s runs 2 (S - s) - 1 forwards ahead and holds twice of what it did; an interleaved rank has that
    many under way as it is. `in_flight[s]`, if given, bounds the micro-batches that stage s may
    hold, at the cost of pairs. In equal steps it takes no longer than 1F1B even if nothing
    overlaps.

    Takes compute ops only. Raises ScheduleError where the bounds leave no order.

        rank 0 | 0F0 0F1 0F2 0F3|0B0 0F4|0B1 0B2 ...
        rank 1 |     1F0 1F1|1B0 1F2|1B1 1F3|1B2 ...
    """
    if schedule.has_communication:
        raise ScheduleError(
            "schedule", schedule.name, "it has communication ops already", "Pass compute ops only"
        )
    steps = _LockSteps(schedule, in_flight)
    while steps.left():
        steps.advance()
    return replace(schedule, ranks=tuple(map(tuple, steps.programs)))


class _LockSteps:
    """All ranks at the same step. `over[op]` is the step in which it ran."""

    def __init__(self, schedule: Schedule, in_flight: Sequence[int] | None):
        orders = [[op for entry in program for op in ops_of(entry)] for program in schedule.ranks]
        self.schedule = schedule
        self.forwards = [deque(op for op in order if op.kind is Kind.F) for order in orders]
        self.others = [deque(op for op in order if op.kind is not Kind.F) for order in orders]
        self.programs: list[list[Entry]] = [[] for _ in orders]
        self.room = list(in_flight or [schedule.microbatches] * schedule.stages)
        self.separate = {
            (op.stage, op.microbatch) for order in orders for op in order if op.kind is Kind.W
        }
        self.over: dict[Op, int] = {}
        self.step = 0

    def left(self) -> bool:
        return any(self.forwards) or any(self.others)

    def advance(self) -> None:
        """Run one step of every rank: recomputations, a forward and a backward, weight
        gradients.
        """
        before = len(self.over)
        for program, forwards, others in zip(
            self.programs, self.forwards, self.others, strict=True
        ):
            ready = self._ready(forwards, Kind.F, self.step) and self.room[forwards[0].stage] > 0
            forward = [self._run(forwards)] if ready else []
            while self._ready(others, Kind.R, self.step):
                program.append(self._run(others))
            both = [
                *forward,
                *([self._run(others)] if self._ready(others, Kind.B, self.step) else []),
            ]
            if both:
                program.append(both[0] if len(both) == 1 else tuple(both))
            while self._ready(others, Kind.W, self.step + 1):
                program.append(self._run(others))
        if len(self.over) == before:
            reason = "the micro-batches that stages may hold leave no order of it"
            remedy = "Allow more memory"
            raise ScheduleError("schedule", self.schedule.name, reason, remedy)
        self.step += 1

    def _ready(self, ops: deque[Op], kind: Kind, step: int) -> bool:
        """Whether the next op is of this kind, and everything that it needs was done
        before `step`.
        """
        if not ops or ops[0].kind is not kind:
            return False
        return all(self.over.get(need, step) < step for need in needs(self.schedule, ops[0]))

    def _run(self, ops: deque[Op]) -> Op:
        op = ops.popleft()
        self.over[op] = self.step
        if op.kind is Kind.F:
            self.room[op.stage] -= 1
        elif op.kind is Kind.W or (
            op.kind is Kind.B and (op.stage, op.microbatch) not in self.separate
        ):
            self.room[op.stage] += 1
        return op
