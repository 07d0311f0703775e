"""The parameters of one rank as two flat tensors: values in the model's dtype, gradients in fp32, at the same offsets.

Layout of three units, in forward order, `d` parameters of one group (with weight decay, say) and `n` of another, `.`
padding:

    | d d . d . n . n n . | d . d d . n . | d d . n n . |
      unit 0                unit 1          unit 2
                          <- bucket 1    <- bucket 0       (filled from the end: backward finishes the last unit first)

Where data-parallel ranks share the optimizer's work (ZeRO stage 1), every bucket is cut into equal shards, one for each
of them. What only the optimizer reads then exists for a rank's own shards alone, one behind the other:

    main_grad, data   | bucket 1: shard 0 | shard 1 | bucket 0: shard 0 | shard 1 |
    state of rank 1                       | bucket 1          | bucket 0          |
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch

ALIGNMENT = 64  # elements: 256 bytes in fp32, 128 in bf16, so that every view starts on a cache line


@dataclass(frozen=True)
class BufferEntry:
    """One parameter that a buffer shall hold.

    group: parameters of one group have the same learning rate and weight decay.
    counted: this rank counts its gradient in the global norm; False where another rank holds the same parameter.
    fp32: it is used in fp32, whatever the dtype of the buffer.
    tied: ranks of other stages hold it as well, so that its shards must be cut in the same way in all their buffers.
    """

    name: str
    shape: tuple[int, ...]
    group: int
    counted: bool = True
    fp32: bool = False
    tied: bool = False


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies: elements [start, stop) of the flat tensors, padding excluded."""

    start: int
    stop: int
    shape: tuple[int, ...]
    group: int
    counted: bool
    fp32: bool


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of `main_grad`, padding included, which hold exactly the parameters `names`.

    sharded: every data-parallel rank owns an equal shard of it; else each of them owns, and updates, all of it.
    """

    start: int
    stop: int
    names: tuple[str, ...]
    sharded: bool = False


class Owned(NamedTuple):
    """Elements [start, stop) of the flat tensors whose optimizer state starts at `offset` of this rank's."""

    start: int
    stop: int
    offset: int


class GroupRange(NamedTuple):
    """Elements [start, stop), padding included, of one group of parameters."""

    start: int
    stop: int
    group: int


class ParameterBuffer:
    """Flat storage for all parameters of one rank.

    entries: unit by unit in forward order. Inside a unit the entries of the first group come first.
    dtype: of `data`; `main_grad` is always fp32.
    bucket_elements: a bucket closes once it holds this many elements; no parameter is split. None: one bucket.
    shards, shard: how many data-parallel ranks share the optimizer's work, and which of them this one is.

    data        [size] dtype     zeros until they are filled through `parameter(name)`
    master      [owned_size]     fp32, what the optimizer updates and rounds into `data`: `data` itself where that is
                                 fp32, else a copy, taken when it is first asked for
    main_grad   [size] fp32      the sum of this step's gradients; between steps, where `spread` puts state
    slots       parameter name -> Slot, in order of offset
    buckets     contiguous, disjoint, they cover everything; buckets[0] holds the last parameters
    ranges      contiguous, disjoint, they cover everything, in order of offset; neighbours differ in `group`
    owned       what this rank updates, in order of offset; everything unless `sharded`
    own_grads   of each of `owned`, the gradient [stop - start]: views of `main_grad`
    own_data    of each of `owned`, the values: views of `data`
    """

    def __init__(
        self,
        entries: Sequence[Sequence[BufferEntry]],
        dtype: torch.dtype,
        device: torch.device | str,
        bucket_elements: int | None = None,
        shards: int = 1,
        shard: int = 0,
    ):
        assert bucket_elements is None or bucket_elements > 0, bucket_elements
        assert 0 <= shard < shards, (shard, shards)
        self.sharded, self.shard = shards > 1, shard
        if dtype == torch.float32:  # then `data` is the master copy, and no entry lies apart
            entries = [[replace(entry, fp32=False) for entry in group] for group in entries]
        if self.sharded:
            self.slots, self.size, self.buckets = _lay_out_shards(entries, bucket_elements, shards * ALIGNMENT)
        else:
            self.slots, self.size = _lay_out(entries)
            self.buckets = _cut_into_buckets(self.slots, self.size, bucket_elements or max(self.size, 1))
        self.owned = _owned(self.buckets, self.size, shards, shard)
        self.owned_size = sum(stop - start for start, stop, _ in self.owned)
        places = zip(reversed(self.buckets), self.owned, strict=True) if self.sharded else ()
        self._shard_of = {bucket: (start, stop) for bucket, (start, stop, _) in places if bucket.sharded}
        self.ranges = _merge_ranges(self.slots, self.size)
        self.dtype = dtype
        self.device = torch.device(device)
        self.data = torch.zeros(self.size, dtype=dtype, device=device)
        self._master: torch.Tensor | None = None
        self.main_grad = torch.zeros(self.size, dtype=torch.float32, device=device)
        self.own_data = tuple(self.data[start:stop] for start, stop, _ in self.owned)
        self.own_grads = tuple(self.main_grad[start:stop] for start, stop, _ in self.owned)

    def view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """The part of `flat` ([size], any dtype) that belongs to parameter `name`, in its shape."""
        slot = self.slots[name]
        return flat[slot.start : slot.stop].view(slot.shape)

    @property
    def master(self) -> torch.Tensor:
        if self._master is None:
            self._master = self.data if self.dtype == torch.float32 else self.own(self.data).to(torch.float32)
        return self._master

    def shard_of(self, bucket: Bucket) -> tuple[int, int]:
        """Elements [start, stop) of a sharded bucket that this rank owns."""
        return self._shard_of[bucket]

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """What this rank owns of `flat` ([size]), one shard behind the other: [owned_size], `flat` if it owns all."""
        return torch.cat([flat[:0], *(flat[start:stop] for start, stop, _ in self.owned)]) if self.sharded else flat

    def spread(self, state: torch.Tensor) -> torch.Tensor:
        """`state` ([owned_size]) at its places in a flat tensor [size]: itself if this rank owns everything, else
        `main_grad`, whose other elements stay."""
        if not self.sharded:
            return state
        for start, stop, offset in self.owned:
            self.main_grad[start:stop] = state[offset : offset + stop - start]
        return self.main_grad

    def parameter(self, name: str) -> torch.Tensor:
        """What the model computes with: of `data`, or of `master` for an entry that is used in fp32."""
        return self.view(self.master if self.slots[name].fp32 else self.data, name)

    def refresh_master(self) -> None:
        """Take the values of `data`, but for entries used in fp32, whose values are in `master` alone."""
        for data, master in self._rounded():
            master.copy_(data)

    def follow_edits(self) -> None:
        """After values were written from outside: `master` takes those of `data` that it would not round to."""
        for data, master in self._rounded():
            master.copy_(torch.where(master.to(self.dtype) == data, master, data.to(torch.float32)))

    def _rounded(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What this rank owns of every parameter in `data`, and what of `master` is rounded into it."""
        if self.master is self.data:
            return
        for slot in self.slots.values():
            for start, stop, offset in self.owned if not slot.fp32 else ():
                first, last = max(start, slot.start), min(stop, slot.stop)
                if first < last:
                    yield self.data[first:last], self.master[offset + first - start : offset + last - start]

    def grad(self, name: str) -> torch.Tensor:
        return self.view(self.main_grad, name)

    def own_grad(self, name: str) -> list[torch.Tensor]:
        """What this rank owns of a parameter's gradient: flat views, none where others own all of it."""
        slot, found = self.slots[name], []
        for (start, stop, _), grad in zip(self.owned, self.own_grads, strict=True):
            first, last = max(start, slot.start), min(stop, slot.stop)
            if first < last:
                found.append(grad[first - start : last - start])
        return found


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _lay_out(groups: Sequence[Sequence[BufferEntry]], offset: int = 0) -> tuple[dict[str, Slot], int]:
    slots: dict[str, Slot] = {}
    for group in groups:
        for entry in sorted(group, key=lambda entry: entry.group):
            assert entry.name not in slots, f"parameter {entry.name} is listed twice"
            elements = prod(entry.shape)
            slots[entry.name] = Slot(
                offset, offset + elements, tuple(entry.shape), entry.group, entry.counted, entry.fp32
            )
            offset = _align(offset + elements)
    return slots, offset


def _lay_out_shards(
    groups: Sequence[Sequence[BufferEntry]], bucket_elements: int | None, alignment: int
) -> tuple[dict[str, Slot], int, tuple[Bucket, ...]]:
    """As `_lay_out` and `_cut_into_buckets`, with every bucket of a length that `alignment` divides.

    Entries used in fp32 lie in the master copy itself, which each rank therefore has all of: they come first, in a
    bucket that is not sharded. A tied entry has a bucket of its own, so that ranks with other neighbours cut it alike.
    """
    apart = [entry for group in groups for entry in group if entry.fp32]
    order = [e for group in groups for e in sorted(group, key=lambda entry: entry.group) if not e.fp32]
    runs: list[list[BufferEntry]] = [[]]  # of each bucket, from the end
    held = 0
    for entry in reversed(order):
        full = held >= (bucket_elements or math.inf)
        if runs[-1] and (full or entry.tied or runs[-1][-1].tied):
            runs.append([])
            held = 0
        runs[-1].append(entry)
        held += _align(prod(entry.shape))
    runs.append(apart[::-1])
    slots: dict[str, Slot] = {}
    buckets: list[Bucket] = []
    offset = 0
    for run in reversed([run for run in runs if run]):
        placed, size = _lay_out([run[::-1]], offset)
        stop = offset + -(-(size - offset) // alignment) * alignment
        buckets.append(Bucket(offset, stop, tuple(reversed(placed)), not run[0].fp32))
        slots |= placed
        offset = stop
    return slots, offset, tuple(reversed(buckets))


def _owned(buckets: Sequence[Bucket], size: int, shards: int, shard: int) -> tuple[Owned, ...]:
    if shards == 1:
        return (Owned(0, size, 0),)
    owned, offset = [], 0
    for bucket in reversed(buckets):
        length = (bucket.stop - bucket.start) // (shards if bucket.sharded else 1)
        start = bucket.start + (shard * length if bucket.sharded else 0)
        owned.append(Owned(start, start + length, offset))
        offset += length
    return tuple(owned)


def _cut_into_buckets(slots: dict[str, Slot], size: int, bucket_elements: int) -> tuple[Bucket, ...]:
    buckets: list[Bucket] = []
    stop, names = size, []
    for name, slot in reversed(slots.items()):
        names.append(name)
        if stop - slot.start >= bucket_elements or slot.start == 0:
            buckets.append(Bucket(slot.start, stop, tuple(names)))
            stop, names = slot.start, []
    return tuple(buckets)


def _merge_ranges(slots: dict[str, Slot], size: int) -> tuple[GroupRange, ...]:
    ranges: list[GroupRange] = []
    for slot in slots.values():
        if ranges and ranges[-1].group != slot.group:
            ranges[-1] = ranges[-1]._replace(stop=slot.start)
        if not ranges or ranges[-1].group != slot.group:
            ranges.append(GroupRange(slot.start, size, slot.group))
    return tuple(ranges)
