"""Gradients, and parameters, of which data-parallel ranks keep shards: reduced and gathered unit by unit.

A pass visits units in an order that the plan gives, so that all ranks of a data-parallel group launch the same
collectives in the same order, whatever graphs their micro-batches run. At a visit the parameters of the unit are there,
and those of the next visit are under way; what neither needs is released. After the backward of a unit its gradient is
reduce-scattered while the next unit computes, and added to this rank's shard. Where others own the same shard, it is
summed over them once per step, while the units in front of it finish the last backward.

As in ZeRO (https://arxiv.org/abs/1910.02054), stages 2 and 3.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.buffers import Bucket, ParameterBuffer, Sharding
from ..pipeline_parallel.ops import Kind
from ..tensor_parallel.sequence import gather_single
from .collectives import Work
from .weights import Gradient
from .wire import Wire


class Visit(NamedTuple):
    """A pass works on a unit. computes: with its parameters. reduces: its weight gradients are complete afterwards."""

    unit: int
    computes: bool
    reduces: bool


def visits_of(kind: Kind, units: Sequence[int], again: Collection[Sequence[int]], hold: bool = False) -> list[Visit]:
    """What a pass visits, in order.

    kind: F; R, a recomputation that comes before its backward; B; W. units: of the stage, in forward order. again: runs
    of units that the pass recomputes. hold: a backward leaves weight gradients to W.
    """
    run_of = {unit: tuple(run) for run in again for unit in run}
    blocks = [*dict.fromkeys(run_of.get(unit, (unit,)) for unit in units)]
    found: list[Visit | None] = []
    if kind is Kind.F:
        return [Visit(unit, True, False) for unit in units]
    for block in reversed(blocks):
        if block[0] in run_of:
            found += [Visit(unit, True, False) for unit in block]
        if kind is not Kind.R:
            found += [Visit(unit, kind is Kind.B, not hold) for unit in reversed(block)]
    return [each for each, after in pairwise([*found, None]) if after is None or each.unit != after.unit]


class UnitShards:
    """Of one rank, all its stages together.

    buffer: whose gradients, or gradients and parameters, are sharded over ``group``. grads: of each parameter.
    reads: unit -> the trainable parameters that it reads. overlap: collectives run behind the computation. across:
    ranks that own the same shards; None: there are no others. everyone: all that hold the same parameters; None: those
    of ``group``. in_bf16: of gradients, see `Wire`.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        group: dist.ProcessGroup,
        grads: Mapping[str, Gradient],
        reads: Mapping[int, Collection[str]],
        overlap: bool = True,
        across: dist.ProcessGroup | None = None,
        everyone: dist.ProcessGroup | None = None,
        in_bf16: bool = False,
    ):
        self.buffer, self.group, self.grads, self.overlap = buffer, group, grads, overlap
        self.across, self._all = across, Wire(everyone or group, in_bf16)
        self._inside, self._across = Wire(group, in_bf16), Wire(across, in_bf16)
        # Buckets go by their number from here on, which is that of their piece and of what this rank owns of them.
        self._buckets = buffer.buckets[::-1]
        self._sharded = [bucket.sharded for bucket in self._buckets]
        self._padding = [[*_padding(buffer, bucket)] for bucket in self._buckets]
        number_of = {name: number for number, bucket in enumerate(self._buckets) for name in bucket.names}
        self._read = {unit: sorted({number_of[name] for name in names}, reverse=True) for unit, names in reads.items()}
        self._gathers: dict[int, dist.Work] = {}
        self._reduces: dict[int, tuple[Work, Tensor]] = {}
        self._begun: set[int] = set()  # ``own_grads`` has something of this step
        self._readers = {n: {unit for unit, read in self._read.items() if n in read} for n in number_of.values()}
        self._unfinished: dict[int, set[int]] = {}  # readers that will add to the gradient of a bucket in this step
        self._sums: dict[int, Work] = {}  # over ``across``

    def serves(self, unit: int, name: str) -> bool:
        """Whether a parameter is there when a unit is visited."""
        return any(name in self._buckets[number].names for number in self._read.get(unit, ()))

    def start(self) -> None:
        """Begin a step: no gradient is there."""
        self.buffer.main_grad.release_all()
        self._reduces.clear()
        for wire in (self._all, self._inside, self._across):
            wire.start()
        self._begun.clear()
        self._sums.clear()
        self._unfinished = {number: set(units) for number, units in self._readers.items()}

    def need(self, *units: int) -> None:
        """Return when the parameters of the first unit are there; start to gather those of the others, and release all
        that is not mentioned."""
        if self.buffer.sharding < Sharding.PARAMETERS or not units:
            return
        data = self.buffer.data
        wanted = dict.fromkeys(n for unit in units for n in self._read.get(unit, ()) if self._sharded[n])
        for number in range(len(data)):
            if data.allocated(number) and number not in wanted:
                self._arrive(number)
                data.release(number)
        for number in wanted:
            self._gather(number)
        for number in self._read.get(units[0], ()):
            self._arrive(number)

    def _gather(self, number: int) -> None:
        data = self.buffer.data
        if data.allocated(number):
            return
        data.allocate(number)
        whole, own = data.piece(number).data, self.buffer.own_data[number]
        self._gathers[number] = gather_single(whole, own, group=self.group, async_op=True)
        if not self.overlap:
            self._arrive(number)

    def _arrive(self, number: int) -> None:
        if number in self._gathers:
            self._gathers.pop(number).wait()

    def open(self, unit: int) -> None:
        """Before weight gradients of a unit: they have memory."""
        grad = self.buffer.main_grad
        for number in self._read.get(unit, ()):
            self._settle(number)
            if not grad.allocated(number):
                grad.allocate(number)
                for span in self._padding[number]:
                    grad[span].zero_()
                for name in self._buckets[number].names:
                    self.grads[name].start()

    @torch.no_grad()
    def reduce(self, unit: int, last: bool = False) -> None:
        """What a pass added to the gradients of a unit is complete. last: no pass of this step adds more."""
        for number in [*self._reduces]:  # gradients of two units have memory: one under way, one that is being filled
            self._settle(number)
        for number in self._read.get(unit, ()):
            if last:
                self._unfinished[number].discard(unit)
            for name in self._buckets[number].names:
                self.grads[name].settle()
            whole, own = self.buffer.main_grad.piece(number), self.buffer.own_grads[number]
            if self._sharded[number]:
                into = torch.empty_like(own) if number in self._begun else own
                work = self._inside.reduce_scatter(into, whole)
            else:
                into, work = whole, self._all.all_reduce(whole)
            self._reduces[number] = (work, into)
            if not self.overlap:
                self._settle(number)

    @torch.no_grad()
    def _settle(self, number: int) -> None:
        """Wait until a bucket that is under way is in this rank's shard."""
        if number not in self._reduces:
            return
        work, came = self._reduces.pop(number)
        work.wait()
        own = self.buffer.own_grads[number]
        if number in self._begun:
            own.add_(came)
        elif came is not own:
            own.copy_(came)
        self._begun.add(number)
        self.buffer.main_grad.release(number)
        if not self._unfinished[number]:
            self._add_up(number)

    def _add_up(self, number: int) -> None:
        """Start to sum a shard that is complete over those that own it, once a step."""
        if self.across is not None and self._sharded[number] and number not in self._sums:
            self._sums[number] = self._across.all_reduce(self.buffer.own_grads[number])
            if not self.overlap:
                self._sums[number].wait()

    def finish(self) -> None:
        """End a step: ``own_grads`` are the sums over all micro-batches and replicas."""
        for number in [*self._reduces]:
            self._settle(number)
        for number in sorted(self._begun):
            self._add_up(number)
        for work in self._sums.values():
            work.wait()
        for number, own in enumerate(self.buffer.own_grads):
            if number not in self._begun:
                own.zero_()


def _padding(buffer: ParameterBuffer, bucket: Bucket) -> Iterator[slice]:
    """What of a bucket is in no parameter."""
    slots = [buffer.slots[name] for name in reversed(bucket.names)]
    bounds = [bucket.start, *(bound for slot in slots for bound in (slot.start, slot.stop)), bucket.stop]
    for start, stop in zip(bounds[::2], bounds[1::2], strict=True):
        if start < stop:
            yield slice(start, stop)


class Tour:
    """One pass over the units of a stage. `reach(unit)` before each of its steps, `end()` after the last.

    then: the unit at which the rank's next pass will need parameters first. last: it is the stage's last in a step that
    adds to gradients.
    """

    def __init__(self, shards: UnitShards, visits: Sequence[Visit], then: int | None = None, last: bool = False):
        self._shards, self._visits, self._at, self._last = shards, visits, -1, last
        needed = [visit.unit if visit.computes else None for visit in visits]
        self._needed = [*needed, then if visits and visits[-1].computes else None]

    def reach(self, unit: int) -> None:
        if self._at >= 0 and self._visits[self._at].unit == unit:
            return
        self._advance(next(k for k in range(self._at + 1, len(self._visits)) if self._visits[k].unit == unit))

    def end(self) -> None:
        self._advance(len(self._visits) - 1)
        self._leave()

    def _advance(self, place: int) -> None:
        """Units without a step in this micro-batch's graph are visited as well: those of other ranks may have one."""
        while self._at < place:
            self._leave()
            self._at += 1
            visit = self._visits[self._at]
            self._shards.need(*(unit for unit in self._needed[self._at : self._at + 2] if unit is not None))
            if visit.reduces:
                self._shards.open(visit.unit)

    def _leave(self) -> None:
        if self._at >= 0 and self._visits[self._at].reduces:
            self._shards.reduce(self._visits[self._at].unit, self._last)
