"""When two runs are the same: the limits of the parity table, and what is written into its
cells.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

# dtype -> (largest difference of the loss, of a gradient relative to that gradient's largest entry)
LIMITS = {torch.float32: (1e-5, 1e-4), torch.float64: (1e-10, 1e-10)}
# of the largest gradient: below this a gradient is zero in exact arithmetic, and rounding in ours
NO_GRADIENT = 1e-7

EXACT, DOUBLE, WRONG, REFUSED, BROKEN = "exact", "exact in fp64", "wrong", "refused", "broken"


@dataclass(frozen=True)
class Cell:
    """One measurement. loss, gradient: the largest differences; where: of which parameter; text: of
    a failure.
    """

    state: str
    loss: float = 0.0
    gradient: float = 0.0
    where: str = ""
    text: str = ""

    @property
    def good(self) -> bool:
        return self.state in (EXACT, DOUBLE)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def loss_difference(found: float | Tensor, wanted: float | Tensor) -> float:
    """Absolute below a loss of one, relative above."""
    return abs(float(found) - float(wanted)) / max(1.0, abs(float(wanted)))


def gradient_difference(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
) -> tuple[float, str]:
    """(largest difference of a gradient relative to its own largest entry, of which parameter).

    A gradient that is nothing but rounding (``NO_GRADIENT``) counts by its difference relative to
    the largest of all gradients, scaled so that the limit of fp32 lies at ``NO_GRADIENT``.
    Parameters that ``wanted`` does not have must have no gradient, or zero; missing ones are
    infinitely wrong.
    """
    wanted = {name: grad for name, grad in wanted.items() if grad.numel()}
    largest = max((float(grad.abs().max()) for grad in wanted.values()), default=0.0)
    worst, where = 0.0, ""
    for name in sorted(wanted.keys() | found.keys()):
        if name not in wanted:
            error = math.inf if found[name].any() else 0.0
        elif name not in found or found[name].shape != wanted[name].shape:
            error = math.inf
        else:
            scale = float(wanted[name].abs().max())
            difference = float((found[name] - wanted[name]).abs().max())
            floor = NO_GRADIENT * largest
            limit = LIMITS[wanted[name].dtype][1]
            error = difference / scale if scale > floor else limit * difference / max(floor, 1e-300)
        if math.isnan(error):
            error = math.inf
        if error > worst:
            worst, where = error, name
    return worst, where


def judge(loss: float, gradient: float, where: str, dtype: torch.dtype) -> Cell:
    limits = LIMITS[dtype]
    good = loss <= limits[0] and gradient <= limits[1]
    return Cell(
        (EXACT if dtype is torch.float32 else DOUBLE) if good else WRONG, loss, gradient, where
    )
