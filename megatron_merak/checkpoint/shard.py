"""A rank's shard of a full tensor, and how the shards of two layouts overlap."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..parallel.agree import gather_json

Intervals = tuple[tuple[int, int], ...]
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Shard:
    """This rank's part of one tensor, under its HuggingFace name and in HuggingFace orientation.

    name:      of the tensor.
    shape:     of the full tensor, without padding.
    dim:       the sharded dimension; None if this rank has the full tensor.
    intervals: index ranges [start, stop) along ``dim``, in the order in which ``tensor`` has them.
    tensor:    of ``shape``, except that ``dim`` is as long as the intervals together; any strides.
               Loading copies into it.
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

    def __post_init__(self):
        if self.dim is not None:
            bounds = [
                0,
                *(bound for interval in self.intervals for bound in interval),
                self.shape[self.dim],
            ]
            assert min(bounds) == 0 and max(bounds) == bounds[-1], (
                f"{self.name}: {self.intervals} of {self.shape}"
            )
        want = local_shape(self.shape, self.dim, self.intervals)
        assert tuple(self.tensor.shape) == want, (
            f"{self.name}: holds {tuple(self.tensor.shape)}, describes {want}"
        )

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
    shape: Sequence[int], dim: int | None, intervals: Iterable[Sequence[int]]
) -> tuple[int, ...]:
    """Return the shape of the shard that ``intervals`` along ``dim`` cut out of a tensor of
    ``shape``.
    """
    shape = tuple(shape)
    if dim is None:
        return shape
    return shape[:dim] + (sum(stop - start for start, stop in intervals),) + shape[dim + 1 :]


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


def overlaps(
    shape: Sequence[int], source: tuple[int | None, Intervals], target: tuple[int | None, Intervals]
) -> Iterator[tuple[Slices, Slices]]:
    """Yield (slices of the source shard, slices of the target shard) of the common elements of a
    full tensor.

    source, target: (dim, intervals). If the dims differ, every pair of intervals shares a
                    rectangle.

    Both sides of a pair have equal, non-empty shapes.
    """
    if not shape:
        yield (), ()
        return
    source_dim, source_intervals = _divided(shape, source)
    target_dim, target_intervals = _divided(shape, target)
    for source_offset, source_start, source_stop in _placed(source_intervals):
        for target_offset, target_start, target_stop in _placed(target_intervals):
            take = [slice(0, extent) for extent in shape]
            put = [slice(0, extent) for extent in shape]
            if source_dim == target_dim:
                start = max(source_start, target_start)
                stop = min(source_stop, target_stop)
                if start >= stop:
                    continue
                take[source_dim] = slice(
                    start - source_start + source_offset, stop - source_start + source_offset
                )
                put[target_dim] = slice(
                    start - target_start + target_offset, stop - target_start + target_offset
                )
            else:
                take[source_dim] = slice(source_offset, source_offset + source_stop - source_start)
                take[target_dim] = slice(target_start, target_stop)
                put[source_dim] = slice(source_start, source_stop)
                put[target_dim] = slice(target_offset, target_offset + target_stop - target_start)
            yield tuple(take), tuple(put)


def _divided(shape: Sequence[int], part: tuple[int | None, Intervals]) -> tuple[int, Intervals]:
    dim, intervals = part
    return (0, ((0, shape[0]),)) if dim is None else (dim, intervals)


def _placed(intervals: Intervals) -> Iterator[tuple[int, int, int]]:
    """Return (offset in the shard, start, stop) of each interval that is not empty."""
    offset = 0
    for start, stop in intervals:
        if start < stop:
            yield offset, start, stop
        offset += stop - start
