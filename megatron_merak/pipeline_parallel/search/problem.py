"""The problem of ``search``: a pipeline of given costs under memory limits, as integers and lists, and its fast clock.

One stage per rank. A program is a list of codes, ``4 * micro-batch + kind`` with the kinds F, R, B and W; every stage
runs each kind in micro-batch order, so a program is a merge of at most four ascending sequences.
"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

from megatron_merak import _native
from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.doubles import are_doubles
from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule
from megatron_merak.pipeline_parallel.simulate import StageCosts

F, R, B, W = range(4)
KINDS = (Kind.F, Kind.R, Kind.B, Kind.W)
Program = list[int]


@dataclass(frozen=True)
class Limits:
    """What the stages may hold; one value per stage, all in the same unit, such as bytes.

    A micro-batch holds `kept` from the start of F to the end of B, `taped` more while it is recomputed or its
    recomputation waits for B (from the start of R, or of a B that recomputes, to the end of B), and `weight_held` from
    the end of B to the end of W where W is its own op. The sum never exceeds `cap`.
    """

    cap: tuple[float, ...]
    kept: tuple[float, ...]
    taped: tuple[float, ...]
    weight_held: tuple[float, ...]

    def __post_init__(self):
        for name, values in vars(self).items():
            if len(values) != len(self.cap) or any(not value >= 0 for value in values):
                raise ScheduleError(f"{name} of the limits", values, f"not {len(self.cap)} numbers >= 0", "Correct it")
        for stage, needed in enumerate(kept + taped for kept, taped in zip(self.kept, self.taped, strict=True)):
            if needed > self.cap[stage]:
                reason = f"stage {stage} needs {needed} to run one micro-batch"
                raise ScheduleError("memory cap", self.cap[stage], reason, "Raise the cap, or give the stage less")

    @classmethod
    def in_flight(cls, counts: Sequence[int]) -> "Limits":
        """At most ``counts[s]`` micro-batches on stage s, from F to B, or to W; early recomputation costs nothing."""
        ones = (1,) * len(counts)
        return cls(tuple(counts), ones, (0,) * len(counts), ones)

    @classmethod
    def none(cls, stages: int) -> "Limits":
        return cls((float("inf"),) * stages, (1,) * stages, (0,) * stages, (1,) * stages)


class Problem:
    """Costs, limits, and which stages may run R (where they recompute) and W (where they have weight gradients)."""

    def __init__(
        self,
        costs: StageCosts,
        microbatches: int,
        limits: Limits | None = None,
        recompute: Sequence[bool] | None = None,
        split_weights: bool = False,
    ):
        self.costs, self.microbatches = costs, microbatches
        self.stages = len(costs.forward)
        self.limits = limits or Limits.none(self.stages)
        if microbatches < 1:
            raise ScheduleError("micro-batches", microbatches, "there is nothing to run", "Ask for at least one")
        for name, values in (("limits", self.limits.cap), ("recompute", recompute)):
            if values is not None and len(values) != self.stages:
                reason = f"{len(values)} values for {self.stages} stages"
                raise ScheduleError(name, values, reason, "Give one per stage")
        allowed = recompute or (True,) * self.stages
        self.early = tuple(may and cost > 0 for may, cost in zip(allowed, costs.recompute, strict=True))
        self.split = tuple(split_weights and weight > 0 for weight in costs.weight)

        self.taped = tuple(tape if cost else 0.0 for tape, cost in zip(self.limits.taped, costs.recompute, strict=True))

    @cached_property
    def compiled(self) -> Any:
        """This problem for the loops of ``csrc/py/search.cpp``; None where those are not built."""
        host, costs = _native.host(), astuple(self.costs)
        limits = self.limits.cap, self.limits.kept, self.taped, self.limits.weight_held
        known = are_doubles(chain.from_iterable(costs)) and are_doubles(chain.from_iterable(limits), unbounded=True)
        return host.Pipeline(self.microbatches, costs, limits, self.early, self.split) if host and known else None

    def depth(self, stage: int) -> int:
        """The most micro-batches that the stage can hold between F and B: the next B needs a tape beside them."""
        kept, free = self.limits.kept[stage], self.limits.cap[stage] - self.taped[stage]
        return int(min(free / kept, self.microbatches)) if kept else self.microbatches

    def allows(self, stage: int, program: Program) -> bool:
        """Whether weight gradients, those inside of backwards too, and R are in order, and memory suffices."""
        if self.compiled is not None:
            return self.compiled.allows(stage, program)
        return _in_order(program) and self.fits(stage, program)

    def fits(self, stage: int, program: Iterable[int]) -> bool:
        """Whether the program of a stage stays within its cap; see ``Limits``."""
        limits = self.limits
        cap, kept, taped = limits.cap[stage], limits.kept[stage], self.taped[stage]
        if cap >= (kept + taped + limits.weight_held[stage]) * self.microbatches:
            return True
        weight_held = limits.weight_held[stage]
        program = list(program)
        split = {code >> 2 for code in program if code & 3 == W}
        recomputed = set()
        held = 0.0
        for code in program:
            kind, k = code & 3, code >> 2
            if kind == F:
                held += kept
            elif kind == R:
                held += taped
                recomputed.add(k)
            elif kind == B:
                early = k in recomputed
                if held + (0 if early else taped) > cap:
                    return False
                held -= kept + (taped if early else 0)
                held += weight_held if k in split else 0
            else:
                held -= weight_held
            if held > cap:
                return False
        return True

    def compile(self, stage: int, program: Program) -> list[tuple[int, int, float]]:
        """(kind, micro-batch, seconds) of each op."""
        costs = self.costs
        separate = {code for code in program if code & 1}
        seconds = {F: costs.forward[stage], R: costs.recompute[stage], W: costs.weight[stage]}
        compiled = []
        for code in program:
            kind, k = code & 3, code >> 2
            if kind == B:
                weight = costs.weight[stage] if 4 * k + W in separate else 0.0
                recompute = 0.0 if 4 * k + R in separate else costs.recompute[stage]
                compiled.append((B, k, costs.backward[stage] - weight + recompute))
            else:
                compiled.append((kind, k, seconds[kind]))
        return compiled

    def clock(self, programs: Sequence[list[tuple[int, int, float]]]) -> list[list[float]]:
        """The end of every op, a zero first, as ``simulate`` has it; empty where the programs deadlock.

        A message is received as ``passes.add_communication`` places it: posted just before the last F or B before its
        consumer, after the previous message of its channel.
        """
        stages, transfer, latency = self.stages, self.costs.transfer, self.costs.latency
        ends = [[0.0] for _ in range(stages)]
        posted = [0.0] * stages  # when the rank was free for its last F or B
        forwards: list[list[float]] = [[] for _ in range(stages)]
        backwards: list[list[float]] = [[] for _ in range(stages)]
        free_forward, free_backward = [0.0] * stages, [0.0] * stages
        at = [0] * stages
        left = sum(map(len, programs))
        order = [*range(stages), *range(stages - 2, 0, -1)] if stages > 1 else [0]
        while left:
            before_sweep = left
            for s in order:
                program, end, i = programs[s], ends[s], at[s]
                count = len(program)
                arrived_forward = forwards[s - 1] if s else None
                arrived_backward = backwards[s + 1] if s < stages - 1 else None
                now = end[-1]
                while i < count:
                    kind, k, seconds = program[i]
                    if kind == F:
                        if arrived_forward is not None:
                            if k >= len(arrived_forward):
                                break
                            start = max(arrived_forward[k], posted[s], free_forward[s])
                            free_forward[s] = start = start + transfer[s - 1]
                            start += latency[s - 1]
                            if start > now:
                                now = start
                        posted[s] = end[-1]
                        now += seconds
                        forwards[s].append(now)
                    elif kind == B:
                        if arrived_backward is not None:
                            if k >= len(arrived_backward):
                                break
                            start = max(arrived_backward[k], posted[s], free_backward[s])
                            free_backward[s] = start = start + transfer[s]
                            start += latency[s]
                            if start > now:
                                now = start
                        posted[s] = end[-1]
                        now += seconds
                        backwards[s].append(now)
                    else:
                        now += seconds
                    end.append(now)
                    i += 1
                left -= i - at[s]
                at[s] = i
            if left == before_sweep:
                return []
        return ends

    def makespan(self, programs: Sequence[Program]) -> float:
        """Seconds; infinite where the programs deadlock."""
        if self.compiled is not None:
            return self.compiled.makespan(programs)
        ends = self.clock([self.compile(stage, program) for stage, program in enumerate(programs)])
        return max((end[-1] for end in ends), default=float("inf"))

    def to_schedule(self, name: str, programs: Sequence[Program]) -> Schedule:
        ops = [tuple(Op(s, KINDS[code & 3], code >> 2) for code in program) for s, program in enumerate(programs)]
        return Schedule(name, self.stages, self.microbatches, tuple(ops))

    def from_schedule(self, schedule: Schedule) -> list[Program] | None:
        """The programs of a schedule of compute ops; None where it is no answer to this problem.

        It is none if a rank has several stages, ops run together, a kind is out of micro-batch order, an R or W stands
        where it may not, or memory does not suffice. The R ops of a stage that recomputes nothing are left out.
        """
        if len(schedule.ranks) != self.stages or schedule.stages != self.stages:
            return None
        programs = []
        for stage, entries in enumerate(schedule.ranks):
            if any(not isinstance(op, Op) or op.stage != stage or op.kind not in KINDS for op in entries):
                return None
            idle = () if self.costs.recompute[stage] else (Kind.R,)
            program = [4 * op.microbatch + KINDS.index(op.kind) for op in entries if op.kind not in idle]
            allowed = {F, B} | ({R} if self.early[stage] else set()) | ({W} if self.split[stage] else set())
            kinds = [[code for code in program if code & 3 == kind] for kind in range(4)]
            in_order = all(codes == sorted(codes) for codes in kinds)
            if not in_order or any(code & 3 not in allowed for code in program) or not self.allows(stage, program):
                return None
            programs.append(program)
        return programs


def _in_order(program: Program) -> bool:
    recomputed = [code for code in program if code & 3 == R]
    split = {code >> 2 for code in program if code & 3 == W}
    sums = [code >> 2 for code in program if code & 3 == W or (code & 3 == B and code >> 2 not in split)]
    return all(first < second for codes in (recomputed, sums) for first, second in pairwise(codes))
