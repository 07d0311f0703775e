"""Parameters sharded over data-parallel ranks, gathered unit by unit.

As in ZeRO (https://arxiv.org/abs/1910.02054), stage 3. Where a rank's shards are in memory of the
host they are copied to the device first.
"""

from collections.abc import Sequence

import torch.distributed as dist

from ..parallel.buffers import ParameterBuffer, ShardedState
from ..parallel.host_link import HostLink
from ..parallel.in_flight import Work
from ..parallel.pieces import Pieces, in_pieces
from ..parallel.pulse import Pulse
from ..tensor_parallel.sequence import gather_single
from .unit_buckets import UnitBuckets


class UnitWeights:
    """Pieces of memory that units read, with values only while these compute.

    Attribute ``arriving``: what fills pieces, by number, until it was waited for.
    """

    def __init__(self) -> None:
        self.arriving: dict[int, Work] = {}

    def numbers(self, unit: int) -> Sequence[int]:
        """Return the pieces that a unit reads."""
        raise NotImplementedError

    def pieces(self, number: int) -> tuple[Pieces, int]:
        """Return what a piece is of, and its index there."""
        raise NotImplementedError

    def fill(self, number: int) -> None:
        """Start to fill a piece that has memory."""
        raise NotImplementedError

    def count(self) -> int:
        """Return the number of pieces."""
        raise NotImplementedError

    def need(self, *units: int) -> None:
        """Block until the pieces of the first unit are filled.

        Start to fill those of the other ``units``, and free the pieces of all units not mentioned.
        """
        needed = dict.fromkeys(number for unit in units for number in self.numbers(unit))
        for number in range(self.count()):
            pieces, at = self.pieces(number)
            if pieces.allocated(at) and number not in needed:
                self.wait(number)
                pieces.release(at)
        for number in needed:
            pieces, at = self.pieces(number)
            if not pieces.allocated(at):
                pieces.allocate(at)
                self.fill(number)
        for number in self.numbers(units[0]) if units else ():
            self.wait(number)

    def wait(self, number: int) -> None:
        if number in self.arriving:
            self.arriving.pop(number).wait()


class UnitParameters(UnitWeights):
    """The trained parameters of the units that compute, gathered; no-ops where they are not sharded.

    buffer:  has the shards of this rank.
    buckets: of it, by unit.
    group:   the ranks that ``buffer`` is sharded over, in the order of their shards.
    overlap: whether the next unit's are gathered while one computes.
    pulse:   where waits are noted.
    experts: the ranks with the same experts, where data-parallel ranks divide them.
    link:    to the host, where the shards are there.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        buckets: UnitBuckets,
        group: dist.ProcessGroup | None,
        *,
        overlap: bool,
        pulse: Pulse,
        experts: dist.ProcessGroup | None,
        link: HostLink | None = None,
    ):
        super().__init__()
        self.buffer = buffer
        self.buckets = buckets
        self.group = group
        self.experts = experts
        self.overlap = overlap
        self._link = link
        self._pulse = pulse
        # what segments read is in `data`, unless it is in the master copy
        self._in_data = [not buffer.slots[each.names[0]].fp32 for each in buckets.numbered]

    def gathers(self, unit: int, name: str) -> bool:
        """Whether a parameter is gathered when a unit is visited."""
        return any(
            name in self.buckets.numbered[number].names for number in self.buckets.of_unit(unit)
        )

    def numbers(self, unit: int) -> Sequence[int]:
        return [number for number in self.buckets.of_unit(unit) if self._in_data[number]]

    def pieces(self, number: int) -> tuple[Pieces, int]:
        return in_pieces(self.buffer.data), number

    def count(self) -> int:
        return len(self.buckets.numbered)

    def need(self, *units: int) -> None:
        if self.buffer.sharding >= ShardedState.PARAMETERS and units:
            super().need(*units)

    def fill(self, number: int) -> None:
        full = in_pieces(self.buffer.data).piece(number).data
        own = self.buffer.own_data[number]
        bucket = self.buckets.numbered[number]
        group = self.experts if bucket.experts else self.group
        if self._link is not None:
            start, stop, _ = self.buffer.owned[number]
            part = full[start - bucket.start : stop - bucket.start]
            work = self._link.load(part, own)
            if bucket.sharded:
                with self._link.aside():
                    work.wait()
                    work = gather_single(full, part, group=group, async_op=True)
        elif bucket.sharded:
            work = gather_single(full, own, group=group, async_op=True)
        else:
            full.copy_(own)
            return
        self.arriving[number] = self._pulse.timed(work)
        if not self.overlap:
            self.wait(number)
