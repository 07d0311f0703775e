"""The time of a stage whose tensor-parallel collectives overlap with other work."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_merak.planner.cost import UnitCost


@dataclass(frozen=True)
class Times:
    """Times of one micro-batch on some units, in seconds.

    backward:  includes ``weight``, not recomputation.
    hidden:    time saved where a forward and the backward of another micro-batch run together.
    regathers: of ``backward``, what it does without if the units are recomputed.
    """

    forward: float
    backward: float
    weight: float
    hidden: float = 0.0
    regathers: float = 0.0

    @property
    def again(self) -> float:
        """Seconds by which recomputation makes a step longer."""
        return self.forward - self.regathers


def times(costs: Sequence[UnitCost], overlap: str, splits: bool = False) -> Times:
    """Return the times of consecutive units of a stage.

    overlap: see ``--tp-comm-overlap``.
    splits:  whether weight gradients are separate ops, which overlap with no collective.

    - none: no collective is overlapped; with any other, attention hides the keys and values that
      are passed on meanwhile, and a shared expert rows that are exchanged.
    - weight-gradient: collectives of the backward overlap with the weight gradients of the same
      units, those that gather keys and values again with gradients of inputs.
    - sub-pipeline: collectives of one half of the micro-batch overlap with computation of the
      other, except the last.
    - pair: as weight-gradient; the rest overlaps with the other micro-batch where two run together.
    """
    forward = sum(cost.forward for cost in costs)
    backward = sum(cost.backward for cost in costs)
    weight = sum(cost.weight for cost in costs)
    if overlap == "sub-pipeline" and any(sum(cost.reduces) for cost in costs):
        return _in_halves(costs, splits)
    reduces = [cost.reduces if overlap == "none" else cost.beyond for cost in costs]
    of_forward, of_backward = (sum(each[side] for each in reduces) for side in (0, 1))
    regathers = sum(cost.regathers for cost in costs)
    of_backward -= regathers
    if overlap != "none" and splits:
        of_backward += sum(cost.behind_weights for cost in costs)
    if overlap != "none":
        # Gradients of inputs take about as long as those of weights.
        regathers = sum(max(0.0, cost.regathers - cost.hiding) for cost in costs)
    if overlap != "none" and not splits:
        bare = sum(cost.bare_beyond for cost in costs)
        hiding = sum(cost.hiding for cost in costs)
        of_backward = bare + max(0.0, of_backward - bare - hiding)
    of_backward += regathers
    hidden = min(of_forward, backward) + min(of_backward, forward) if overlap == "pair" else 0.0
    return Times(forward + of_forward, backward + of_backward, weight, hidden, regathers)


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
