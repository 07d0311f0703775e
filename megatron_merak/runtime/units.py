"""Gradients and parameters sharded over data-parallel ranks: reduced and gathered unit by unit.

A pass visits units in an order fixed by the plan, so that all ranks of a data-parallel group launch
the same collectives in the same order, even if the graphs of their micro-batches differ. At a visit
the unit's parameters are gathered and those of the next visit are being gathered; all others are
freed. After the backward of a unit its gradient is reduce-scattered while the next unit computes,
and added to this rank's shard. Where other ranks own the same shard, it is all-reduced over them
once per step, overlapped with the last backward of the preceding units.

As in ZeRO (https://arxiv.org/abs/1910.02054), stages 2 and 3.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.buffers import Bucket, ParameterBuffer, ShardedState
from ..parallel.in_flight import Work
from ..parallel.pieces import in_pieces
from ..parallel.pulse import Pulse
from ..pipeline_parallel.ops import Kind
from ..tensor_parallel.sequence import gather_single
from .collectives import Done
from .weights import Gradient
from .wire import Wire


class Visit(NamedTuple):
    """One unit in a pass.

    computes: whether the pass needs the unit's parameters.
    reduces:  whether the unit's weight gradients are complete, for this micro-batch, after the
              visit.
    """

    unit: int
    computes: bool
    reduces: bool


def visits_of(
    kind: Kind, units: Sequence[int], recompute: Collection[Sequence[int]], defer: bool = False
) -> list[Visit]:
    """Return the visits of a pass, in order.

    kind:      F, R (a recomputation before its backward), B or W.
    units:     of the stage, in forward order.
    recompute: groups of consecutive units that the pass recomputes.
    defer:     whether a backward leaves its weight gradients to a W.
    """
    run_of = {unit: tuple(run) for run in recompute for unit in run}
    blocks = [*dict.fromkeys(run_of.get(unit, (unit,)) for unit in units)]
    visits: list[Visit] = []
    if kind is Kind.F:
        return [Visit(unit, True, False) for unit in units]
    for block in reversed(blocks):
        if block[0] in run_of:
            visits += [Visit(unit, True, False) for unit in block]
        if kind is not Kind.R:
            visits += [Visit(unit, kind is Kind.B, not defer) for unit in reversed(block)]
    return [
        each
        for at, each in enumerate(visits)
        if at + 1 == len(visits) or each.unit != visits[at + 1].unit
    ]


class UnitShards:
    """Sharded gradients, or gradients and parameters, of all stages of one rank.

    buffer:          has the shards of this rank.
    shard_group:     the ranks that ``buffer`` is sharded over, in the order of their shards.
    grads:           the gradient of each parameter.
    reads:           unit -> the trainable parameters that it reads.
    overlap:         whether collectives overlap with computation.
    replicate_group: the ranks that own the same shards; None: only this one.
    group:           all data-parallel ranks; None: those of ``shard_group``.
    in_bf16:         whether gradients are exchanged in bf16, see `Wire`.
    pulse:           where waits are noted; None: nowhere.
    experts:         the ranks with the same experts, where those of ``group`` divide them.

    Attribute ``before_reduction``: called with each gradient of this rank before its reduction;
    None: nobody looks.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        shard_group: dist.ProcessGroup | None,
        grads: Mapping[str, Gradient],
        reads: Mapping[int, Collection[str]],
        *,
        overlap: bool = True,
        replicate_group: dist.ProcessGroup | None = None,
        group: dist.ProcessGroup | None = None,
        in_bf16: bool = False,
        pulse: Pulse | None = None,
        experts: dist.ProcessGroup | None = None,
    ):
        self.buffer = buffer
        self._pulse = Pulse() if pulse is None else pulse
        self.shard_group = shard_group
        self.experts = experts
        self.grads = grads
        self.overlap = overlap
        self.before_reduction: Callable[[Tensor], None] | None = None
        self.replicate_group = replicate_group
        self._all = Wire(group or shard_group, in_bf16)
        self._over_shards = Wire(shard_group, in_bf16)
        self._over_replicas = Wire(replicate_group, in_bf16)
        self._of_experts = Wire(experts, in_bf16)
        # Below, a bucket is identified by its number, which is also the index of its piece and of
        # this rank's shard.
        self._buckets = buffer.buckets[::-1]
        self._sharded = [bucket.sharded for bucket in self._buckets]
        # what segments read is in `data`, unless it is in the master copy
        self._in_data = [not buffer.slots[bucket.names[0]].fp32 for bucket in self._buckets]
        self._padding = [[*_padding(buffer, bucket)] for bucket in self._buckets]
        number_of = {
            name: number for number, bucket in enumerate(self._buckets) for name in bucket.names
        }
        self._read = {
            unit: sorted({number_of[name] for name in names}, reverse=True)
            for unit, names in reads.items()
        }
        self._gathers: dict[int, Work] = {}
        self._reduces: dict[int, tuple[Work, Tensor]] = {}
        # buckets whose ``own_grads`` already have gradients of this step
        self._begun: set[int] = set()
        self._readers = {
            n: {unit for unit, read in self._read.items() if n in read} for n in number_of.values()
        }
        # readers that still add to a bucket's gradient in this step
        self._unfinished: dict[int, set[int]] = {}
        self._sums: dict[int, Work] = {}  # all-reduces over ``replicate_group``

    def gathers(self, unit: int, name: str) -> bool:
        """Whether a parameter is gathered when a unit is visited."""
        return any(name in self._buckets[number].names for number in self._read.get(unit, ()))

    def start(self) -> None:
        """Begin a step without gradients."""
        in_pieces(self.buffer.main_grad).release_all()
        self._reduces.clear()
        for wire in (self._all, self._over_shards, self._over_replicas, self._of_experts):
            wire.start()
        self._begun.clear()
        self._sums.clear()
        self._unfinished = {number: set(units) for number, units in self._readers.items()}

    def need(self, *units: int) -> None:
        """Block until the parameters of the first unit are gathered.

        Start to gather those of the other ``units``, and free the parameters of all units not
        mentioned.
        """
        if self.buffer.sharding < ShardedState.PARAMETERS or not units:
            return
        data = in_pieces(self.buffer.data)
        needed = dict.fromkeys(
            n for unit in units for n in self._read.get(unit, ()) if self._in_data[n]
        )
        for number in range(len(data)):
            if data.allocated(number) and number not in needed:
                self._wait_gather(number)
                data.release(number)
        for number in needed:
            self._gather(number)
        for number in self._read.get(units[0], ()):
            self._wait_gather(number)

    def _gather(self, number: int) -> None:
        data = in_pieces(self.buffer.data)
        if data.allocated(number):
            return
        data.allocate(number)
        full = data.piece(number).data
        own = self.buffer.own_data[number]
        if not self._sharded[number]:
            full.copy_(own)
            return
        group = self.experts if self._buckets[number].experts else self.shard_group
        work = gather_single(full, own, group=group, async_op=True)
        self._gathers[number] = self._pulse.timed(work)
        if not self.overlap:
            self._wait_gather(number)

    def _wait_gather(self, number: int) -> None:
        if number in self._gathers:
            self._gathers.pop(number).wait()

    def allocate_gradients(self, unit: int) -> None:
        """Allocate memory for the weight gradients of a unit, before they are computed."""
        grad = in_pieces(self.buffer.main_grad)
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
        """Reduce what a pass added to the gradients of a unit. last: whether no later pass of this
        step adds more.
        """
        # at most two units have gradients allocated: one in flight, one being filled
        for number in [*self._reduces]:
            self._settle(number)
        for number in self._read.get(unit, ()):
            if last:
                self._unfinished[number].discard(unit)
            for name in self._buckets[number].names:
                self.grads[name].settle()
            full = in_pieces(self.buffer.main_grad).piece(number)
            own = self.buffer.own_grads[number]
            if self.before_reduction is not None:
                self.before_reduction(full)
            experts = self._buckets[number].experts
            if self._sharded[number]:
                into = torch.empty_like(own) if number in self._begun else own
                wire = self._of_experts if experts else self._over_shards
                work = wire.reduce_scatter(into, full)
            elif experts and self.experts is None:
                into = full
                work = Done()
            else:
                into = full
                work = (self._of_experts if experts else self._all).all_reduce(full)
            self._reduces[number] = (self._pulse.timed(work), into)
            if not self.overlap:
                self._settle(number)

    @torch.no_grad()
    def _settle(self, number: int) -> None:
        """Wait for a bucket's reduction, if one is in flight, and add the result to this rank's
        shard.
        """
        if number not in self._reduces:
            return
        work, reduced = self._reduces.pop(number)
        work.wait()
        own = self.buffer.own_grads[number]
        if number in self._begun:
            own.add_(reduced)
        elif reduced is not own:
            own.copy_(reduced)
        self._begun.add(number)
        in_pieces(self.buffer.main_grad).release(number)
        if not self._unfinished[number]:
            self._sum_over_replicas(number)

    def _sum_over_replicas(self, number: int) -> None:
        """Start to all-reduce a complete shard over the ranks that own the same one, once
        per step.
        """
        if self.replicate_group is not None and self._sharded[number] and number not in self._sums:
            self._sums[number] = self._over_replicas.all_reduce(self.buffer.own_grads[number])
            if not self.overlap:
                self._sums[number].wait()

    def finish(self) -> None:
        """End a step: afterwards ``own_grads`` are the sums over all micro-batches and replicas."""
        for number in [*self._reduces]:
            self._settle(number)
        for number in sorted(self._begun):
            self._sum_over_replicas(number)
        for work in self._sums.values():
            work.wait()
        for number, own in enumerate(self.buffer.own_grads):
            if number not in self._begun:
                own.zero_()


def _padding(buffer: ParameterBuffer, bucket: Bucket) -> Iterator[slice]:
    """Yield the slices of a bucket that belong to no parameter."""
    slots = [buffer.slots[name] for name in reversed(bucket.names)]
    bounds = [
        bucket.start,
        *(bound for slot in slots for bound in (slot.start, slot.stop)),
        bucket.stop,
    ]
    for start, stop in zip(bounds[::2], bounds[1::2], strict=True):
        if start < stop:
            yield slice(start, stop)


class ShardedPass:
    """Gathers parameters and reduces gradients during a pass. Call `reach(unit)` before each step,
    `end()` at the end.

    next_unit: the first unit whose parameters the rank's next pass needs.
    last:      whether no later pass of this step adds to the stage's gradients.
    """

    def __init__(
        self,
        shards: UnitShards,
        visits: Sequence[Visit],
        next_unit: int | None = None,
        last: bool = False,
    ):
        self._shards = shards
        self._visits = visits
        self._index = -1
        self._last = last
        needed = [visit.unit if visit.computes else None for visit in visits]
        self._needed = [*needed, next_unit if visits and visits[-1].computes else None]

    def reach(self, unit: int) -> None:
        if self._index >= 0 and self._visits[self._index].unit == unit:
            return
        self._advance(
            next(
                k for k in range(self._index + 1, len(self._visits)) if self._visits[k].unit == unit
            )
        )

    def end(self) -> None:
        self._advance(len(self._visits) - 1)
        self._leave()

    def _advance(self, index: int) -> None:
        """Visit units up to ``index``, also those that this micro-batch's graph skips: other ranks
        may run them.
        """
        while self._index < index:
            self._leave()
            self._index += 1
            visit = self._visits[self._index]
            self._shards.need(
                *(unit for unit in self._needed[self._index : self._index + 2] if unit is not None)
            )
            if visit.reduces:
                self._shards.allocate_gradients(visit.unit)

    def _leave(self) -> None:
        if self._index >= 0 and self._visits[self._index].reduces:
            self._shards.reduce(self._visits[self._index].unit, self._last)
