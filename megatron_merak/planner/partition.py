"""Cuts a chain of units into contiguous stages such that the costliest stage is as cheap as
possible.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise

from megatron_merak import _native
from megatron_merak.errors import PlanError
from megatron_merak.pipeline_parallel.doubles import are_doubles

# (stage, start, end) -> cost of the stage beside its units
ExtraCost = Callable[[int, int, int], float]
# (score of the stages before, cost of the next stage) -> their score
Score = Callable[[float, float], float]

_LARGEST_TOTAL = 2**26  # of integers, so that sums of their squares are exact in doubles


def partition(
    costs: Sequence[float],
    stages: int,
    more: ExtraCost | None = None,
    shared: Sequence[tuple[float, Sequence[int]]] = (),
) -> tuple[int, ...]:
    """Return bounds (0, ..., len(costs)) of non-empty stages; stage k has the units [bounds[k],
    bounds[k + 1]).

    Exact: the largest stage cost is minimal and, among the cuts that reach it, so is the sum of
    squared stage costs,
    which balances the other stages. Dynamic programming in O(stages * n * w), where w is the
    longest stage considered (about n / stages), in ``csrc/py/partition.cpp`` where that is built.

    more:   extra cost of a stage; infinite for a forbidden stage, and then also for more units.
    shared: (cost, units that cause it): a stage with one or more of these units bears the cost
            once.

    Raises PlanError for an impossible number of stages, for negative costs, and where ``more``
    allows no cut.
    """
    if stages < 1 or stages > len(costs):
        reason = f"every stage needs a unit, and the model is a chain of {len(costs)}"
        raise PlanError("stages", stages, reason, f"Use 1 to {len(costs)} pipeline stages")
    if min(costs) < 0:
        raise PlanError(
            "costs", f"of {len(costs)} units", "there must be none below 0", "Correct the costs"
        )
    chain = _Chain(costs, shared, None if more is None else cache(more))
    even = [len(costs) * stage // stages for stage in range(stages + 1)]
    limit = max(chain.cost(k, even[k], even[k + 1]) for k in range(stages))
    least, bounds = chain.best_cuts(stages, limit, square=False)
    if bounds is None:
        raise PlanError(
            "stages", stages, "no cut of the chain keeps each within its bounds", "Use more stages"
        )
    _, bounds = chain.best_cuts(stages, least, square=True)
    assert bounds is not None  # the limit is the cost of a cut that exists
    return bounds


def level(
    bounds: Sequence[int],
    homes: Sequence[int],
    costs: Sequence[float],
    more: ExtraCost | None = None,
    shared: Sequence[tuple[float, Sequence[int]]] = (),
) -> tuple[int, ...]:
    """Return bounds with which the costliest rank is cheaper, where ranks have several stages and that
    makes no stage costlier than the costliest: units move between stages, one at a time, as long as
    that helps.

    bounds: of stages, see ``partition``; likewise the other arguments.
    homes:  the rank that has each stage.
    """
    if len(set(homes)) == len(homes):
        return tuple(bounds)
    return _Chain(costs, shared, None if more is None else cache(more)).level(bounds, homes)


def in_ticks(seconds: float) -> float:
    """Return seconds as a multiple of 2^-40, whose sums have no error: what costs as much is as much,
    in whatever order it was added up.
    """
    return seconds if math.isinf(seconds) else round(seconds * 2**40) / 2**40


class _Chain:
    """The costs of runs of units.

    prefix: prefix[j] is the cost of the units before j.
    shared: (cost, number of the units that cause it before each unit).
    """

    def __init__(
        self,
        costs: Sequence[float],
        shared: Sequence[tuple[float, Sequence[int]]],
        more: ExtraCost | None,
    ):
        self.units = len(costs)
        self.more = more
        self.prefix = [0, *accumulate(costs)]
        users = [frozenset(units) for _, units in shared]
        before = [[0, *accumulate(int(unit in own) for unit in range(self.units))] for own in users]
        self.shared = [(cost, counts) for (cost, _), counts in zip(shared, before, strict=True)]
        numbers = [*costs, *(cost for cost, _ in shared)]
        integers = more is None and all(isinstance(value, int) for value in numbers)
        integers = integers and sum(map(abs, numbers)) <= _LARGEST_TOTAL
        # The compiled version uses doubles; sums of Python's integers, or of integers and floats,
        # may be longer.
        self.compiled = integers or (
            all(isinstance(value, float) for value in numbers) and are_doubles(numbers)
        )

    def weigh(self, start: int, end: int) -> float:
        """Return the cost of a run's units, which never decreases with more units."""
        extra: float = 0  # an integer where all costs are
        for cost, before in self.shared:
            if before[end] > before[start]:
                extra += cost
        return self.prefix[end] - self.prefix[start] + extra

    def cost(self, stage: int, start: int, end: int) -> float:
        return self.weigh(start, end) + (self.more(stage, start, end) if self.more else 0.0)

    def level(self, bounds: Sequence[int], homes: Sequence[int]) -> tuple[int, ...]:
        bounds = tuple(bounds)
        costs = [self.cost(k, *run) for k, run in enumerate(pairwise(bounds))]
        limit = max(costs)
        # Of equal ones the last stage of the first rank: far from the head, whose stage is the longest
        # in most models, and with few micro-batches in flight.
        takers = sorted(range(len(homes)), key=lambda stage: (homes[stage], -stage))
        while True:
            loads = dict.fromkeys(homes, 0.0)
            for home, cost in zip(homes, costs, strict=True):
                loads[home] += cost
            busiest = max(loads, key=loads.__getitem__)
            best = (loads[busiest], sum(load * load for load in loads.values()))
            found = None
            for giver in (k for k, home in enumerate(homes) if home == busiest):
                for taker in (k for k in takers if homes[k] != busiest):
                    moved = self._passed_on(bounds, giver, taker, limit=limit)
                    if moved is None:
                        continue
                    others = dict(loads)
                    for k, cost in moved[1].items():
                        others[homes[k]] += cost - costs[k]
                    score = (max(others.values()), sum(load * load for load in others.values()))
                    if score < best:
                        best, found = score, moved
            if found is None:
                return bounds
            bounds = found[0]
            for k, cost in found[1].items():
                costs[k] = cost

    def _passed_on(
        self,
        bounds: tuple[int, ...],
        giver: int,
        taker: int,
        limit: float,
    ) -> tuple[tuple[int, ...], dict[int, float]] | None:
        """Return the bounds, and the costs of stages that change, if ``giver`` passes a unit on, and all
        stages up to ``taker`` too; None if a stage would cost more than ``limit`` or have no unit.
        """
        if bounds[giver + 1] - bounds[giver] == 1:
            return None
        first, last = sorted((giver, taker))
        step = -1 if giver < taker else 1
        moved = list(bounds)
        for border in range(first + 1, last + 1):
            moved[border] += step
        changed = {}
        for k in (taker, *range(first, last + 1)):
            cost = self.cost(k, moved[k], moved[k + 1])
            if cost > limit:
                return None
            changed[k] = cost
        return tuple(moved), changed

    def best_cuts(
        self, stages: int, limit: float, square: bool
    ) -> tuple[float, tuple[int, ...] | None]:
        """Return the least score and its bounds, over all cuts whose stages cost at most ``limit``;
        None if none does.

        square: whether the score is the sum of squared stage costs; otherwise it is the largest
                stage cost.
        """
        host = _native.host()
        if host is None or not self.compiled:
            return self._best_cuts(stages, limit, _add_square if square else max)
        least, bounds = host.best_cuts(self.prefix, self.shared, stages, limit, square, self.more)
        return least, tuple(bounds) if bounds else None

    def _best_cuts(
        self, stages: int, limit: float, score: Score
    ) -> tuple[float, tuple[int, ...] | None]:
        # best[j]: the least score of units [0, j) in the stages so far.
        best: list[float | None] = [0] + [None] * self.units
        choices: list[list[int]] = []
        for stage in range(stages):
            reached: list[float | None] = [None] * (self.units + 1)
            choice = [0] * (self.units + 1)
            for end in range(stage + 1, self.units - (stages - stage - 1) + 1):
                for start in range(end - 1, stage - 1, -1):
                    cost = self.weigh(start, end)
                    if cost > limit:
                        break
                    before = best[start]
                    if before is None:
                        continue
                    cost += self.more(stage, start, end) if self.more else 0.0
                    if math.isinf(cost):
                        break
                    if cost > limit:
                        continue
                    total = score(before, cost)
                    least = reached[end]
                    if least is None or total < least:
                        reached[end], choice[end] = total, start
            best = reached
            choices.append(choice)
        least = best[self.units]
        if least is None:
            return math.inf, None
        bounds = [self.units]
        for choice in reversed(choices):
            bounds.append(choice[bounds[-1]])
        return least, tuple(reversed(bounds))


def _add_square(before: float, cost: float) -> float:
    return before + cost * cost
