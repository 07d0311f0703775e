"""The parameters of one rank as two flat tensors: values in the model's dtype, gradients in fp32, at the same offsets.

Layout of three groups (one per unit, in forward order), `d` decayed and `n` not decayed, `.` padding:

    | d d . d . n . n n . | d . d d . n . | d d . n n . |
      group 0               group 1         group 2
                          <- bucket 1    <- bucket 0       (filled from the end: backward finishes the last unit first)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

ALIGNMENT = 64  # elements: 256 bytes in fp32, 128 in bf16, so that every view starts on a cache line


@dataclass(frozen=True)
class BufferEntry:
    """One parameter that a buffer shall hold.

    decay: weight decay applies to it.
    counted: this rank counts its gradient in the global norm; False where another rank holds the same parameter.
    fp32: it is used in fp32, whatever the dtype of the buffer.
    """

    name: str
    shape: tuple[int, ...]
    decay: bool
    counted: bool = True
    fp32: bool = False


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies: elements [start, stop) of the flat tensors, padding excluded."""

    start: int
    stop: int
    shape: tuple[int, ...]
    decay: bool
    counted: bool
    fp32: bool


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of `main_grad`, padding included, which hold exactly the parameters `names`."""

    start: int
    stop: int
    names: tuple[str, ...]


class DecayRange(NamedTuple):
    """Elements [start, stop), padding included, that all take weight decay or all do not."""

    start: int
    stop: int
    decay: bool


class ParameterBuffer:
    """Flat storage for all parameters of one rank.

    entries: groups in forward order, for example one per unit. Inside a group the decayed entries come first.
    dtype: of `data`; `main_grad` is always fp32.
    bucket_elements: a bucket closes once it holds this many elements; no parameter is split. None: one bucket.

    data       [size] dtype   zeros until they are filled through `parameter(name)`
    master     [size] fp32    what the optimizer updates and rounds into `data`: `data` itself where that is fp32, else
                              a copy, taken when it is first asked for
    main_grad  [size] fp32    the sum of this step's gradients
    slots      parameter name -> Slot, in order of offset
    buckets    contiguous, disjoint, they cover everything; buckets[0] holds the last parameters
    ranges     contiguous, disjoint, they cover everything, in order of offset; neighbours differ in `decay`
    """

    def __init__(
        self,
        entries: Sequence[Sequence[BufferEntry]],
        dtype: torch.dtype,
        device: torch.device | str,
        bucket_elements: int | None = None,
    ):
        assert bucket_elements is None or bucket_elements > 0, bucket_elements
        self.slots, self.size = _lay_out(entries)
        self.buckets = _cut_into_buckets(self.slots, self.size, bucket_elements or max(self.size, 1))
        self.ranges = _merge_ranges(self.slots, self.size)
        self.dtype = dtype
        self.device = torch.device(device)
        self.data = torch.zeros(self.size, dtype=dtype, device=device)
        self._master: torch.Tensor | None = None
        self.main_grad = torch.zeros(self.size, dtype=torch.float32, device=device)

    def view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """The part of `flat` ([size], any dtype) that belongs to parameter `name`, in its shape."""
        slot = self.slots[name]
        return flat[slot.start : slot.stop].view(slot.shape)

    @property
    def master(self) -> torch.Tensor:
        if self._master is None:
            self._master = self.data if self.dtype == torch.float32 else self.data.to(torch.float32)
        return self._master

    def parameter(self, name: str) -> torch.Tensor:
        """What the model computes with: of `data`, or of `master` for an entry that is used in fp32."""
        return self.view(self.master if self.slots[name].fp32 else self.data, name)

    def refresh_master(self) -> None:
        """Take the values of `data`, but for entries used in fp32, whose values are in `master` alone."""
        if self.master is not self.data:
            apart = {slot: self.master[slot.start : slot.stop].clone() for slot in self.slots.values() if slot.fp32}
            self.master.copy_(self.data)
            for slot, values in apart.items():
                self.master[slot.start : slot.stop] = values

    def follow_edits(self) -> None:
        """After values were written from outside: `master` takes those of `data` that it would not round to."""
        if self.master is not self.data:
            for slot in self.slots.values():
                span = slice(slot.start, slot.stop)
                if not slot.fp32:
                    data, master = self.data[span], self.master[span]
                    master.copy_(torch.where(master.to(self.dtype) == data, master, data.to(torch.float32)))

    def grad(self, name: str) -> torch.Tensor:
        return self.view(self.main_grad, name)


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _lay_out(groups: Sequence[Sequence[BufferEntry]]) -> tuple[dict[str, Slot], int]:
    slots: dict[str, Slot] = {}
    offset = 0
    for group in groups:
        for entry in sorted(group, key=lambda entry: not entry.decay):
            assert entry.name not in slots, f"parameter {entry.name} is listed twice"
            elements = prod(entry.shape)
            slots[entry.name] = Slot(
                offset, offset + elements, tuple(entry.shape), entry.decay, entry.counted, entry.fp32
            )
            offset = _align(offset + elements)
    return slots, offset


def _cut_into_buckets(slots: dict[str, Slot], size: int, bucket_elements: int) -> tuple[Bucket, ...]:
    buckets: list[Bucket] = []
    stop, names = size, []
    for name, slot in reversed(slots.items()):
        names.append(name)
        if stop - slot.start >= bucket_elements or slot.start == 0:
            buckets.append(Bucket(slot.start, stop, tuple(names)))
            stop, names = slot.start, []
    return tuple(buckets)


def _merge_ranges(slots: dict[str, Slot], size: int) -> tuple[DecayRange, ...]:
    ranges: list[DecayRange] = []
    for slot in slots.values():
        if ranges and ranges[-1].decay != slot.decay:
            ranges[-1] = ranges[-1]._replace(stop=slot.start)
        if not ranges or ranges[-1].decay != slot.decay:
            ranges.append(DecayRange(slot.start, size, slot.decay))
    return tuple(ranges)
