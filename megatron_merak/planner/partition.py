"""Cut a chain of units into contiguous stages so that the costliest stage is as cheap as it can be."""

from collections.abc import Callable, Sequence
from itertools import accumulate

from megatron_merak.errors import PlanError

Score = Callable[[float, float], float]  # (score of the stages before, cost of the next stage) -> their score


def partition(costs: Sequence[float], stages: int, extra: Sequence[float] | None = None) -> tuple[int, ...]:
    """The bounds (0, ..., len(costs)) of ``stages`` runs of one unit or more; run k is [bounds[k], bounds[k + 1]).

    Exact: the largest stage cost is minimal, and among the cuts that reach it the sum of squared stage costs is, so
    that the other stages are balanced too. ``extra`` is a cost that each stage bears besides its units. Dynamic
    programming in O(stages * n * w), w the longest run that is worth a look (about n / stages). Raises PlanError.
    """
    extra = [0] * stages if extra is None else extra
    if stages < 1 or stages > len(costs):
        reason = f"every stage needs a unit, and the model is a chain of {len(costs)}"
        raise PlanError("stages", stages, reason, f"Use 1 to {len(costs)} pipeline stages")
    if len(extra) != stages or min([*costs, *extra]) < 0:
        reason = f"there must be {stages} extra costs, and no cost below 0"
        raise PlanError("costs", f"{len(costs)} units, {len(extra)} extra", reason, "Correct the costs")
    prefix = [0, *accumulate(costs)]
    even = [len(costs) * stage // stages for stage in range(stages + 1)]
    limit = max(prefix[even[k + 1]] - prefix[even[k]] + extra[k] for k in range(stages))
    limit, _ = _best_cuts(prefix, extra, limit, max)
    _, bounds = _best_cuts(prefix, extra, limit, lambda before, stage: before + stage * stage)
    return bounds


def _best_cuts(
    prefix: Sequence[float], extra: Sequence[float], limit: float, score: Score
) -> tuple[float, tuple[int, ...]]:
    """The least score and its bounds, over all cuts whose stages each cost at most ``limit``."""
    units, stages = len(prefix) - 1, len(extra)
    best: list[float | None] = [0] + [None] * units  # best[j]: least score of units [0, j) in the stages so far
    choices: list[list[int]] = []
    for stage in range(stages):
        reached: list[float | None] = [None] * (units + 1)
        choice = [0] * (units + 1)
        for end in range(stage + 1, units - (stages - stage - 1) + 1):
            for start in range(end - 1, stage - 1, -1):
                cost = prefix[end] - prefix[start] + extra[stage]
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
    bounds = [units]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    least = best[units]
    assert least is not None  # the limit is the cost of a cut that exists
    return least, tuple(reversed(bounds))
