"""Merak's shifted critical path for any costs: recomputation as early as dependencies and memory allow.

Lai et al., Merak (2023), gives the order of 1F1B for forward = 1, backward = 2, recompute = 1 and free links. What it
does has three parts: (a) the last stage does not recompute, (b) at the end, a stage recomputes while it waits for a
gradient, (c) at the start too, and may run a forward earlier. Here (a) is a matter of the costs; (b) and (c) are found
on the clock, for any order of forwards and backwards. With Merak's times 1F1B gets its makespan, 4 m + 3 S - 6:

    rank 0 | F0 F1 F2 F3 R0 R1 .  .  .  .  B0--- F4 B1--- F5 R2 B2--- R3 R4 B3--- R5 .  B4--- .  B5---
    rank 1 | .  F0 F1 F2 R0 R1 .  .  B0--- F3 B1--- F4 R2 B2--- F5 R3 B3--- R4 R5 B4--- .  B5--- .  .
    rank 2 | .  .  F0 F1 R0 R1 B0--- F2 B1--- F3 B2------ F4 B3------ F5 B4------ B5------ .  .  .  .
    rank 3 | .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  F4 B4--- .  F5 B5--- .  .  .  .  .  .  .
"""

from collections.abc import Sequence
from dataclasses import replace

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule
from megatron_merak.pipeline_parallel.search.listing import ListingRule, Rank, play
from megatron_merak.pipeline_parallel.search.problem import (
    B,
    F,
    MemoryLimits,
    Problem,
    Program,
    R,
    W,
)
from megatron_merak.pipeline_parallel.simulate import StageCosts


def shift_recompute(
    schedule: Schedule,
    costs: StageCosts,
    limits: MemoryLimits | None = None,
    *,
    recompute: Sequence[bool] | None = None,
    drain: bool = True,
    warmup: bool = True,
    attempts: int | None = None,
) -> Schedule:
    """The schedule, of compute ops and one stage per rank, with R ops where its stages would wait.

    Forwards, backwards and weight gradients keep their order, but for the first forward after the
    first backward of a stage, which goes before it where that shortens the step. R ops that were
    there are placed anew. `drain`: R may run after the last forward of its stage; `warmup`: before
    it, and forwards may go earlier. `recompute[s]`: whether stage s may run R (default: all that
    recompute). `attempts`: of how many stages, from the last one on, a forward may go earlier
    (default: all). The result is never longer than the schedule without any R.
    """
    split = any(isinstance(op, Op) and op.kind is Kind.W for op in schedule.entries())
    problem = Problem(costs, schedule.microbatches, limits, recompute, split_weights=split)
    plain = [
        tuple(op for op in ops if not (isinstance(op, Op) and op.kind is Kind.R))
        for ops in schedule.ranks
    ]
    best = problem.from_schedule(replace(schedule, ranks=tuple(plain)))
    if best is None:
        reason = (
            "it has several stages on a rank, ops that run together or out of order, or "
            "holds more than the limits"
        )
        raise ScheduleError(
            "schedule",
            schedule.name,
            reason,
            "Pass such as build_schedule makes, or raise the limits",
        )
    unshifted = best
    makespan = problem.makespan(best)
    best, makespan = _better(problem, unshifted, best, makespan, drain=drain, warmup=warmup)
    earlier = [*reversed(range(problem.stages - 1 if warmup else 0))]
    for stage in earlier[:attempts]:
        advanced = _advance(unshifted, stage)
        if advanced is not None and problem.fits(stage, advanced[stage]):
            improved, shorter = _better(
                problem, advanced, best, makespan, drain=drain, warmup=warmup
            )
            if shorter < makespan:
                unshifted = advanced
                best = improved
                makespan = shorter
    return problem.to_schedule(schedule.name, best)


def _better(
    problem: Problem,
    programs: list[Program],
    best: list[Program],
    makespan: float,
    drain: bool,
    warmup: bool,
) -> tuple[list[Program], float]:
    """Return the best of `best` and of the programs with R inserted, few or many micro-batches
    ahead.
    """
    for ahead in sorted({1, 2, problem.microbatches}):
        ranks = [
            _Fixed(problem, programs, rank, ahead, drain=drain, warmup=warmup)
            for rank in range(problem.ranks)
        ]
        candidate = play(problem, ranks)
        if any(rank.left for rank in ranks):
            continue  # a forward that went earlier waits for one that waits for it
        shorter = problem.makespan(candidate)
        if shorter < makespan and all(map(problem.allows, range(problem.stages), candidate)):
            best = candidate
            makespan = shorter
    return best, makespan


def _advance(programs: list[Program], stage: int) -> list[Program] | None:
    """Return the programs with a stage's first forward after its first backward moved before that
    backward.
    """
    program = programs[stage]
    first = program.index(B)
    later = next((i for i in range(first, len(program)) if program[i] & 3 == F), None)
    if later is None:
        return None
    moved = [*program[:first], program[later], *program[first:later], *program[later + 1 :]]
    return [*programs[:stage], moved, *programs[stage + 1 :]]


class _Fixed(Rank):
    """A rank of one stage that runs a given program, and recomputes instead of waiting."""

    def __init__(
        self,
        problem: Problem,
        programs: list[Program],
        index: int,
        ahead: int,
        drain: bool,
        warmup: bool,
    ):
        weighs = tuple(any(code & 3 == W for code in program) for program in programs)
        super().__init__(
            problem,
            ListingRule((problem.microbatches,) * problem.stages, early=ahead, split=weighs),
            index,
        )
        (self.stage,) = self.stages
        self.left = [*reversed(programs[index])]
        self.drain = drain
        self.may_warm_up = warmup

    def run(self, code: int, now: float) -> int:
        if code & 3 != R:
            self.left.pop()
        return super().run(code, now)

    def choose(self, now: float) -> tuple[int | None, float | None]:
        if not self.left:
            return None, None
        code = self.left[-1]
        done = self.stage.done
        kind = code & 3
        k = code >> 2
        ready = 0.0 if kind == W else self.stage.arrival(kind, k)
        if ready is not None and ready <= now:
            return code, None
        if not self._may_recompute() or not self._has_memory():
            return None, None
        needed_now = kind == B and done[R] == done[B]
        if needed_now or ready is None or ready >= now + self.stage.seconds[R]:
            return self.code(0, R), None
        return None, None

    def _may_recompute(self) -> bool:
        stage = self.stage
        done = self.stage.done
        if not (self.drain if done[F] == stage.count else self.may_warm_up):
            return False
        return stage.early and done[B] <= done[R] < min(done[F], done[B] + self.rule.early)

    def _has_memory(self) -> bool:
        """Whether the next R leaves enough memory for what follows, up to the B that frees its
        tape.
        """
        stage = self.stage
        last = stage.done[R]
        in_use = self.held + stage.taped
        for code in reversed(self.left):
            if in_use > self.cap:
                return False
            kind = code & 3
            if kind == F:
                in_use += stage.kept
            elif kind == W:
                in_use -= stage.weight_held
            elif code >> 2 == last:
                return True
            else:
                in_use += (stage.weight_held if stage.split else 0.0) - stage.kept - stage.taped
        return True
