"""The problem of ``search``: a pipeline of given costs under memory limits, as integers and lists,
and its fast clock.

A program is a list of codes, one program per rank. A code is ``4 * (micro-batch * stages of the
rank + place) + kind`` with the kinds F, R, B and W, and the place of the stage among those of its
rank: ``4 * micro-batch + kind`` where a rank has one stage. Every stage runs each kind in
micro-batch order, so a program is a merge of ascending sequences.
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
from megatron_merak.pipeline_parallel.simulate import StageCosts, simulate

F, R, B, W = range(4)
KINDS = (Kind.F, Kind.R, Kind.B, Kind.W)
Program = list[int]
Step = tuple[int, int, int, float]  # kind, stage, micro-batch, seconds


@dataclass(frozen=True)
class MemoryLimits:
    """What ranks may hold: ``cap`` has one value per rank, the others one per stage, all in one
    unit, such as bytes.

    A micro-batch holds `kept` from the start of F to the end of B, `taped` more while it is
    recomputed or its recomputation waits for B (from the start of R, or of a B that recomputes, to
    the end of B), and `weight_held` from the end of B to the end of W where W is its own op. The
    sum over the stages of a rank never exceeds its `cap`.
    """

    cap: tuple[float, ...]
    kept: tuple[float, ...]
    taped: tuple[float, ...]
    weight_held: tuple[float, ...]

    def __post_init__(self):
        for name, values in vars(self).items():
            expected = len(self.cap if name == "cap" else self.kept)
            if len(values) != expected or any(not value >= 0 for value in values):
                raise ScheduleError(
                    f"{name} of the limits", values, f"not {expected} numbers >= 0", "Correct it"
                )
        if len(self.cap) == len(self.kept):
            self.check(range(len(self.cap)))

    def check(self, home: Sequence[int]) -> None:
        """Raise ScheduleError if a rank has no room for one micro-batch on each of its stages.

        home: the rank of each stage.
        """
        needed_by: list[float] = [0] * len(self.cap)
        for stage, rank in enumerate(home):
            needed_by[rank] += self.kept[stage]
            needed = needed_by[rank] + self.taped[stage]
            if needed > self.cap[rank]:
                reason = f"stage {stage} needs {needed} to run one micro-batch"
                raise ScheduleError(
                    "memory cap", self.cap[rank], reason, "Raise the cap, or give the stage less"
                )

    @classmethod
    def in_flight(cls, counts: Sequence[int], chunks: int = 1) -> "MemoryLimits":
        """Return limits of ``counts[r]`` micro-batches on rank r, from F to B or W; early
        recomputation costs nothing.

        chunks: stages of each rank; a micro-batch counts on each as one of so many parts.
        """
        ones = (1,) * (len(counts) * chunks)
        return cls(tuple(count * chunks for count in counts), ones, (0,) * len(ones), ones)

    @classmethod
    def none(cls, ranks: int, stages: int) -> "MemoryLimits":
        return cls((float("inf"),) * ranks, (1,) * stages, (0,) * stages, (1,) * stages)


class Problem:
    """Costs, limits, the ranks of stages, which stages may run R (if they recompute), and whether W
    may be separate.
    """

    def __init__(
        self,
        costs: StageCosts,
        microbatches: int,
        limits: MemoryLimits | None = None,
        recompute: Sequence[bool] | None = None,
        split_weights: bool = False,
        placement: Sequence[int] = (),
    ):
        self.costs = costs
        self.microbatches = microbatches
        self.stages = len(costs.forward)
        self.home = tuple(placement) or tuple(range(self.stages))
        self.ranks = max(self.home) + 1
        if microbatches < 1:
            raise ScheduleError(
                "micro-batches", microbatches, "there is nothing to run", "Ask for at least one"
            )
        self.limits = limits or MemoryLimits.none(self.ranks, self.stages)
        sizes = ("limits", self.limits.cap, self.ranks), ("limits", self.limits.kept, self.stages)
        for name, values, count in (
            *sizes,
            ("recompute", recompute, self.stages),
            ("placement", self.home, self.stages),
        ):
            if values is not None and len(values) != count:
                reason = (
                    f"{len(values)} values for {count} "
                    f"{'stages' if count == self.stages else 'ranks'}"
                )
                raise ScheduleError(name, values, reason, "Give one each")
        self.limits.check(self.home)
        self.stages_of = tuple(
            tuple(stage for stage in range(self.stages) if self.home[stage] == rank)
            for rank in range(self.ranks)
        )
        # Between stages of one rank nothing is sent.
        crosses = [one != other for one, other in pairwise(self.home)]
        self.transfer, self.latency = (
            tuple(value if sent else 0.0 for value, sent in zip(values, crosses, strict=True))
            for values in (costs.transfer, costs.latency)
        )
        allowed = recompute or (True,) * self.stages
        self.early = tuple(
            may and cost > 0 for may, cost in zip(allowed, costs.recompute, strict=True)
        )
        self.split = tuple(split_weights and weight > 0 for weight in costs.weight)
        self.taped = tuple(
            tape if cost else 0.0
            for tape, cost in zip(self.limits.taped, costs.recompute, strict=True)
        )

    @cached_property
    def compiled(self) -> Any:
        """This problem for the loops of ``csrc/py/search.cpp``; None if those are not built."""
        host = _native.host()
        costs = list(astuple(self.costs))
        costs[4:] = self.transfer, self.latency
        limits = self.limits.cap, self.limits.kept, self.taped, self.limits.weight_held
        known = are_doubles(chain.from_iterable(costs)) and are_doubles(
            chain.from_iterable(limits), unbounded=True
        )
        if host is None or not known:
            return None
        return host.Pipeline(self.microbatches, costs, limits, self.early, self.split, self.home)

    def depth(self, stage: int) -> int:
        """Return the most micro-batches of the stage between F and B; the next B needs a tape
        beside them.
        """
        kept = self.limits.kept[stage]
        free = self.limits.cap[self.home[stage]] - self.taped[stage]
        return int(min(free / kept, self.microbatches)) if kept else self.microbatches

    def allows(self, rank: int, program: Program) -> bool:
        """Whether weight gradients, also those inside backwards, and R are in order, and memory
        suffices.
        """
        if self.compiled is not None:
            return self.compiled.allows(rank, program)
        return _in_order(program, len(self.stages_of[rank])) and self.fits(rank, program)

    def fits(self, rank: int, program: Iterable[int]) -> bool:
        """Whether the program of a rank stays within its cap; see ``MemoryLimits``."""
        limits = self.limits
        own_stages = self.stages_of[rank]
        cap = self.limits.cap[rank]
        sizes = [
            (limits.kept[stage], self.taped[stage], limits.weight_held[stage])
            for stage in own_stages
        ]
        if cap >= sum(map(sum, sizes)) * self.microbatches:
            return True
        program = list(program)
        width = len(own_stages)
        split = {code >> 2 for code in program if code & 3 == W}
        recomputed = set()
        in_use = 0.0
        for code in program:
            kind = code & 3
            item = code >> 2
            kept, taped, weight_held = sizes[item % width]
            if kind == F:
                in_use += kept
            elif kind == R:
                in_use += taped
                recomputed.add(item)
            elif kind == B:
                early = item in recomputed
                if in_use + (0 if early else taped) > cap:
                    return False
                in_use -= kept + (taped if early else 0)
                in_use += weight_held if item in split else 0
            else:
                in_use -= weight_held
            if in_use > cap:
                return False
        return True

    def compile(self, rank: int, program: Program) -> list[Step]:
        """The steps of a program: the kind, stage, micro-batch and seconds of each op."""
        costs = self.costs
        own_stages = self.stages_of[rank]
        separate = {code for code in program if code & 1}
        width = len(own_stages)
        compiled = []
        for code in program:
            kind = code & 3
            k, place = divmod(code >> 2, width)
            stage = own_stages[place]
            if kind == F:
                seconds = costs.forward[stage]
            elif kind == B:
                weight = costs.weight[stage] if code - B + W in separate else 0.0
                recompute = 0.0 if code - B + R in separate else costs.recompute[stage]
                seconds = costs.backward[stage] - weight + recompute
            else:
                seconds = costs.weight[stage] if kind == W else costs.recompute[stage]
            compiled.append((kind, stage, k, seconds))
        return compiled

    def clock(self, programs: Sequence[list[Step]]) -> list[list[float]]:
        """The end of every op of each rank, a zero first; empty where the programs deadlock.

        With one stage per rank it is the clock of ``simulate``: a message is received as
        ``passes.add_communication`` places it, posted just before the last F or B before its
        consumer, after the previous message of its channel. With several, messages of different
        stages do not wait for each other here.
        """
        home = self.home
        stages = self.stages
        ranks = self.ranks
        transfer = self.transfer
        latency = self.latency
        ends = [[0.0] for _ in range(ranks)]
        posted = [0.0] * ranks  # when the rank was free for its last F or B
        # [kind][stage][micro-batch]
        over: list[list[list[float]]] = [[[] for _ in range(stages)] for _ in KINDS]
        free = [[0.0] * stages for _ in KINDS]
        at = [0] * ranks
        left = sum(map(len, programs))
        order = [*range(ranks), *range(ranks - 2, 0, -1)] if ranks > 1 else [0]
        while left:
            before_sweep = left
            for rank in order:
                program = programs[rank]
                end = ends[rank]
                i = at[rank]
                count = len(program)
                now = end[-1]
                while i < count:
                    kind, s, k, seconds = program[i]
                    if kind == F or kind == B:
                        source, border = (s - 1, s - 1) if kind == F else (s + 1, s)
                        if 0 <= source < stages:
                            arrived = over[kind][source]
                            if k >= len(arrived):
                                break
                            start = arrived[k]
                            if home[source] != rank:
                                through = free[kind]
                                through[s] = start = (
                                    max(start, posted[rank], through[s]) + transfer[border]
                                )
                                start += latency[border]
                            if start > now:
                                now = start
                        posted[rank] = end[-1]
                        now += seconds
                        over[kind][s].append(now)
                    else:
                        now += seconds
                    end.append(now)
                    i += 1
                left -= i - at[rank]
                at[rank] = i
            if left == before_sweep:
                return []
        return ends

    def makespan(self, programs: Sequence[Program]) -> float:
        """Return seconds by the fast clock; infinite if the programs deadlock."""
        if self.compiled is not None:
            return self.compiled.makespan(programs)
        ends = self.clock([self.compile(rank, program) for rank, program in enumerate(programs)])
        return max((end[-1] for end in ends), default=float("inf"))

    def simulated(self, programs: Sequence[Program]) -> float:
        """Return seconds by ``simulate``; the fast clock agrees if every rank has one stage."""
        if self.stages == self.ranks:
            return self.makespan(programs)
        try:
            return simulate(self.to_schedule("auto", programs), self.costs).makespan
        except ScheduleError:
            return float("inf")

    def to_schedule(self, name: str, programs: Sequence[Program]) -> Schedule:
        ranks = []
        for own_stages, program in zip(self.stages_of, programs, strict=True):
            parts = [(code & 3, *divmod(code >> 2, len(own_stages))) for code in program]
            ranks.append(tuple(Op(own_stages[place], KINDS[kind], k) for kind, k, place in parts))
        cyclic = all(rank == stage % self.ranks for stage, rank in enumerate(self.home))
        return Schedule(
            name,
            self.stages,
            self.microbatches,
            tuple(ranks),
            placement=() if cyclic else self.home,
        )

    def from_schedule(self, schedule: Schedule) -> list[Program] | None:
        """Return the programs of a schedule of compute ops; None if it is no solution of this
        problem.

        It is none if stages are on other ranks, ops run together, a kind is out of micro-batch
        order, an R or W is not allowed where it is, or memory does not suffice. The R ops of a
        stage that recomputes nothing are left out.
        """
        if (
            len(schedule.ranks) != self.ranks
            or tuple(map(schedule.rank_of, range(schedule.stages))) != self.home
        ):
            return None
        programs = []
        for rank, entries in enumerate(schedule.ranks):
            own_stages = self.stages_of[rank]
            ops = [
                op
                for op in entries
                if isinstance(op, Op) and op.stage in own_stages and op.kind in KINDS
            ]
            if len(ops) != len(entries):
                return None
            program = []
            last: dict[tuple[int, Kind], int] = {}
            for op in ops:
                if op.kind is Kind.R and not self.costs.recompute[op.stage]:
                    continue
                refused = (op.kind is Kind.R and not self.early[op.stage]) or (
                    op.kind is Kind.W and not self.split[op.stage]
                )
                if refused or last.get((op.stage, op.kind), -1) >= op.microbatch:
                    return None
                last[op.stage, op.kind] = op.microbatch
                item = op.microbatch * len(own_stages) + own_stages.index(op.stage)
                program.append(4 * item + KINDS.index(op.kind))
            if not self.allows(rank, program):
                return None
            programs.append(program)
        return programs


def _in_order(program: Program, width: int) -> bool:
    """Whether each of the rank's ``width`` stages has its ops in order."""
    split = {code >> 2 for code in program if code & 3 == W}
    recomputed = [-1] * width
    summed = [-1] * width
    for code in program:
        kind = code & 3
        item = code >> 2
        if kind == F or (kind == B and item in split):
            continue
        last = recomputed if kind == R else summed
        if last[item % width] >= item:
            return False
        last[item % width] = item
    return True
