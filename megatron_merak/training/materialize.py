"""Initial weights: every tensor is a function of (seed, name), whatever the layout."""

import torch

from ..tensor_parallel import derive_seed
from ..tensor_parallel.layout import Piece


def draw(piece: Piece, seed: int) -> torch.Tensor:
    """The full tensor of ``piece``, fp32 on CPU, in HuggingFace orientation and without padding."""
    shape, init = piece.sharding.shape, piece.init
    if init.kind == "normal":
        generator = torch.Generator().manual_seed(derive_seed(seed, piece.sharding.name))
        return torch.empty(shape).normal_(0.0, init.std, generator=generator)
    return torch.full(shape, {"ones": 1.0, "zeros": 0.0}[init.kind])


def take(full: torch.Tensor, piece: Piece, tp_rank: int, tp: int) -> torch.Tensor:
    """The part of a full tensor that one tensor-parallel rank holds."""
    dim = piece.sharding.dim
    if dim is None:
        return full
    return torch.cat([full.narrow(dim, a, b - a) for a, b in piece.sharding.intervals(tp_rank, tp)], dim)


def initialise(view: torch.Tensor, piece: Piece, seed: int, tp_rank: int, tp: int) -> None:
    """Fill this rank's ``view`` of ``piece``. At most one full tensor is alive at a time."""
    view.copy_(take(draw(piece, seed), piece, tp_rank, tp))
