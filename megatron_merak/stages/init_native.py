"""Initial weights: every tensor is a function of (seed, name), whatever the layout."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod

import torch

from ..tensor_parallel import derive_seed
from ..tensor_parallel.layout import Piece

_MEMORY = 8 << 30  # bytes


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
    """Fill this rank's ``view`` of ``piece``, rounded to its type before it travels. One full tensor is alive."""
    view.copy_(take(draw(piece, seed), piece, tp_rank, tp).to(view.dtype))


def initialise_all(
    parts: Sequence[tuple[Piece, torch.Tensor]], seed: int, tp_rank: int, tp: int, workers: int = 1
) -> None:
    """Fill the views of all pieces. workers: threads that draw tensors side by side, which changes no number.

    The full tensors that are alive at a time take up to ``_MEMORY`` bytes, or one tensor's.
    """
    largest = max((4 * prod(piece.sharding.shape) for piece, _ in parts), default=1)
    workers = max(1, min(workers, _MEMORY // largest))

    def fill(part: tuple[Piece, torch.Tensor]) -> None:
        initialise(part[1], part[0], seed, tp_rank, tp)

    if workers == 1:
        for part in parts:
            fill(part)
        return
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(fill, parts):
            pass


def workers_for(device: torch.device) -> int:
    """The cores of this host that a rank on ``device`` has to itself: on a CPU its one, beside GPUs an equal share."""
    if device.type != "cuda":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, torch.cuda.device_count()))
