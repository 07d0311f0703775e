"""Ranks of Megatron-LM that have files of their own: how they are called, and who has which part."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .megatron_names import COLUMN, GATED, ROW, WHOLE

_NAME = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")


@dataclass(frozen=True)
class RankPlace:
    """The number of a rank along each axis."""

    tensor: int = 0
    pipeline: int = 0
    expert: int = 0


@dataclass(frozen=True)
class RankGrid:
    """How many ranks there are along each axis."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def ranks(self) -> Iterator[RankPlace]:
        """Yield every rank that has a file, those of one stage one after the other."""
        for pipeline in range(self.pipeline):
            for expert in range(self.expert):
                for tensor in range(self.tensor):
                    yield RankPlace(tensor, pipeline, expert)

    def directory(self, rank: RankPlace) -> str:
        """Return the name of a rank's directory: it has the axes along which there are others."""
        name = f"mp_rank_{rank.tensor:02d}"
        if self.pipeline > 1:
            name += f"_{rank.pipeline:03d}"
        if self.expert > 1:
            name += f"_{rank.expert:03d}"
        return name


def numbers_of(directory: str) -> tuple[int, ...]:
    """Return the one to three numbers in the name of a rank's directory; none for another name."""
    match = _NAME.fullmatch(directory)
    return () if match is None else tuple(int(each) for each in match.groups() if each is not None)


def part_shape(shape: tuple[int, ...], split: str, ranks: int) -> tuple[int, ...]:
    """Return the shape of a tensor-parallel rank's part; sizes that do not divide are rounded down."""
    if split == WHOLE:
        return shape
    dim = 1 if split == ROW else 0
    sizes = [size // ranks if at == dim else size for at, size in enumerate(shape)]
    return tuple(sizes)


def is_divisible(shape: tuple[int, ...], split: str, ranks: int) -> bool:
    """Whether every tensor-parallel rank has an equal part."""
    count = {WHOLE: ranks, ROW: shape[-1], COLUMN: shape[0], GATED: shape[0] // 2}[split]
    return count % ranks == 0


def part_of(values: torch.Tensor, split: str, rank: int, ranks: int) -> torch.Tensor:
    """Return the part of a tensor that one tensor-parallel rank has."""
    if split == WHOLE:
        return values
    if split == ROW:
        return values.chunk(ranks, 1)[rank]
    if split == COLUMN:
        return values.chunk(ranks)[rank]
    return torch.cat([half.chunk(ranks)[rank] for half in values.chunk(2)])


def joined(parts: Sequence[torch.Tensor], split: str) -> torch.Tensor:
    """Return a tensor, given the part of each tensor-parallel rank."""
    if split == WHOLE or len(parts) == 1:
        return parts[0]
    if split == ROW:
        return torch.cat(list(parts), 1)
    if split == COLUMN:
        return torch.cat(list(parts))
    halves = [part.chunk(2) for part in parts]
    return torch.cat([half[at] for at in range(2) for half in halves])
