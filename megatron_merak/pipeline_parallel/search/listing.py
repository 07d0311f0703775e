"""List scheduling: whenever a rank is free, it takes the op that a rule prefers among those that
are ready.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from heapq import heappop, heappush

from megatron_merak.pipeline_parallel.search.problem import B, F, Problem, Program, R, W

Choice = tuple[float, int]
"""When an op can start, and the place of its stage among those of the rank."""


@dataclass(frozen=True)
class ListingRule:
    """A rule of list scheduling.

    warmup:       the most micro-batches in flight between F and B, per stage.
    patience:     a rank that could run an op of d seconds waits instead for a B (with
                  `forward_first`, an F) that arrives within patience * d.
    early:        the most micro-batches that are recomputed before their B is ready.
    split:        whether a stage has W ops, where it may (default: yes).
    weights_last: W ops wait until all backwards are done, or memory runs out, instead of filling
                  every gap.
    late:         which of a rank's ready stages goes first, the last or the first, in forwards and
                  in backwards.
    """

    warmup: tuple[int, ...]
    patience: float = 0.0
    forward_first: bool = False
    early: int = 2
    split: tuple[bool, ...] = ()
    weights_last: bool = False
    late: tuple[bool, bool] = (True, True)


def list_programs(problem: Problem, rule: ListingRule) -> list[Program] | None:
    """Return the programs of all ranks under the rule; None if they do not finish.

    Deterministic: equal times are taken in the order of ranks.
    """
    if problem.compiled is not None:
        return problem.compiled.list(*astuple(rule)) or None
    ranks = [Rank(problem, rule, index) for index in range(problem.ranks)]
    programs = play(problem, ranks)
    return programs if all(rank.is_over for rank in ranks) else None


def play(problem: Problem, ranks: Sequence["Rank"]) -> list[Program]:
    """Run the ranks until none can continue; return what they have run."""
    home = problem.home
    last = problem.stages - 1
    stages = [
        ranks[rank].stages[problem.stages_of[rank].index(stage)] for stage, rank in enumerate(home)
    ]
    wake = [(0.0, home[0])]
    while wake:
        now, r = heappop(wake)
        rank = ranks[r]
        if rank.free > now:
            continue
        code, until = rank.choose(now)
        if code is None:
            if until is not None:
                heappush(wake, (until, r))
            continue
        s = rank.run(code, now)
        if code & 3 == F and s < last:
            heappush(wake, (stages[s + 1].arrive(F, rank.free), home[s + 1]))
        elif code & 3 == B and s:
            heappush(wake, (stages[s - 1].arrive(B, rank.free), home[s - 1]))
        heappush(wake, (rank.free, r))
    return [rank.program for rank in ranks]


class ListedStage:
    """The state of a stage: how many ops of each kind it has run, and which messages are
    in flight.
    """

    def __init__(self, problem: Problem, rule: ListingRule, index: int):
        costs = problem.costs
        limits = problem.limits
        self.index = index
        self.count = problem.microbatches
        self.most_early = rule.early
        self.warmup = min(rule.warmup[index], self.count)
        self.first = index == 0
        self.last = index == problem.stages - 1
        self.early = problem.early[index]
        self.split = problem.split[index] and (not rule.split or rule.split[index])
        self.weights_last = rule.weights_last
        backward = costs.backward[index] - (costs.weight[index] if self.split else 0.0)
        self.seconds = (costs.forward[index], costs.recompute[index], backward, costs.weight[index])
        self.hops = {
            F: (0.0, 0.0)
            if self.first
            else (problem.transfer[index - 1], problem.latency[index - 1]),
            B: (0.0, 0.0) if self.last else (problem.transfer[index], problem.latency[index]),
        }
        self.kept = limits.kept[index]
        self.taped = problem.taped[index]
        self.weight_held = limits.weight_held[index]
        # Memory that a B followed by its W has in use after it, more than before.
        self.growth = max(self.weight_held - self.kept, 0.0) if self.split else 0.0
        self.through = {F: 0.0, B: 0.0}
        self.arrivals: dict[int, list[float]] = {F: [], B: []}
        self.done = [0, 0, 0, 0]

    def arrive(self, kind: int, sent: float) -> float:
        transfer, latency = self.hops[kind]
        self.through[kind] = max(sent, self.through[kind]) + transfer
        self.arrivals[kind].append(self.through[kind] + latency)
        return self.arrivals[kind][-1]

    def held(self) -> float:
        forwards, recomputed, backwards, weights = self.done
        waiting = (backwards - weights) * self.weight_held if self.split else 0.0
        return (
            (forwards - backwards) * self.kept
            + max(recomputed - backwards, 0) * self.taped
            + waiting
        )

    def run(self, kind: int) -> float:
        """Run its next op of a kind; return its seconds."""
        seconds = self.seconds[kind]
        if kind == B and self.done[R] <= self.done[B]:
            seconds += self.seconds[R]
            self.done[R] = self.done[B] + 1
        self.done[kind] += 1
        return seconds

    def ready(self, kind: int, room: float, tape: float) -> float | None:
        """Return when the message of the next F or B arrives; None if that is unknown, or the op is
        not allowed.

        room: memory that the rank can give this stage.
        tape: memory that one of its later stages needs for a B, at another time.
        """
        k = self.done[kind]
        if k == self.count:
            return None
        if kind == F:
            if k - self.done[B] >= self.warmup or self.kept + max(tape, self.needed()) > room:
                return None
        elif k >= self.done[F] or self.needed() > room:
            return None
        return self.arrival(kind, k)

    def needed(self) -> float:
        """Return the memory that the next B needs beside what is in use."""
        early = self.done[R] > self.done[B]  # then its tape is held, and goes
        return max(self.growth - self.taped, 0.0) if early else max(self.taped, self.growth)

    def arrival(self, kind: int, k: int) -> float | None:
        """Return when the message of the F or B of a micro-batch arrives; None if unknown."""
        if self.first if kind == F else self.last:
            return 0.0
        arrivals = self.arrivals[kind]
        return arrivals[k] if k < len(arrivals) else None

    def may_recompute(self, room: float) -> bool:
        ahead = self.done[R] - self.done[B]
        if not self.early or self.done[R] >= self.done[F] or ahead >= self.most_early:
            return False
        return self.taped <= room

    def may_weigh(self, full: bool) -> bool:
        if not self.split or self.done[W] >= self.done[B]:
            return False
        return full or not self.weights_last or self.done[B] == self.count


class Rank:
    """The state of a rank: its stages, their memory, and what it has run."""

    def __init__(self, problem: Problem, rule: ListingRule, index: int):
        self.rule = rule
        self.cap = problem.limits.cap[index]
        self.stages = [ListedStage(problem, rule, stage) for stage in problem.stages_of[index]]
        places = range(len(self.stages))
        self.orders = {
            F: places[::-1] if rule.late[0] else places,
            B: places[::-1] if rule.late[1] else places,
        }
        self.free = 0.0
        self.held = 0.0
        self.program: Program = []

    @property
    def is_over(self) -> bool:
        return all(
            stage.done[B] == stage.count and stage.done[W] in (0, stage.count)
            for stage in self.stages
        )

    def code(self, place: int, kind: int) -> int:
        """Return the code of the next op of a kind."""
        return 4 * (self.stages[place].done[kind] * len(self.stages) + place) + kind

    def run(self, code: int, now: float) -> int:
        """Start the op of a code; return its stage."""
        stage = self.stages[(code >> 2) % len(self.stages)]
        self.free = now + stage.run(code & 3)
        self.program.append(code)
        self.held = sum(each.held() for each in self.stages)
        return stage.index

    def choose(self, now: float) -> tuple[int | None, float | None]:
        """Return (code to run, None), or (None, when to look again if it waits for a known
        message).
        """
        kinds = (F, B) if self.rule.forward_first else (B, F)
        favourite, other = (self._next(kind, now) for kind in kinds)
        if favourite is not None and favourite[0] <= now:
            return self.code(favourite[1], kinds[0]), None
        if other is not None and other[0] <= now:
            place = other[1]
            chosen = kinds[1]
        elif (ready := self._recomputing()) is not None:
            place = ready
            chosen = R
        elif (ready := self._weighing()) is not None:
            place = ready
            chosen = W
        else:
            return None, None
        stage = self.stages[place]
        urgent = min(
            (each[0] for each in (favourite, other) if each is not None and each[0] > now),
            default=None,
        )
        if chosen == R and stage.done[R] == stage.done[B]:
            urgent = None  # B has to wait for this R anyway
        if urgent is not None and urgent < now + self.rule.patience * stage.seconds[chosen]:
            return None, urgent
        return self.code(place, chosen), None

    def _next(self, kind: int, now: float) -> Choice | None:
        """Return the next F or B: the first in order that is ready, or the one that will
        be first.
        """
        soonest: Choice | None = None
        for place in self.orders[kind]:
            room, tape = self._left(place) if kind == F else (self.cap - self.held, 0.0)
            time = self.stages[place].ready(kind, room, tape)
            if time is None:
                continue
            if time <= now:
                return time, place
            if soonest is None or time < soonest[0]:
                soonest = time, place
        return soonest

    def _left(self, place: int) -> tuple[float, float]:
        """Return the memory that a stage may still take, and the tape to leave free.

        The rank's later stages must be able to run a micro-batch that they do not have yet.
        """
        room = self.cap - self.held
        tape = 0.0
        for stage in self.stages[place + 1 :]:
            tape = max(tape, stage.taped, stage.growth)
            if stage.done[F] == stage.done[B]:
                room -= stage.kept
        return room, tape

    def _room(self, place: int) -> float:
        """Return the memory that a stage may take for longer than a B."""
        room, tape = self._left(place)
        return room - tape

    def _recomputing(self) -> int | None:
        return next(
            (
                place
                for place in self.orders[B]
                if self.stages[place].may_recompute(self._room(place))
            ),
            None,
        )

    def _weighing(self) -> int | None:
        full = max(
            stage.kept + max(stage.taped, stage.growth) for stage in self.stages
        ) > self._room(0)
        return next((place for place in self.orders[B] if self.stages[place].may_weigh(full)), None)
