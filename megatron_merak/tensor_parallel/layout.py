"""How a rank's parameter is made of slices of HuggingFace tensors.

A parameter may fuse several of them along its rows (q, k and v in one matmul), hold one transposed
(GPT-2 stores [in, out]), and carry padding rows at its end. Initialisation, checkpoints and weight
exchange see only the views given here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..plan import TensorSharding


@dataclass(frozen=True)
class Init:
    """'normal' with standard deviation ``std``, 'ones' or 'zeros'."""

    kind: str
    std: float = 0.0


@dataclass(frozen=True)
class Piece:
    """One HuggingFace tensor inside a parameter; ``transposed`` when the parameter stores it as
    [out, in].
    """

    sharding: TensorSharding
    init: Init
    transposed: bool = False


@dataclass(frozen=True)
class ParameterLayout:
    """The pieces of one parameter, in the order of its rows."""

    pieces: tuple[Piece, ...]

    @property
    def sharded(self) -> bool:
        """Whether tensor-parallel ranks hold different values."""
        return self.pieces[0].sharding.dim is not None

    def views(
        self, parameter: torch.Tensor, tp_rank: int, tp: int
    ) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Each piece with the part of ``parameter`` that holds it, as a view in HuggingFace
        orientation.
        """
        row = 0
        for piece in self.pieces:
            shape = piece.sharding.local_shape(tp_rank, tp)
            rows = shape[-1] if piece.transposed else shape[0]
            view = parameter[row : row + rows]
            row += rows
            yield piece, view.t() if piece.transposed else view
