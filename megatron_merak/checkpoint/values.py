"""What the values of a checkpoint's tensors are like, with the memory of one tensor."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_merak.checkpoint.manifest import Manifest
from megatron_merak.checkpoint.stored import read_stored

_AT_ONCE = 1 << 22  # elements that exist in fp64 at a time


@dataclass(frozen=True)
class TensorValues:
    """The values of a tensor, or of several. What is not finite only counts as such.

    nan:      number of NaN.
    infinite: number of infinities.
    finite:   number of other elements.
    least:    the smallest of these; NaN if there are none, as are ``most`` and ``rms``.
    most:     the largest of these.
    squares:  the sum of their squares.
    """

    nan: int = 0
    infinite: int = 0
    finite: int = 0
    least: float = math.nan
    most: float = math.nan
    squares: float = 0.0

    @property
    def rms(self) -> float:
        """The root of the mean square."""
        return math.sqrt(self.squares / self.finite) if self.finite else math.nan

    @property
    def extreme(self) -> tuple[int, float]:
        """By what tensors are ordered: numbers that are not finite, then the largest magnitude."""
        magnitude = max(abs(self.least), abs(self.most)) if self.finite else 0.0
        return self.nan + self.infinite, magnitude


def values_of(tensor: torch.Tensor) -> TensorValues:
    """Return what the values of a tensor are like."""
    return joined(_piece(piece) for piece in pieces(tensor))


def joined(parts: Iterable[TensorValues]) -> TensorValues:
    """Return what the values of several tensors are like together."""
    every = list(parts)
    some = [part for part in every if part.finite]
    return TensorValues(
        sum(part.nan for part in every),
        sum(part.infinite for part in every),
        sum(part.finite for part in every),
        min((part.least for part in some), default=math.nan),
        most=max((part.most for part in some), default=math.nan),
        squares=math.fsum(part.squares for part in some),
    )


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor in fp64, some at a time."""
    for piece in tensor.reshape(-1).split(_AT_ONCE):
        yield piece.to(torch.float64)


def stored_values(
    directory: Path, manifest: Manifest, kind: str, names: Iterable[str]
) -> dict[str, TensorValues]:
    """Return what the values of the named tensors of one kind are like. Raises CheckpointError."""
    return {name: values_of(read_stored(directory, manifest, kind, name)) for name in names}


def _piece(piece: torch.Tensor) -> TensorValues:
    nan = int(piece.isnan().sum())
    infinite = int(piece.isinf().sum())
    rest = piece[piece.isfinite()] if nan or infinite else piece
    if not rest.numel():
        return TensorValues(nan, infinite)
    least, most = rest.aminmax()
    squares = float(rest.square().sum())
    return TensorValues(
        nan, infinite, rest.numel(), float(least), most=float(most), squares=squares
    )
