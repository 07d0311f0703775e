"""How long a stage takes when tensor-parallel collectives run behind other work."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_merak.planner.cost import UnitCost


@dataclass(frozen=True)
class Times:
    """Seconds of one micro-batch on some units; ``backward`` includes ``weight``, not recomputation. ``hidden``: how
    much less a forward and the backward of another micro-batch take together than one after the other."""

    forward: float
    backward: float
    weight: float
    hidden: float = 0.0


def times(costs: Sequence[UnitCost], overlap: str, splits: bool = False) -> Times:
    """Of consecutive units of a stage. ``overlap``: see ``--tp-comm-overlap``. ``splits``: weight gradients are ops of
    their own, which hide no collective.

    - none: every collective is waited for.
    - weight-gradient: those of the backward run behind the weight gradients of the same units.
    - sub-pipeline: those of one half of the micro-batch run behind the computation of the other half, but for the last.
    - pair: as weight-gradient, and what is left runs behind the other micro-batch where two run together.
    """
    forward, backward = sum(cost.forward for cost in costs), sum(cost.backward for cost in costs)
    weight = sum(cost.weight for cost in costs)
    ahead, behind = (sum(cost.reduces[side] for cost in costs) for side in (0, 1))
    if overlap == "sub-pipeline" and (ahead or behind):
        return _in_halves(costs, splits)
    if overlap != "none" and not splits:
        behind = max(0.0, behind - weight)
    hidden = min(ahead, backward) + min(behind, forward) if overlap == "pair" else 0.0
    return Times(forward + ahead, backward + behind, weight, hidden)


def _in_halves(costs: Sequence[UnitCost], splits: bool) -> Times:
    compute = [
        sum(cost.forward + cost.halving[0] for cost in costs),
        sum(cost.backward + cost.halving[1] for cost in costs),
    ]
    weight = sum(cost.weight for cost in costs)
    reduces = [sum(cost.half_reduces[side] for cost in costs) for side in (0, 1)]
    # Nothing is left to do behind the last collective of the second half but its weight gradients.
    tails = [max((cost.last_reduces[side] for cost in costs), default=0.0) for side in (0, 1)]
    if not splits:
        tails[1] = max(0.0, tails[1] - weight / max(len(costs), 1))
    forward, backward = (max(work, reduce) + tail for work, reduce, tail in zip(compute, reduces, tails, strict=True))
    return Times(forward, backward, weight)
