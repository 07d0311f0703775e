"""The parameters of one rank as two flat tensors: values in the model's dtype, gradients in fp32, at the same offsets.

Three units in forward order, parameters `d` of one group (say, with weight decay), `n` of another, padding `.`:

    | d d . d . n . n n . | d . d d . n . | d d . n n . |
      unit 0                unit 1          unit 2
                          <- bucket 1    <- bucket 0       (filled from the end: backward finishes the last unit first)

Where the optimizer is sharded over data-parallel ranks (ZeRO stage 1), every bucket is split into equal shards, one per
rank. A rank then has optimizer state only for its own shards, concatenated:

    main_grad, data   | bucket 1: shard 0 | shard 1 | bucket 0: shard 0 | shard 1 |
    state of rank 1                       | bucket 1          | bucket 0          |

Where gradients (stage 2), or gradients and values (stage 3), are sharded too, each unit is a bucket. `main_grad`, in
stage 3 also `data`, are `Pieces`, one per bucket, with memory only while the unit runs. A rank's own shards of them are
laid out like its optimizer state. They may be in memory of the host: then all of this holds for a single rank, too,
which owns every bucket.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from math import prod
from typing import NamedTuple

import torch

from .host_link import host_zeros
from .pieces import Pieces, whole

# elements: 256 bytes in fp32, 128 in bf16, so that every view starts on a cache line
ALIGNMENT = 64


class ShardedState(IntEnum):
    """What is sharded over data-parallel ranks; each value includes those before it."""

    NOTHING = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


Flat = torch.Tensor | Pieces


@dataclass(frozen=True)
class BufferEntry:
    """One parameter to put into a buffer.

    group:   parameters of the same group have the same learning rate and weight decay.
    counted: whether this rank counts its gradient in the global norm; False where another rank
             counts its copy.
    fp32:    whether it is used in fp32 whatever the dtype of the buffer.
    tied:    whether ranks of other stages have it as well, so that its shards must be the same in
             all their buffers.
    experts: whether it has experts that copies of a layer divide, see `ExpertShards`.
    """

    name: str
    shape: tuple[int, ...]
    group: int
    counted: bool = True
    fp32: bool = False
    tied: bool = False
    experts: bool = False


@dataclass(frozen=True)
class ExpertShards:
    """Where data-parallel ranks divide experts, so that fewer of them have the same.

    divided: number of neighbouring ranks that divide them.
    index:   of this rank among these.
    shards:  number of ranks that have the same experts.
    shard:   index of this rank among these.
    """

    divided: int
    index: int
    shards: int
    shard: int


@dataclass(frozen=True)
class Slot:
    """The position of a parameter: elements [start, stop) of the flat tensors, without padding."""

    start: int
    stop: int
    shape: tuple[int, ...]
    group: int
    counted: bool
    fp32: bool
    experts: bool


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of `main_grad`, with padding, which contain exactly the parameters
    `names`.

    sharded: whether every rank that has these parameters owns an equal shard; otherwise each one
             owns, and updates, all of it.
    experts: whether they are experts that data-parallel ranks divide.
    """

    start: int
    stop: int
    names: tuple[str, ...]
    sharded: bool = False
    experts: bool = False


class OwnedRange(NamedTuple):
    """Elements [start, stop) of the flat tensors that this rank owns; `offset` of their optimizer
    state.
    """

    start: int
    stop: int
    offset: int


class GroupRange(NamedTuple):
    """Elements [start, stop), with padding, of one group of parameters."""

    start: int
    stop: int
    group: int


class ParameterBuffer:
    """Flat storage for all parameters of one rank.

    entries:         parameters of each unit, in forward order. Inside a unit they are sorted by group.
    dtype:           of `data`; `main_grad` is always fp32.
    bucket_elements: a bucket is closed once it has this many elements; no parameter is split. None: one bucket.
    shards, shard:   number of data-parallel ranks to shard over, and the index of this one.
    sharding:        what is sharded over them.
    experts:         of entries with experts that data-parallel ranks divide; None: there are none.
    on_host:         whether what this rank owns is in memory of the host; gradients and values must be sharded then.

    data        [size] dtype     zeros until they are written through `parameter(name)`; see `filling`
    master      [owned_size]     fp32 values that the optimizer updates and rounds into `own_data`: the same memory
                                 where that is fp32, otherwise a copy, made at first access
    main_grad   [size] fp32      the sum of this step's gradients; between steps, the target of `spread`
    rounds                       whether `master` is a copy
    slots       parameter name -> Slot, in order of offset
    buckets     contiguous, disjoint and complete; buckets[0] has the last parameters
    ranges      contiguous, disjoint and complete, in order of offset; neighbours differ in `group`
    owned       what this rank updates, in order of offset; everything unless `sharded`
    own_grads   the gradient [stop - start] of each of `owned`: views of `main_grad`, unless that is `Pieces`
    own_data    the values of each of `owned`: views of `data`, unless that is `Pieces`
    home        the device of what this rank owns, of its optimizer state and of `master`
    """

    def __init__(
        self,
        entries: Sequence[Sequence[BufferEntry]],
        dtype: torch.dtype,
        device: torch.device | str,
        bucket_elements: int | None = None,
        shards: int = 1,
        shard: int = 0,
        sharding: ShardedState = ShardedState.OPTIMIZER,
        experts: ExpertShards | None = None,
        on_host: bool = False,
    ):
        assert bucket_elements is None or bucket_elements > 0, bucket_elements
        assert 0 <= shard < shards, (shard, shards)
        assert not on_host or sharding is ShardedState.PARAMETERS, sharding
        shards, shard = (shards, shard) if sharding else (1, 0)
        self.sharding = sharding if shards > 1 or on_host else ShardedState.NOTHING
        self.on_host = on_host
        self.experts = experts
        # of an unsharded bucket, index of this rank among those that have it: (others, experts)
        self.places = (shard, 0 if experts is None else experts.shard)
        if dtype == torch.float32:  # then `data` is the master copy, and all entries are in it
            entries = [[replace(entry, fp32=False) for entry in group] for group in entries]
        if self.sharded:
            by_unit = self.sharding >= ShardedState.GRADIENTS
            runs = (
                _runs_of_units(entries)
                if by_unit
                else _runs_of_size(entries, bucket_elements or math.inf)
            )
            of_experts = 1 if experts is None else experts.shards
            self.slots, self.size, self.buckets = _lay_out_shards(runs, shards, of_experts)
        else:
            self.slots, self.size = _lay_out(entries)
            self.buckets = _cut_into_buckets(
                self.slots, self.size, bucket_elements or max(self.size, 1)
            )
        self.owned = (
            _owned(self.buckets, shards, shard, experts)
            if self.sharded
            else (OwnedRange(0, self.size, 0),)
        )
        self.owned_size = sum(stop - start for start, stop, _ in self.owned)
        places = self.buckets[::-1] if self.sharded else ()
        self._piece_of = {bucket: number for number, bucket in enumerate(places)}
        self.ranges = _merge_ranges(self.slots, self.size)
        self.dtype = dtype
        self.device = torch.device(device)
        self.data, self._values, self.own_data = self._flat(
            dtype, self.sharding >= ShardedState.PARAMETERS
        )
        self.main_grad, _, self.own_grads = self._flat(
            torch.float32, self.sharding >= ShardedState.GRADIENTS
        )
        self._master = None if self.rounds else self._values
        self._own_grad_of: dict[str, list[torch.Tensor]] = {}

    def _flat(
        self, dtype: torch.dtype, in_pieces: bool
    ) -> tuple[Flat, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return a flat tensor, or its pieces; the memory of this rank's shards; and views of these
        shards.
        """
        if not in_pieces:
            flat = torch.zeros(self.size, dtype=dtype, device=self.device)
            return flat, flat, tuple(flat[start:stop] for start, stop, _ in self.owned)
        bounds = [(bucket.start, bucket.stop) for bucket in reversed(self.buckets)]
        named = {name: (slot.start, slot.stop, slot.shape) for name, slot in self.slots.items()}
        pieces = Pieces(bounds, named, dtype, self.device)
        own = (
            host_zeros(self.owned_size, dtype, self.device)
            if self.on_host
            else torch.zeros(self.owned_size, dtype=dtype, device=self.device)
        )
        return (
            pieces,
            own,
            tuple(own[offset : offset + stop - start] for start, stop, offset in self.owned),
        )

    @property
    def sharded(self) -> bool:
        """Whether ranks own shards of it, or of a single rank what it owns is on the host."""
        return self.sharding > ShardedState.NOTHING

    @property
    def home(self) -> torch.device:
        return torch.device("cpu") if self.on_host else self.device

    @property
    def rounds(self) -> bool:
        """Whether `master` is a copy, which is rounded into `data`."""
        return self.dtype != torch.float32

    def piece_of(self, bucket: Bucket) -> int:
        """Return the index of a bucket's piece, and of its entry in `owned`, where buckets are
        sharded.
        """
        return self._piece_of[bucket]

    def view(self, flat: Flat, name: str) -> torch.Tensor:
        """Return the view of parameter `name` in `flat` ([size], any dtype), in its shape."""
        if isinstance(flat, Pieces):
            return flat.named[name]
        slot = self.slots[name]
        return flat[slot.start : slot.stop].view(slot.shape)

    @property
    def master(self) -> torch.Tensor:
        if self._master is None:
            self._master = self._joined(self.own_data).to(torch.float32)
        return self._master

    def turns(self, flat: Flat) -> list[tuple[Bucket, ...]]:
        """Return groups of buckets of `flat` that have memory at the same time: all, or of `Pieces`
        single ones.
        """
        buckets = self.buckets[::-1]
        return [(bucket,) for bucket in buckets] if isinstance(flat, Pieces) else [buckets]

    def allocate(self, flat: Flat, buckets: Sequence[Bucket]) -> None:
        """If `flat` is in pieces, allocate ``buckets`` and free all others."""
        if isinstance(flat, Pieces):
            needed = {self._piece_of[bucket] for bucket in buckets}
            for number in range(len(flat)):
                if number not in needed:
                    flat.release(number)
            for number in needed:
                flat.allocate(number)

    def filling(self) -> Iterator[tuple[Bucket, ...]]:
        """Yield groups of buckets with memory, to be written into `data` and `main_grad`, which are
        zeros before.
        """
        flats = (self.data, self.main_grad)
        for buckets in self.turns(self.main_grad):
            for flat in flats:
                self.allocate(flat, buckets)
                for bucket in buckets if isinstance(flat, Pieces) else ():
                    flat[bucket.start : bucket.stop].zero_()
            yield buckets
            self.seal(buckets)
        for flat in flats:
            self.allocate(flat, ())

    def seal(self, buckets: Sequence[Bucket]) -> None:
        """Save this rank's shards of ``buckets`` after `data` was written, where parameters are
        sharded.
        """
        if isinstance(self.data, Pieces):
            for bucket in buckets:
                number = self._piece_of[bucket]
                start, stop, _ = self.owned[number]
                self.own_data[number].copy_(self.data[start:stop])

    def shard_of(self, bucket: Bucket) -> tuple[int, int]:
        """Return the elements [start, stop) of a sharded bucket that this rank owns."""
        assert bucket.sharded, bucket
        start, stop, _ = self.owned[self._piece_of[bucket]]
        return start, stop

    def own(self, flat: Flat) -> torch.Tensor:
        """Return this rank's shards of `flat` ([size]), concatenated: [owned_size]; `flat` itself
        if it owns all.
        """
        if not self.sharded:
            return whole(flat)
        return self._joined([flat[start:stop] for start, stop, _ in self.owned])

    def own_gradient(self) -> torch.Tensor:
        """Return `own_grads`, concatenated: [owned_size]."""
        return self._joined(self.own_grads)

    def _joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        empty = torch.zeros(0, dtype=self.dtype, device=self.home)
        return parts[0] if len(parts) == 1 else torch.cat([empty, *parts])

    def take(
        self, state: torch.Tensor, flat: Flat, buckets: Sequence[Bucket] | None = None
    ) -> None:
        """Copy this rank's shards of ``flat`` to ``state`` unless they are the same: the inverse of
        `spread`.
        """
        if not self.sharded and state is not flat:
            state.copy_(whole(flat))
        for bucket in (self.buckets if buckets is None else buckets) if self.sharded else ():
            start, stop, offset = self.owned[self._piece_of[bucket]]
            state[offset : offset + stop - start].copy_(flat[start:stop])

    def spread(self, state: torch.Tensor, buckets: Sequence[Bucket] | None = None) -> Flat:
        """Copy `state` ([owned_size]) to its positions in `main_grad`, and return that; `state` if
        it has all.

        buckets: copy only these, for which memory is allocated; None: all.
        """
        if not self.sharded:
            return state
        buckets = self.buckets if buckets is None else buckets
        self.allocate(self.main_grad, buckets)
        for bucket in buckets:
            start, stop, offset = self.owned[self._piece_of[bucket]]
            self.main_grad[start:stop].copy_(state[offset : offset + stop - start])
        return self.main_grad

    def parameter(self, name: str) -> torch.Tensor:
        """Return the view that the model computes with: of `data`, or of `master` for an fp32
        entry.
        """
        return self.view(self.master if self.slots[name].fp32 else self.data, name)

    def drop_master(self) -> None:
        """Free the fp32 copy of a 16-bit buffer, if it is kept elsewhere; the next access makes a
        new one.
        """
        assert self.rounds and not any(slot.fp32 for slot in self.slots.values())
        self._master = None

    def refresh_master(self) -> None:
        """Copy `data` to `master`, except fp32 entries, whose values are only in `master`."""
        for data, master in self._rounded():
            master.copy_(data)

    def follow_edits(self) -> None:
        """Update `master` after `data` was modified elsewhere: copy the values that differ from the
        rounded master.
        """
        for data, master in self._rounded():
            master.copy_(torch.where(master.to(self.dtype) == data, master, data.to(torch.float32)))

    def _rounded(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (view of `data`, view of `master` that is rounded into it) of what this rank owns
        of each parameter.
        """
        for slot in self.slots.values() if self.rounds else ():
            for (start, stop, offset), data in (
                zip(self.owned, self.own_data, strict=True) if not slot.fp32 else ()
            ):
                first = max(start, slot.start)
                last = min(stop, slot.stop)
                if first < last:
                    own = slice(offset + first - start, offset + last - start)
                    yield data[first - start : last - start], self.master[own]

    def grad(self, name: str) -> torch.Tensor:
        return self.view(self.main_grad, name)

    def own_grad(self, name: str) -> list[torch.Tensor]:
        """Return flat views of this rank's shard of a parameter's gradient; none where other ranks
        own all of it.
        """
        if name in self._own_grad_of:
            return self._own_grad_of[name]
        slot = self.slots[name]
        views = []
        for (start, stop, _), grad in zip(self.owned, self.own_grads, strict=True):
            first = max(start, slot.start)
            last = min(stop, slot.stop)
            if first < last:
                views.append(grad[first - start : last - start])
        self._own_grad_of[name] = views
        return views


def align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _lay_out(
    groups: Sequence[Sequence[BufferEntry]], offset: int = 0
) -> tuple[dict[str, Slot], int]:
    slots: dict[str, Slot] = {}
    for group in groups:
        for entry in sorted(group, key=lambda entry: (entry.experts, entry.group)):
            assert entry.name not in slots, f"parameter {entry.name} is listed twice"
            elements = prod(entry.shape)
            slots[entry.name] = Slot(
                offset,
                offset + elements,
                tuple(entry.shape),
                entry.group,
                counted=entry.counted,
                fp32=entry.fp32,
                experts=entry.experts,
            )
            offset = align(offset + elements)
    return slots, offset


def _runs_of_size(
    groups: Sequence[Sequence[BufferEntry]], bucket_elements: float
) -> list[list[BufferEntry]]:
    """Return the entries of each bucket, in forward order; a bucket has at least
    ``bucket_elements``.

    The model reads fp32 entries from the master copy, so every rank needs all of them: they come
    first, in a bucket that is not sharded. A tied entry has a bucket of its own, so that all ranks
    that have it shard it in the same way. Experts that these ranks divide have buckets of their own.
    """
    order = [
        entry
        for group in groups
        for entry in sorted(group, key=lambda entry: (entry.experts, entry.group))
        if not entry.fp32
    ]
    runs: list[list[BufferEntry]] = [[]]  # entries of each bucket, from the end
    elements = 0
    for entry in reversed(order):
        last = runs[-1][-1] if runs[-1] else entry
        alone = entry.tied or last.tied or entry.experts != last.experts
        if runs[-1] and (elements >= bucket_elements or alone):
            runs.append([])
            elements = 0
        runs[-1].append(entry)
        elements += align(prod(entry.shape))
    return [run for run in (*_fp32_runs(groups), *(run[::-1] for run in reversed(runs))) if run]


def _fp32_runs(groups: Sequence[Sequence[BufferEntry]]) -> list[list[BufferEntry]]:
    """Return the fp32 entries: those that all data-parallel ranks have, and experts."""
    fp32 = [entry for group in groups for entry in group if entry.fp32]
    shared = [entry for entry in fp32 if not entry.experts]
    experts = [entry for entry in fp32 if entry.experts]
    return [shared, experts]


def _runs_of_units(groups: Sequence[Sequence[BufferEntry]]) -> list[list[BufferEntry]]:
    """As `_runs_of_size`, with one bucket per unit."""
    plain = [[entry for entry in group if not entry.fp32] for group in groups]
    of_units = [run for group in plain for run in _runs_of_size([group], math.inf)]
    return [run for run in (*_fp32_runs(groups), *of_units) if run]


def _lay_out_shards(
    runs: Sequence[Sequence[BufferEntry]], shards: int, expert_shards: int
) -> tuple[dict[str, Slot], int, tuple[Bucket, ...]]:
    """As `_lay_out` and `_cut_into_buckets`, for given buckets, of which each can be divided into
    aligned shards.
    """
    slots: dict[str, Slot] = {}
    buckets: list[Bucket] = []
    offset = 0
    for run in runs:
        placed, size = _lay_out([run], offset)
        experts = run[0].experts
        ranks = expert_shards if experts else shards
        alignment = ranks * ALIGNMENT
        stop = offset + -(-(size - offset) // alignment) * alignment
        buckets.append(
            Bucket(
                offset,
                stop,
                tuple(reversed(placed)),
                sharded=ranks > 1 and not run[0].fp32,
                experts=experts,
            )
        )
        slots |= placed
        offset = stop
    return slots, offset, tuple(reversed(buckets))


def _owned(
    buckets: Sequence[Bucket], shards: int, shard: int, experts: ExpertShards | None
) -> tuple[OwnedRange, ...]:
    owned = []
    offset = 0
    for bucket in reversed(buckets):
        ranks = shards
        place = shard
        if bucket.experts:
            assert experts is not None, "a bucket of experts that nobody divides"
            ranks = experts.shards
            place = experts.shard
        length = (bucket.stop - bucket.start) // (ranks if bucket.sharded else 1)
        start = bucket.start + (place * length if bucket.sharded else 0)
        owned.append(OwnedRange(start, start + length, offset))
        offset += length
    return tuple(owned)


def _cut_into_buckets(
    slots: dict[str, Slot], size: int, bucket_elements: int
) -> tuple[Bucket, ...]:
    buckets: list[Bucket] = []
    stop = size
    names = []
    order = [*reversed(slots.items())]
    for number, (name, slot) in enumerate(order):
        names.append(name)
        is_last = number + 1 == len(order) or order[number + 1][1].experts != slot.experts
        if stop - slot.start >= bucket_elements or is_last:
            buckets.append(Bucket(slot.start, stop, tuple(names), experts=slot.experts))
            stop = slot.start
            names = []
    return tuple(buckets)


def _merge_ranges(slots: dict[str, Slot], size: int) -> tuple[GroupRange, ...]:
    ranges: list[GroupRange] = []
    for slot in slots.values():
        if ranges and ranges[-1].group != slot.group:
            ranges[-1] = ranges[-1]._replace(stop=slot.start)
        if not ranges or ranges[-1].group != slot.group:
            ranges.append(GroupRange(slot.start, size, slot.group))
    return tuple(ranges)
