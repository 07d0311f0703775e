"""List scheduling: every stage takes, whenever it is free, the op that a rule prefers among those that are ready."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from heapq import heappop, heappush

from megatron_merak.pipeline_parallel.search.problem import B, F, Problem, Program, R, W


@dataclass(frozen=True)
class Rule:
    """How a list is scheduled.

    `warmup[s]`: the most micro-batches that stage s holds between F and B. `patience`: a stage that could run an op of
    d seconds rather waits for a B (or, with `forward_first`, an F) that arrives within patience * d. `early`: the most
    micro-batches that are recomputed ahead of B. `split[s]`: whether stage s has W ops, where it may (default: it has);
    `weights_last`: they wait until all its backwards are done, or memory runs out, instead of filling every gap.
    """

    warmup: tuple[int, ...]
    patience: float = 0.0
    forward_first: bool = False
    early: int = 2
    split: tuple[bool, ...] = ()
    weights_last: bool = False


def list_programs(problem: Problem, rule: Rule) -> list[Program]:
    """The programs of all stages under the rule. Deterministic: equal times are taken in the order of stages."""
    if problem.compiled is not None:
        return problem.compiled.list(*astuple(rule))
    return play([Stage(problem, rule, index) for index in range(problem.stages)])


def play(stages: Sequence["Stage"]) -> list[Program]:
    """Lets the stages run until none can go on; what they then have run."""
    wake = [(0.0, 0)]
    while wake:
        now, s = heappop(wake)
        stage = stages[s]
        if stage.free > now:
            continue
        code, until = stage.choose(now)
        if code is None:
            if until is not None:
                heappush(wake, (until, s))
            continue
        stage.run(code, now)
        heappush(wake, (stage.free, s))
        if code & 3 == F and s < len(stages) - 1:
            heappush(wake, (stages[s + 1].arrive(F, stage.free), s + 1))
        elif code & 3 == B and s:
            heappush(wake, (stages[s - 1].arrive(B, stage.free), s - 1))
    return [stage.program for stage in stages]


class Stage:
    """A stage on the way: how many ops of each kind it has run, what it holds, and which messages are under way."""

    def __init__(self, problem: Problem, rule: Rule, index: int):
        costs, limits = problem.costs, problem.limits
        self.rule, self.count = rule, problem.microbatches
        self.warmup = min(rule.warmup[index], self.count)
        self.first, self.last = index == 0, index == problem.stages - 1
        self.early = problem.early[index]
        self.split = problem.split[index] and (not rule.split or rule.split[index])
        self.seconds = {F: costs.forward[index], R: costs.recompute[index], W: costs.weight[index]}
        self.backward = costs.backward[index] - (costs.weight[index] if self.split else 0.0)
        self.hops = {
            F: (0.0, 0.0) if self.first else (costs.transfer[index - 1], costs.latency[index - 1]),
            B: (0.0, 0.0) if self.last else (costs.transfer[index], costs.latency[index]),
        }
        self.cap, self.kept = limits.cap[index], limits.kept[index]
        self.taped, self.weight_held = problem.taped[index], limits.weight_held[index]
        self.through = {F: 0.0, B: 0.0}
        self.arrivals: dict[int, list[float]] = {F: [], B: []}
        self.done = [0, 0, 0, 0]
        self.free = 0.0
        self.program: Program = []

    def arrive(self, kind: int, sent: float) -> float:
        transfer, latency = self.hops[kind]
        self.through[kind] = max(sent, self.through[kind]) + transfer
        self.arrivals[kind].append(self.through[kind] + latency)
        return self.arrivals[kind][-1]

    def held(self) -> float:
        forwards, recomputed, backwards, weights = self.done
        waiting = (backwards - weights) * self.weight_held if self.split else 0.0
        return (forwards - backwards) * self.kept + max(recomputed - backwards, 0) * self.taped + waiting

    def run(self, code: int, now: float) -> None:
        kind = code & 3
        seconds = self.seconds[kind] if kind != B else self.backward
        if kind == B and self.done[R] <= self.done[B]:
            seconds += self.seconds[R]
            self.done[R] = self.done[B] + 1
        self.done[kind] += 1
        self.free = now + seconds
        self.program.append(code)

    def choose(self, now: float) -> tuple[int | None, float | None]:
        """(code to run, None), or (None, when to look again if it waits for a message that is known)."""
        forward, backward = self._ready(F), self._ready(B)
        favourite, other = (forward, backward) if self.rule.forward_first else (backward, forward)
        kinds = (F, B) if self.rule.forward_first else (B, F)
        if favourite is not None and favourite <= now:
            return 4 * self.done[kinds[0]] + kinds[0], None
        if other is not None and other <= now:
            chosen = kinds[1]
        elif self._may_recompute():
            chosen = R
        elif self._may_weigh():
            chosen = W
        else:
            return None, None
        seconds = self.seconds[chosen] if chosen != B else self.backward
        urgent = min((time for time in (favourite, other) if time is not None and time > now), default=None)
        if chosen == R and self.done[R] == self.done[B]:
            urgent = None  # B has to wait for this R anyway
        if urgent is not None and urgent < now + self.rule.patience * seconds:
            return None, urgent
        return 4 * self.done[chosen] + chosen, None

    def _ready(self, kind: int) -> float | None:
        """When the message of the next op of this kind is there; None if it is not known, or the op may not run."""
        k = self.done[kind]
        if k == self.count:
            return None
        if kind == F:
            tape = self.taped if self.done[R] <= self.done[B] else 0.0  # which the next B is going to need
            if k - self.done[B] >= self.warmup or self.held() + self.kept + tape > self.cap:
                return None
        elif k >= self.done[F]:
            return None
        elif self.done[R] <= k and self.held() + self.taped > self.cap:
            return None
        if self.first if kind == F else self.last:
            return 0.0
        arrivals = self.arrivals[kind]
        return arrivals[k] if k < len(arrivals) else None

    def _may_recompute(self) -> bool:
        ahead = self.done[R] - self.done[B]
        if not self.early or self.done[R] >= self.done[F] or ahead >= self.rule.early:
            return False
        return self.held() + self.taped <= self.cap

    def _may_weigh(self) -> bool:
        if not self.split or self.done[W] >= self.done[B]:
            return False
        full = self.held() + self.kept + self.taped > self.cap
        return full or not self.rule.weights_last or self.done[B] == self.count
