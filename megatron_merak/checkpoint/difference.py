"""What differs between the tensors of two checkpoints, under any two layouts, with the memory of
one tensor of each.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_merak.checkpoint.found import FoundCheckpoint
from megatron_merak.checkpoint.stored import read_stored
from megatron_merak.checkpoint.values import pieces

Picked = Callable[[str, str], bool]


@dataclass(frozen=True)
class TensorChange:
    """How a tensor of one checkpoint differs from that of the same name in the other.

    name:    of both.
    equal:   whether both have the same dtype and the same bytes.
    norm:    of the first one; NaN where either has numbers that are not finite, as are all below.
    apart:   norm of the difference.
    largest: absolute difference of two elements.
    """

    name: str
    equal: bool
    norm: float
    apart: float
    largest: float

    @property
    def relative(self) -> float:
        """The norm of the difference over that of the first one; infinite where that is 0."""
        return relative(self.norm, self.apart)

    @property
    def rank(self) -> tuple[bool, float, float]:
        """By what tensors are ordered: NaN first, then the relative change."""
        odd = math.isnan(self.apart)
        return odd, 0.0 if odd else self.relative, 0.0 if odd else self.largest


@dataclass(frozen=True)
class KindDifference:
    """What differs between the tensors of one kind.

    only_first:  names of tensors that only the first checkpoint has.
    only_second: those that only the second one has.
    shapes:      tensors with two shapes, which are not compared further: name, and both.
    dtypes:      tensors with two data types: name, and both.
    changes:     of all tensors that have one shape, by name.
    """

    only_first: list[str]
    only_second: list[str]
    shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    dtypes: list[tuple[str, str, str]]
    changes: list[TensorChange]

    @property
    def equal(self) -> int:
        """Number of tensors that are equal bit for bit."""
        return sum(change.equal for change in self.changes)

    @property
    def relative(self) -> float:
        """The relative change of all compared tensors together, but for those with numbers that
        are not finite.
        """
        finite = [change for change in self.changes if math.isfinite(change.norm)]
        norm = math.hypot(*(change.norm for change in finite))
        return relative(norm, math.hypot(*(change.apart for change in finite)))

    def most(self, number: int) -> list[TensorChange]:
        """Return the tensors that changed most."""
        changed = [change for change in self.changes if not change.equal]
        return sorted(changed, key=lambda change: change.rank, reverse=True)[:number]


def relative(norm: float, apart: float) -> float:
    """Return the quotient of a difference and what it is of; infinite where that is 0."""
    if norm:
        return apart / norm
    return math.inf if apart else 0.0


def difference(
    first: FoundCheckpoint, second: FoundCheckpoint, picked: Picked
) -> dict[str, KindDifference]:
    """Return what differs, by kind.

    first:  that of which changes are fractions.
    second: the other one.
    picked: whether a tensor is compared, by kind and name.

    Raises CheckpointError.
    """
    kinds = list(first.manifest.tensors)
    kinds += [kind for kind in second.manifest.tensors if kind not in kinds]
    return {kind: _of_kind(first, second, kind, picked) for kind in kinds}


def _of_kind(
    first: FoundCheckpoint, second: FoundCheckpoint, kind: str, picked: Picked
) -> KindDifference:
    ours = first.manifest.tensors.get(kind, {})
    theirs = second.manifest.tensors.get(kind, {})
    found = KindDifference(
        [name for name in ours if name not in theirs and picked(kind, name)],
        [name for name in theirs if name not in ours and picked(kind, name)],
        [],
        [],
        changes=[],
    )
    for name in ours:
        if name not in theirs or not picked(kind, name):
            continue
        one = ours[name]
        other = theirs[name]
        if one.dtype != other.dtype:
            found.dtypes.append((name, one.dtype, other.dtype))
        if one.shape != other.shape:
            found.shapes.append((name, one.shape, other.shape))
            continue
        found.changes.append(
            change_of(
                name,
                read_stored(first.tensors, first.manifest, kind, name),
                read_stored(second.tensors, second.manifest, kind, name),
            )
        )
    return found


def change_of(name: str, one: torch.Tensor, other: torch.Tensor) -> TensorChange:
    """Return how two tensors of one shape differ."""
    equal = one.dtype == other.dtype and torch.equal(_bytes(one), _bytes(other))
    squares = 0.0
    apart = 0.0
    largest = 0.0
    for ours, theirs in zip(pieces(one), pieces(other), strict=True):
        between = ours - theirs
        squares += float(ours.square().sum())
        apart += float(between.square().sum())
        if between.numel():
            largest = max(largest, float(between.abs().max()))
    if not math.isfinite(squares + apart):
        return TensorChange(name, equal, math.nan, math.nan, largest=math.nan)
    return TensorChange(name, equal, math.sqrt(squares), math.sqrt(apart), largest=largest)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
