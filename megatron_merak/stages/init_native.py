"""Initial weights of the native model: each tensor is a function of (seed, name), for any parallel
layout.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod

import torch

from ..tensor_parallel import derive_seed
from ..tensor_parallel.layout import Piece

_MEMORY = 8 << 30  # bytes of full tensors at a time


def draw(piece: Piece, seed: int) -> torch.Tensor:
    """Return the full tensor of ``piece``: fp32, on the CPU, in HuggingFace orientation, without
    padding.
    """
    shape = piece.sharding.shape
    init = piece.init
    if init.kind == "normal":
        generator = torch.Generator().manual_seed(derive_seed(seed, piece.sharding.name))
        return torch.empty(shape).normal_(0.0, init.std, generator=generator)
    return torch.full(shape, {"ones": 1.0, "zeros": 0.0}[init.kind])


def take(full: torch.Tensor, piece: Piece, tp_rank: int, tp: int) -> torch.Tensor:
    """Return one tensor-parallel rank's shard of a full tensor."""
    dim = piece.sharding.dim
    if dim is None:
        return full
    return torch.cat(
        [full.narrow(dim, a, b - a) for a, b in piece.sharding.intervals(tp_rank, tp)], dim
    )


def initialise(view: torch.Tensor, piece: Piece, seed: int, tp_rank: int, tp: int) -> None:
    """Fill this rank's ``view`` of ``piece``; rounds before copying to the device. One full tensor
    is in memory.
    """
    view.copy_(take(draw(piece, seed), piece, tp_rank, tp).to(view.dtype))


def initialise_all(
    parts: Sequence[tuple[Piece, torch.Tensor]], seed: int, tp_rank: int, tp: int, workers: int = 1
) -> None:
    """Fill the views of all pieces.

    workers: threads that draw tensors concurrently; the values do not depend on it.

    The full tensors in memory at a time take up to ``_MEMORY`` bytes, or one tensor's if that is
    more.
    """
    largest = max((4 * prod(piece.sharding.shape) for piece, _ in parts), default=1)
    workers = max(1, min(workers, _MEMORY // largest))

    def fill(part: tuple[Piece, torch.Tensor]) -> None:
        initialise(part[1], part[0], seed, tp_rank, tp=tp)

    if workers == 1:
        for part in parts:
            fill(part)
        return
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(fill, parts):
            pass


def workers_for(device: torch.device) -> int:
    """The number of CPU cores for a rank on ``device``: one on a CPU, an equal share of the host's
    on a GPU.
    """
    if device.type != "cuda":
        return 1
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, cores // max(1, torch.cuda.device_count()))
