"""Gradients sharded over data-parallel ranks, reduced unit by unit.

After the backward of a unit its gradient is reduce-scattered while the next unit computes, and added
to this rank's shard. Where other ranks own the same shard, it is all-reduced over them once per step,
overlapped with the last backward of the preceding units.

As in ZeRO (https://arxiv.org/abs/1910.02054), stage 2.

A shard in memory of the host is copied there when it is reduced. What later passes add is added on the
device: of a rank without replicas, the sum so far comes back before the backward of its unit and the
products of that add to it, as they would to a gradient that had stayed.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.buffers import Bucket, ParameterBuffer
from ..parallel.host_link import HostLink
from ..parallel.in_flight import Done, Work
from ..parallel.pieces import in_pieces
from ..parallel.pulse import Pulse
from .unit_buckets import UnitBuckets
from .weights import Gradient
from .wire import Wire


class GradientWires:
    """What exchanges gradients, by who has the same parameters.

    group:      all data-parallel ranks; None: there is only one.
    shards:     the ranks that a buffer is sharded over, in the order of their shards.
    replicas:   the ranks that own the same shards; None: only this one.
    experts:    the ranks with the same experts; None: this one, or no ranks divide experts.
    in_bf16:    whether gradients are exchanged in bf16, see `Wire`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        shards: dist.ProcessGroup | None,
        replicas: dist.ProcessGroup | None,
        experts: dist.ProcessGroup | None,
        in_bf16: bool,
    ):
        self.group = None if group is None else Wire(group, in_bf16)
        self.shards = None if shards is None else Wire(shards, in_bf16)
        self.replicas = None if replicas is None else Wire(replicas, in_bf16)
        self.experts = None if experts is None else Wire(experts, in_bf16)

    def start(self) -> None:
        """Begin a step."""
        for wire in (self.group, self.shards, self.replicas, self.experts):
            if wire is not None:
                wire.start()


class UnitGradients:
    """Sharded gradients of all stages of one rank.

    buffer:  has the shards of this rank.
    buckets: of it, by unit.
    grads:   the gradient of each parameter.
    wires:   what exchanges them.
    overlap: whether a reduction goes on while the next unit computes.
    pulse:   where waits are noted.
    link:    to the host, where the shards are there.

    Attribute ``before_reduction``: called with each gradient of this rank before its reduction;
    None: nobody looks.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        buckets: UnitBuckets,
        grads: Mapping[str, Gradient],
        wires: GradientWires,
        *,
        overlap: bool,
        pulse: Pulse,
        link: HostLink | None = None,
    ):
        self.buffer = buffer
        self.buckets = buckets
        self.grads = grads
        self.wires = wires
        self.overlap = overlap
        self.before_reduction: Callable[[Tensor], None] | None = None
        self._pulse = pulse
        self._link = link
        self._stores: dict[int, Work] = {}  # shards that several ranks reduced, on their way there
        self._returning: dict[int, Work] = {}  # sums so far, on their way back
        self._padding = [[*_padding(buffer, bucket)] for bucket in buckets.numbered]
        self._reduces: dict[int, tuple[Work, Tensor]] = {}
        # buckets whose ``own_grads`` already have gradients of this step
        self._begun: set[int] = set()
        # readers that still add to a bucket's gradient in this step
        self._unfinished: dict[int, set[int]] = {}
        self._sums: dict[int, Work] = {}  # all-reduces over replicas

    def start(self) -> None:
        """Begin a step without gradients."""
        in_pieces(self.buffer.main_grad).release_all()
        self._reduces.clear()
        self._stores.clear()
        self._returning.clear()
        self.wires.start()
        self._begun.clear()
        self._sums.clear()
        self._unfinished = {n: set(units) for n, units in self.buckets.readers.items()}

    def allocate(self, unit: int, *following: int) -> None:
        """Allocate memory for the weight gradients of a unit, before they are computed.

        following: the units after it, of which sums on the host begin to come back.
        """
        grad = in_pieces(self.buffer.main_grad)
        for number in self.buckets.of_unit(unit):
            self._settle(number)
            if not grad.allocated(number):
                self._begin(number)
            if number in self._returning:
                self._returning.pop(number).wait()
        for each in following if self._link is not None else ():
            for number in self.buckets.of_unit(each):
                on_host = number in self._begun and number not in self._reduces
                if on_host and self._adds_to_sum(number) and not grad.allocated(number):
                    self._begin(number)

    def _adds_to_sum(self, number: int) -> bool:
        """Whether backwards add to the sum of those before, which is on the host."""
        return self._link is not None and self._wire(self.buckets.numbered[number]) is None

    def _begin(self, number: int) -> None:
        """Allocate memory for a bucket's gradient; its sum so far, if backwards add to that, begins
        to come back.
        """
        grad = in_pieces(self.buffer.main_grad)
        grad.allocate(number)
        names = self.buckets.numbered[number].names
        if self._link is not None and self._adds_to_sum(number) and number in self._begun:
            work = self._link.load(grad.piece(number), self.buffer.own_grads[number])
            self._returning[number] = self._pulse.timed(work)
            for name in names:
                self.grads[name].resume()
            return
        for span in self._padding[number]:
            grad[span].zero_()
        for name in names:
            self.grads[name].start()

    @torch.no_grad()
    def reduce(self, unit: int, last: bool = False) -> None:
        """Reduce what a pass added to the gradients of a unit. last: whether no later pass of this
        step adds more.
        """
        # at most two units have gradients allocated: one in flight, one being filled
        for number in [*self._reduces]:
            self._settle(number)
        for number in self.buckets.of_unit(unit):
            if last:
                self._unfinished[number].discard(unit)
            bucket = self.buckets.numbered[number]
            for name in bucket.names:
                self.grads[name].settle()
            full = in_pieces(self.buffer.main_grad).piece(number)
            if self.before_reduction is not None:
                self.before_reduction(full)
            work, into = self._launch(number, bucket, full)
            self._reduces[number] = (self._pulse.timed(work), into)
            if not self.overlap:
                self._settle(number)

    def _wire(self, bucket: Bucket) -> Wire | None:
        """Return what exchanges the gradient of a bucket; None: no other rank has it."""
        if bucket.experts:
            return self.wires.experts
        return self.wires.shards if bucket.sharded else self.wires.group

    def _launch(self, number: int, bucket: Bucket, full: Tensor) -> tuple[Work, Tensor]:
        """Start the reduction of a bucket's gradient, and return where its result will be."""
        wire = self._wire(bucket)
        own = self.buffer.own_grads[number]
        if wire is None and self._link is not None:
            return self._link.store(own, full), own
        if bucket.sharded:
            assert wire is not None, "what is sharded is so over several ranks"
            into = own
            if number in self._begun or self._link is not None:
                into = torch.empty_like(own, device=full.device)
            return wire.reduce_scatter(into, full), into
        return (Done() if wire is None else wire.all_reduce(full)), full

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
        if reduced is own:
            pass
        elif self._link is not None:
            self._store(self._link, number, reduced)
        elif number in self._begun:
            own.add_(reduced)
        else:
            own.copy_(reduced)
        self._begun.add(number)
        in_pieces(self.buffer.main_grad).release(number)
        if not self._unfinished[number]:
            self._sum_over_replicas(number)

    def _store(self, link: HostLink, number: int, reduced: Tensor) -> None:
        """Start to add what several ranks have reduced to a shard on the host."""
        own = self.buffer.own_grads[number]
        if number in self._stores:
            self._stores.pop(number).wait()
        if number in self._begun:
            total = torch.empty_like(reduced)
            link.load(total, own).wait()
            reduced = total.add_(reduced)
        self._stores[number] = self._pulse.timed(link.store(own, reduced))

    def _sum_over_replicas(self, number: int) -> None:
        """Start to all-reduce a complete shard over the ranks that own the same one, once
        per step.
        """
        wire = self.wires.replicas
        sharded = self.buckets.numbered[number].sharded
        if wire is not None and sharded and number not in self._sums:
            self._sums[number] = wire.all_reduce(self.buffer.own_grads[number])
            if not self.overlap:
                self._sums[number].wait()

    def finish(self) -> None:
        """End a step: afterwards ``own_grads`` are the sums over all micro-batches and replicas."""
        for number in [*self._reduces]:
            self._settle(number)
        for work in self._stores.values():
            work.wait()
        if self._link is not None:
            self._link.settle()
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
