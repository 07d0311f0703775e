"""A server's piece of the parameters: fp32 weights, both moments, and how a gradient
updates them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from .layout import PieceLayout

# of a piece's state, in the order of their numbers on the wire
KINDS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Update:
    """How a gradient is applied.

    scale: a factor of the gradient.
    rates: (learning rate, weight decay) of each group.
    """

    scale: float
    rates: Sequence[tuple[float, float]]


class ServedPiece:
    """The parameters and optimizer state of one server.

    state:   each of KINDS, fp32 [layout.elements].
    weights: ``master`` in the layout's dtype; the same memory in fp32.
    version: number of updates in this job.
    steps:   t of Adam's bias correction.
    """

    def __init__(self, layout: PieceLayout):
        self.layout = layout
        self.state = {kind: torch.zeros(layout.elements) for kind in KINDS}
        self.rounds = layout.dtype != "float32"
        dtype = getattr(torch, layout.dtype)
        self.weights = (
            torch.zeros(layout.elements, dtype=dtype) if self.rounds else self.state["master"]
        )
        self.version = self.steps = 0

    def refresh(self) -> None:
        """Round ``weights`` from a state that was stored."""
        if self.rounds:
            self.weights.copy_(self.state["master"])

    @torch.no_grad()
    def update(self, gradient: Tensor, update: Update) -> None:
        """Take one step of AdamW. gradient: fp32 [layout.elements]."""
        self.version += 1
        self.steps += 1
        master, exp_avg, exp_avg_sq = (self.state[kind] for kind in KINDS)
        for start, stop, group in self.layout.groups:
            lr, weight_decay = update.rates[group]
            own = slice(start, stop)
            ops.adamw_(
                master[own],
                exp_avg[own],
                exp_avg_sq[own],
                gradient[own],
                self.weights[own] if self.rounds else None,
                lr=lr,
                betas=self.layout.betas,
                eps=self.layout.eps,
                weight_decay=weight_decay,
                step=self.steps,
                scale=update.scale,
            )

    @torch.no_grad()
    def square_norm(self, gradient: Tensor) -> float:
        """Return the squared norm of what this piece counts of a gradient; not finite if a copy is
        not.
        """
        total = torch.zeros((), dtype=torch.float64)
        for start, stop in self.layout.counted:
            total += ops.sum_of_squares(gradient[start:stop])
        for start, stop in self.layout.copies:
            total += 0.0 * ops.sum_of_squares(gradient[start:stop])
        return total.item()

    def copy(self) -> "ServedPiece":
        """Return a copy in memory of its own."""
        other = ServedPiece.__new__(ServedPiece)
        other.layout = self.layout
        other.rounds = self.rounds
        other.version = self.version
        other.steps = self.steps
        other.state = {kind: tensor.clone() for kind, tensor in self.state.items()}
        other.weights = self.weights.clone() if self.rounds else other.state["master"]
        return other
