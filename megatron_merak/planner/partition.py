"""Cut a chain of units into contiguous stages so that the costliest stage is as cheap as it can be."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from megatron_merak.errors import PlanError

Weigh = Callable[[int, int], float]  # cost of a stage from one unit to before another; more units never cost less
Score = Callable[[float, float], float]  # (score of the stages before, cost of the next stage) -> their score


def partition(
    costs: Sequence[float],
    stages: int,
    reach: Sequence[Sequence[int]] | None = None,
    shared: Sequence[tuple[float, Sequence[int]]] = (),
) -> tuple[int, ...]:
    """The bounds (0, ..., len(costs)) of ``stages`` runs of one unit or more; run k is [bounds[k], bounds[k + 1]).

    Exact: the largest stage cost is minimal, and among the cuts that reach it the sum of squared stage costs is, so
    that the other stages are balanced too. ``reach[stage][end]`` is the lowest unit at which a stage that ends before
    unit ``end`` may start (None: anywhere). ``shared`` are further costs, each with the units that cause it: a stage
    with one of them or more bears it once. Dynamic programming in O(stages * n * w), w the longest run that is worth a
    look (about n / stages). Raises PlanError, also where ``reach`` allows no cut.
    """
    if stages < 1 or stages > len(costs):
        reason = f"every stage needs a unit, and the model is a chain of {len(costs)}"
        raise PlanError("stages", stages, reason, f"Use 1 to {len(costs)} pipeline stages")
    if min(costs) < 0:
        raise PlanError("costs", f"of {len(costs)} units", "there must be none below 0", "Correct the costs")
    prefix = [0, *accumulate(costs)]
    causes = [[0, *accumulate(int(unit in users) for unit in range(len(costs)))] for _, users in shared]
    extra = [(cost, count) for (cost, _), count in zip(shared, causes, strict=True)]

    def weigh(start: int, end: int) -> float:
        return prefix[end] - prefix[start] + sum(cost for cost, count in extra if count[end] > count[start])

    even = [len(costs) * stage // stages for stage in range(stages + 1)]
    limit = max(weigh(even[k], even[k + 1]) for k in range(stages))
    reach = [[0] * len(prefix)] * stages if reach is None else reach
    least, bounds = _best_cuts(weigh, reach, limit, max)
    if bounds is None:
        least, bounds = _best_cuts(weigh, reach, math.inf, max)
    if bounds is None:
        raise PlanError("stages", stages, "no cut of the chain keeps each within its bounds", "Use more stages")
    _, bounds = _best_cuts(weigh, reach, least, lambda before, stage: before + stage * stage)
    assert bounds is not None  # the limit is the cost of a cut that exists
    return bounds


def _best_cuts(
    weigh: Weigh, reach: Sequence[Sequence[int]], limit: float, score: Score
) -> tuple[float, tuple[int, ...] | None]:
    """The least score and its bounds, over all cuts within ``reach`` whose stages each cost at most ``limit``; no
    bounds where there is none."""
    units, stages = len(reach[0]) - 1, len(reach)
    best: list[float | None] = [0] + [None] * units  # best[j]: least score of units [0, j) in the stages so far
    choices: list[list[int]] = []
    for stage in range(stages):
        reached: list[float | None] = [None] * (units + 1)
        choice = [0] * (units + 1)
        for end in range(stage + 1, units - (stages - stage - 1) + 1):
            for start in range(end - 1, max(stage, reach[stage][end]) - 1, -1):
                cost = weigh(start, end)
                if cost > limit:
                    break
                before = best[start]
                if before is None:
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
