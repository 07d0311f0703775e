"""A rank's shard of a full tensor, and how the shards of two layouts overlap."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..parallel.agree import gather_json

Intervals = tuple[tuple[int, int], ...]
Slices = tuple[slice, ...]
Slab = tuple[int, int, int]  # another dimension than that of the intervals, start and stop along it
# which elements of a full tensor a shard has: dim, intervals and slab of it
Part = tuple[int | None, Intervals, Slab | None]


@dataclass(frozen=True)
class Shard:
    """This rank's part of one tensor, under its HuggingFace name and in HuggingFace orientation.

    name:      of the tensor.
    shape:     of the full tensor, without padding.
    dim:       the sharded dimension; None if this rank has the full tensor.
    intervals: index ranges [start, stop) along ``dim``, in the order in which ``tensor`` has them.
    tensor:    of ``shape``, except that ``dim`` is as long as the intervals together, and that of the
               slab as that; any strides.
               Loading copies into it.
    slab:      the shard is of these indices of another dimension only; None: of all.
    owner:     False: another rank writes this part.
    fetch:     fills ``tensor`` if it does not always have its values; collective over the ranks
               that have the same part.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    intervals: Intervals
    tensor: torch.Tensor
    owner: bool = True
    fetch: Callable[[], object] | None = None
    slab: Slab | None = None

    def __post_init__(self):
        assert self.slab is None or self.dim not in (None, self.slab[0]), self.name
        if self.dim is not None:
            bounds = [
                0,
                *(bound for interval in self.intervals for bound in interval),
                self.shape[self.dim],
            ]
            assert min(bounds) == 0 and max(bounds) == bounds[-1], (
                f"{self.name}: {self.intervals} of {self.shape}"
            )
        want = local_shape(self.shape, *self.part)
        assert tuple(self.tensor.shape) == want, (
            f"{self.name}: holds {tuple(self.tensor.shape)}, describes {want}"
        )

    @property
    def part(self) -> Part:
        """Which elements of the full tensor it has."""
        return self.dim, self.intervals, self.slab

    @property
    def is_written(self) -> bool:
        """Whether this rank writes it: not if it is padding only; a tensor without elements still
        has an entry.
        """
        return self.owner and (self.tensor.numel() > 0 or 0 in self.shape)


@dataclass(frozen=True)
class Turn:
    """Shards whose tensors are in memory at the same time.

    fetch: called before the tensors of ``shards`` are read or overwritten; may be collective. Those
           of other turns are gone then.
    keep:  called after they were overwritten.
    """

    shards: Sequence[Shard] = ()
    fetch: Callable[[], object] = lambda: None
    keep: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class StateKind:
    """This rank's shards of one kind of state ("model", "exp_avg").

    Turns may share memory, into which their state is gathered one after the other.
    """

    turns: Sequence[Turn]

    @property
    def shards(self) -> list[Shard]:
        return [shard for turn in self.turns for shard in turn.shards]

    @classmethod
    def of(cls, shards: "StateKind | Sequence[Shard]") -> "StateKind":
        """Return a kind, given one, or given shards that are always in memory."""
        return shards if isinstance(shards, StateKind) else cls([Turn(shards)])


def in_turns(
    kinds: Mapping[str, StateKind], group: dist.ProcessGroup | None, device: torch.device | str
) -> Iterator[tuple[str, int, Turn]]:
    """Yield (kind, number, turn) of all turns of all kinds, each after its fetch; empty turns on
    ranks that have fewer.

    Collective over ``group``, whose ranks have the same kinds.
    """
    counts = gather_json([len(kind.turns) for kind in kinds.values()], group, device)
    for (name, kind), most in zip(kinds.items(), map(max, zip(*counts, strict=True)), strict=True):
        for number in range(most):
            turn = kind.turns[number] if number < len(kind.turns) else Turn()
            turn.fetch()
            yield name, number, turn


def local_shape(
    shape: Sequence[int],
    dim: int | None,
    intervals: Iterable[Sequence[int]],
    slab: Slab | None = None,
) -> tuple[int, ...]:
    """Return the shape of the shard that ``intervals`` along ``dim`` cut out of a tensor of
    ``shape``, or out of a slab of it.
    """
    local = list(shape)
    if slab is not None:
        local[slab[0]] = slab[2] - slab[1]
    if dim is not None:
        local[dim] = sum(stop - start for start, stop in intervals)
    return tuple(local)


def untiled(shape: Sequence[int], dim: int, parts: Iterable[tuple[Intervals, Slab | None]]) -> str:
    """Return why parts of a tensor along ``dim`` do not tile it exactly once; "" if they do.

    parts: the intervals of each, and the slab that they are of.
    """
    of_slab: dict[Slab | None, list[tuple[int, int]]] = {}
    for intervals, slab in parts:
        of_slab.setdefault(slab, []).extend(intervals)
    for spans in of_slab.values():
        if problem := uncovered(shape[dim], spans):
            return f"along dim {dim}: {problem}"
    slabs = [slab for slab in of_slab if slab is not None]
    if not slabs:
        return "" if of_slab else f"along dim {dim}: {uncovered(shape[dim], ())}"
    across = slabs[0][0]
    if len(slabs) < len(of_slab) or any(slab[0] != across for slab in slabs):
        return "some parts are of all of it, and others of some of its indices"
    problem = uncovered(shape[across], [slab[1:] for slab in slabs])
    return f"along dim {across}: {problem}" if problem else ""


def uncovered(extent: int, intervals: Iterable[Sequence[int]]) -> str:
    """Return why the intervals do not cover [0, extent) exactly once; "" if they do."""
    position = 0
    for start, stop in sorted((start, stop) for start, stop in intervals if start < stop):
        if start > position:
            return f"indices [{position}, {start}) are in no part"
        if start < position:
            return f"indices [{start}, {min(stop, position)}) are in two parts"
        position = stop
    if position < extent:
        return f"indices [{position}, {extent}) are in no part"
    return "" if position == extent else f"indices [{extent}, {position}) lie outside the tensor"


def overlaps(shape: Sequence[int], source: Part, target: Part) -> Iterator[tuple[Slices, Slices]]:
    """Yield (slices of the source shard, slices of the target shard) of the common elements of a
    full tensor.

    Both sides of a pair have equal, non-empty shapes.
    """
    for held, taken in _rectangles(shape, *source):
        for wanted, put in _rectangles(shape, *target):
            pairs = zip(held, wanted, strict=True)
            common = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in pairs]
            if all(start < stop for start, stop in common):
                yield _within(common, held, taken), _within(common, wanted, put)


def overlaps_of_rectangle(
    shape: Sequence[int], source: Part, take: Sequence[tuple[int, int]]
) -> Iterator[tuple[Slices, Slices]]:
    """As `overlaps`, of a shard and a rectangle: the ranges ``take`` along every dimension."""
    for held, taken in _rectangles(shape, *source):
        common = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(held, take, strict=True)]
        if all(start < stop for start, stop in common):
            yield _within(common, held, taken), _within(common, take, [0] * len(common))


def part_of(dim: int | None, intervals: Iterable[Any], slab: Sequence[int] | None) -> Part:
    """Return a part that was sent as JSON."""
    spans = tuple((start, stop) for start, stop in intervals)
    return dim, spans, None if slab is None else (slab[0], slab[1], slab[2])


def _within(
    common: Sequence[tuple[int, int]], ranges: Sequence[tuple[int, int]], offsets: Sequence[int]
) -> Slices:
    """Return where a shard has indices that it has at ``offsets`` from the starts of ranges on."""
    return tuple(
        slice(start - first + offset, stop - first + offset)
        for (start, stop), (first, _), offset in zip(common, ranges, offsets, strict=True)
    )


def _rectangles(
    shape: Sequence[int], dim: int | None, intervals: Intervals, slab: Slab | None = None
) -> Iterator[tuple[list[tuple[int, int]], list[int]]]:
    """Yield (index range of the full tensor, offset in the shard) along every dimension of what a
    shard has of a tensor.
    """
    ranges = [(0, extent) for extent in shape]
    offsets = [0] * len(ranges)
    if slab is not None:
        ranges[slab[0]] = slab[1:]
    if dim is None:
        yield ranges, offsets
        return
    offset = 0
    for start, stop in intervals:
        ranges[dim] = (start, stop)
        offsets[dim] = offset
        yield list(ranges), list(offsets)
        offset += stop - start
