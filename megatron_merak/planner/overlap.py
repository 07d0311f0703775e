"""The time of a stage whose tensor-parallel collectives overlap with other work."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_merak.planner.cost import UnitCost


@dataclass(frozen=True)
class Times:
    """Times of one micro-batch on some units, in seconds.

    backward: includes ``weight``, not recomputation.
    hidden:   time saved where a forward and the backward of another micro-batch run together.
    """

    forward: float
    backward: float
    weight: float
    hidden: float = 0.0


def times(costs: Sequence[UnitCost], overlap: str, splits: bool = False) -> Times:
    """Return the times of consecutive units of a stage.

    overlap: see ``--tp-comm-overlap``.
    splits:  whether weight gradients are separate ops, which overlap with no collective.

    - none: no collective is overlapped.
    - weight-gradient: collectives of the backward overlap with the weight gradients of the same
      units.
    - sub-pipeline: collectives of one half of the micro-batch overlap with computation of the
      other, except the last.
    - pair: as weight-gradient; the rest overlaps with the other micro-batch where two run together.
    """
    forward = sum(cost.forward for cost in costs)
    backward = sum(cost.backward for cost in costs)
    weight = sum(cost.weight for cost in costs)
    of_forward, of_backward = (sum(cost.reduces[side] for cost in costs) for side in (0, 1))
    if overlap == "sub-pipeline" and (of_forward or of_backward):
        return _in_halves(costs, splits)
    if overlap != "none" and not splits:
        of_backward = max(0.0, of_backward - weight)
    hidden = min(of_forward, backward) + min(of_backward, forward) if overlap == "pair" else 0.0
    return Times(forward + of_forward, backward + of_backward, weight, hidden)


def _in_halves(costs: Sequence[UnitCost], splits: bool) -> Times:
    compute = [
        sum(cost.forward + cost.halving[0] for cost in costs),
        sum(cost.backward + cost.halving[1] for cost in costs),
    ]
    weight = sum(cost.weight for cost in costs)
    reduces = [sum(cost.half_reduces[side] for cost in costs) for side in (0, 1)]
    # The last collective of the second half can overlap only with its weight gradients.
    tails = [max((cost.last_reduces[side] for cost in costs), default=0.0) for side in (0, 1)]
    if not splits:
        tails[1] = max(0.0, tails[1] - weight / max(len(costs), 1))
    forward, backward = (
        max(work, reduce) + tail for work, reduce, tail in zip(compute, reduces, tails, strict=True)
    )
    return Times(forward, backward, weight)
