"""Gradients and parameters sharded over data-parallel ranks: reduced and gathered unit by unit.

A pass visits units in an order fixed by the plan, so that all ranks of a data-parallel group launch
the same collectives in the same order, even if the graphs of their micro-batches differ. At a visit
the unit's parameters are gathered and those of the next visit are being gathered; all others are
freed. After the backward of a unit its gradient is reduced while the next unit computes.

As in ZeRO (https://arxiv.org/abs/1910.02054), stages 2 and 3. Of a rank whose shards are in memory of
the host, units are visited in the same way, also if it has no replicas.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist

from ..parallel.buffers import ParameterBuffer
from ..parallel.host_link import HostLink
from ..parallel.pulse import Pulse
from ..pipeline_parallel.ops import Kind
from .frozen_weights import FrozenWeights
from .unit_buckets import UnitBuckets
from .unit_gradients import GradientWires, UnitGradients
from .unit_parameters import UnitParameters
from .weights import Gradient


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
    link:            to the host, where the shards are there.
    frozen:          weights that are not trained, on the host, too; None: there are none.
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
        link: HostLink | None = None,
        frozen: FrozenWeights | None = None,
    ):
        pulse = Pulse() if pulse is None else pulse
        buckets = UnitBuckets(buffer, reads)
        self.parameters = UnitParameters(
            buffer, buckets, shard_group, overlap=overlap, pulse=pulse, experts=experts, link=link
        )
        self.frozen = frozen
        if frozen is not None:
            frozen.link = link
        wires = GradientWires(
            group or shard_group, shard_group, replicate_group, experts, in_bf16=in_bf16
        )
        self.gradients = UnitGradients(
            buffer, buckets, grads, wires, overlap=overlap, pulse=pulse, link=link
        )

    def need(self, *units: int) -> None:
        """Block until the first unit has its weights; see `UnitWeights.need`."""
        self.parameters.need(*units)
        if self.frozen is not None and units:
            self.frozen.need(*units)


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
                left = [each.unit for each in self._visits[self._index + 1 :] if each.reduces]
                self._shards.gradients.allocate(visit.unit, *left[:1])

    def _leave(self) -> None:
        if self._index >= 0 and self._visits[self._index].reduces:
            self._shards.gradients.reduce(self._visits[self._index].unit, self._last)
