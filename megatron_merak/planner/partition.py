"""Cut a chain of units into contiguous stages so that the costliest stage is as cheap as it can be."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from megatron_merak.errors import PlanError

Weigh = Callable[[int, int], float]  # cost of a run, from one unit to before another; more units never cost less
More = Callable[[int, int, int], float]  # what a run costs beside that as a certain stage
Score = Callable[[float, float], float]  # (score of the stages before, cost of the next stage) -> their score


def partition(
    costs: Sequence[float],
    stages: int,
    more: More | None = None,
    shared: Sequence[tuple[float, Sequence[int]]] = (),
) -> tuple[int, ...]:
    """The bounds (0, ..., len(costs)) of ``stages`` runs of one unit or more; run k is [bounds[k], bounds[k + 1]).

    Exact: the largest stage cost is minimal, and among the cuts that reach it the sum of squared stage costs is, so
    that the other stages are balanced too. ``more(stage, start, end)`` is what a stage costs beside its units; infinity
    where it must not be, nor with more units. ``shared`` are further costs, each with the units that cause it: a stage
    with one of them or more bears it once. Dynamic programming in O(stages * n * w), w the longest run that is worth a
    look (about n / stages). Raises PlanError, also where ``more`` allows no cut.
    """
    if stages < 1 or stages > len(costs):
        reason = f"every stage needs a unit, and the model is a chain of {len(costs)}"
        raise PlanError("stages", stages, reason, f"Use 1 to {len(costs)} pipeline stages")
    if min(costs) < 0:
        raise PlanError("costs", f"of {len(costs)} units", "there must be none below 0", "Correct the costs")
    weigh = _weigher(costs, shared)
    more = more or (lambda stage, start, end: 0.0)
    even = [len(costs) * stage // stages for stage in range(stages + 1)]
    limit = max(weigh(even[k], even[k + 1]) + more(k, even[k], even[k + 1]) for k in range(stages))
    least, bounds = _best_cuts(weigh, more, len(costs), stages, limit, max)
    if bounds is None:
        raise PlanError("stages", stages, "no cut of the chain keeps each within its bounds", "Use more stages")
    _, bounds = _best_cuts(weigh, more, len(costs), stages, least, lambda before, stage: before + stage * stage)
    assert bounds is not None  # the limit is the cost of a cut that exists
    return bounds


def _weigher(costs: Sequence[float], shared: Sequence[tuple[float, Sequence[int]]]) -> Weigh:
    prefix = [0, *accumulate(costs)]
    causes = [[0, *accumulate(int(unit in users) for unit in range(len(costs)))] for _, users in shared]
    extra = [(cost, count) for (cost, _), count in zip(shared, causes, strict=True)]

    def weigh(start: int, end: int) -> float:
        return prefix[end] - prefix[start] + sum(cost for cost, count in extra if count[end] > count[start])

    return weigh


def _best_cuts(
    weigh: Weigh, more: More, units: int, stages: int, limit: float, score: Score
) -> tuple[float, tuple[int, ...] | None]:
    """The least score and its bounds, over all cuts whose stages each cost at most ``limit``; no bounds where there is
    none."""
    best: list[float | None] = [0] + [None] * units  # best[j]: least score of units [0, j) in the stages so far
    choices: list[list[int]] = []
    for stage in range(stages):
        reached: list[float | None] = [None] * (units + 1)
        choice = [0] * (units + 1)
        for end in range(stage + 1, units - (stages - stage - 1) + 1):
            for start in range(end - 1, stage - 1, -1):
                cost = weigh(start, end)
                if cost > limit:
                    break
                before = best[start]
                if before is None:
                    continue
                cost += more(stage, start, end)
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
    least = best[units]
    if least is None:
        return math.inf, None
    bounds = [units]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return least, tuple(reversed(bounds))
