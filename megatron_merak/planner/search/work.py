"""What a chain of units adds up to: times and bytes, before it is cut into stages."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_merak.cluster import Cluster, Device
from megatron_merak.plan import (
    DTYPE_BYTES,
    Grid,
    Shards,
    StagePlan,
    Unit,
    optimizer_state,
    packed_weights,
    trained_parameters,
    trained_tied,
)
from megatron_merak.planner.cost import UnitCost, unit_costs
from megatron_merak.planner.layout import CutCosts, LeastCosts, cut_costs
from megatron_merak.planner.memory import StageMemory, Values
from megatron_merak.planner.overlap import Times, times
from megatron_merak.planner.partition import ExtraCost, in_ticks, level, partition
from megatron_merak.planner.rank_costs import Costs, fastest, slowest
from megatron_merak.planner.recompute import recomputed_units
from megatron_merak.planner.search.choice import Layer


@dataclass(frozen=True)
class Sums:
    """Seconds of one micro-batch on all units together, as if one stage had them: what overlaps
    with other units may overlap in any stage.

    weight:    the part of ``backward`` that computes weight gradients.
    recompute: of the forwards that full recomputation repeats.
    hidden:    saved where all of a forward and of a backward run together.
    usual:     of forward and backward of the most frequent unit, whatever hides it.
    again:     of its forward if full recomputation repeats it.
    units:     (seconds of forward and backward, those that pairs of passes may hide, those that
               other units may hide, number of such units).
    slack:     in which other units may hide something, in one stage.
    start:     the least part of a stage's time that is its forward.
    """

    forward: float
    backward: float
    weight: float
    recompute: float
    hidden: float
    usual: float
    again: float
    units: tuple[tuple[float, float, float, int], ...]
    slack: float
    start: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    @property
    def hidden_share(self) -> float:
        return self.hidden / self.seconds

    def busiest(self, ranks: int, paired: float = 0.0) -> float:
        """Return the least that the rank with most work has, of ``ranks``.

        paired: share of its forwards that run together with a backward.
        """
        most = (self.seconds - paired * self.hidden) / ranks
        for seconds, together, hideable, count in self.units:
            own = -(-count // ranks)
            most = max(most, own * (seconds - paired * together) - min(self.slack, own * hideable))
        bare = [
            seconds - paired * together - hideable for seconds, together, hideable, _ in self.units
        ]
        counts = [count for *_, count in self.units]
        for kind, (seconds, count) in enumerate(zip(bare, counts, strict=True)):
            if count >= ranks > 1 and seconds > 0:
                others = (each for other, each in enumerate(bare) if other != kind)
                most = max(most, _beside_another(seconds, count, max(others, default=0.0), ranks))
        return most


def _beside_another(seconds: float, count: int, other: float, ranks: int) -> float:
    """Return the least seconds of the busiest rank, where ``count`` units of so many seconds are on
    ``ranks`` ranks and one of these has a unit of ``other`` seconds too, such as the output layer.
    """
    least = math.inf
    for own in range(count // ranks, count + 1):  # units of each of the other ranks
        if own * seconds >= least:
            break
        beside = max(0, count - (ranks - 1) * own)
        least = min(least, max(own * seconds, other + beside * seconds))
    return least


@dataclass(frozen=True)
class StageSums:
    """Seconds of one micro-batch on a stage.

    hidden: see ``overlap.Times``.
    output: bytes that it sends to the next stage.
    """

    forward: float
    backward: float
    weight: float
    recompute: float
    hidden: float
    output: int


@dataclass(frozen=True)
class Cutting:
    """By what a chain is cut.

    homes:  the rank that has each stage.
    update: seconds of the optimizer for one parameter.
    levels: whether units are moved to make the costliest rank cheaper, see ``level``.
    """

    homes: tuple[int, ...]
    microbatches: int
    update: float
    levels: bool = False


@dataclass(frozen=True)
class UnequalCutting:
    """By what a chain is cut where pipeline ranks compute with unequal devices.

    homes:   the rank that has each stage.
    devices: of each stage.
    moved:   bytes that the optimizer moves for one parameter.
    levels:  see ``Cutting``.
    """

    homes: tuple[int, ...]
    devices: tuple[tuple[Device, ...], ...]
    microbatches: int
    moved: float
    levels: bool = False


@dataclass(frozen=True)
class ChainPart:
    """Some units of a chain: all of them, or those that are alike.

    count:      of the units.
    whole:      whether they are alike, so that a rank has a whole number of them.
    parameters: trained ones, with tied tensors once.
    experts:    those of ``parameters`` that copies of a layer divide.
    frozen:     those that are not trained, but for those in 4 bits.
    packed:     bytes of the latter.
    stated:     bytes of optimizer state of units that say how much they have.
    unstated:   number of the other ``parameters``.
    saved:      bytes that a micro-batch keeps for its backward.
    inputs:     those that it keeps if full recomputation repeats units.
    least:      those that it keeps at least if any unit may be recomputed, as by ``capacity``.
    """

    count: int
    whole: bool
    parameters: int
    experts: int
    frozen: int
    packed: int
    stated: float
    unstated: float
    saved: int
    inputs: int
    least: int
    dtype: str

    @classmethod
    def of(
        cls,
        units: Sequence[Unit],
        whole: bool,
        again: Sequence[bool],
        entering: Sequence[int],
        dtype: str,
    ) -> "ChainPart":
        """Return the sums of units.

        again:    whether full recomputation repeats each.
        entering: least bytes of the input of each, which it keeps if it is recomputed.
        """
        tied = dict(pair for unit in units for pair in trained_tied(unit))
        packed, packed_bytes = packed_weights(units)
        stated = optimizer_state(units, 0.0)
        saved = [unit.saved_bytes - unit.unread_bytes for unit in units]
        kept = [
            min(unit.output_bytes, bytes_) if repeats else bytes_
            for unit, bytes_, repeats in zip(units, saved, again, strict=True)
        ]
        return cls(
            len(units),
            whole,
            parameters=sum(unit.parameters - unit.frozen for unit in units) + sum(tied.values()),
            experts=sum(unit.experts for unit in units),
            frozen=sum(unit.frozen for unit in units) - packed,
            packed=packed_bytes,
            stated=stated,
            unstated=optimizer_state(units, 1.0) - stated,
            saved=sum(saved),
            inputs=sum(kept),
            least=sum(map(min, saved, entering)),
            dtype=dtype,
        )

    def seconds(self, sums: Sums) -> float:
        """Return the time of a micro-batch on these units."""
        return self.count * sums.usual if self.whole else sums.seconds

    def repeated(self, sums: Sums) -> float:
        """Return the time of what full recomputation repeats of these units."""
        return self.count * sums.again if self.whole else sums.recompute

    def state(self, shards: Shards, state_bytes: float, frozen_bytes: float) -> float:
        """Return the bytes of weights, gradients and optimizer state."""
        frozen = (frozen_bytes or DTYPE_BYTES[self.dtype]) * self.frozen + self.packed
        values = Values(self.parameters, self.stated + self.unstated * state_bytes, frozen)
        return StageMemory.of(
            values, self.dtype, activations=0, working=0, transfers=0, shards=shards
        ).total


def _share(least: UnitCost, own: UnitCost) -> float:
    """Return the larger share of a unit's least times of forwards, and of both passes, in its own."""
    pairs = [
        (least.forward, own.forward),
        (least.forward + least.backward, own.forward + own.backward),
    ]
    return max((one / other for one, other in pairs if other), default=0.0)


AnyCutting = Cutting | UnequalCutting


class ChainWork:
    """The sums of a chain on one of the ranks of a layer; where nodes differ by the least times that
    any of them has.

    parts: the chain, and its most frequent unit if most are alike.
    """

    def __init__(self, units: Sequence[Unit], cluster: Cluster, dtype: str, layer: Layer):
        self.units = tuple(units)
        self.dtype = dtype
        self.expert_copies = layer.expert_copies
        # neighbours, than whom no others are closer
        grid = Grid(tp=layer.tp, cp=layer.cp, dp=layer.expert_copies)
        self._of_device = {
            device: unit_costs(self.units, cluster, dtype, grid, layer.expert_copies, device)
            for device in cluster.devices
        }
        of_units = [*zip(*self._of_device.values(), strict=True)]
        self._costs = tuple(map(fastest, of_units))
        self._slowest = tuple(map(slowest, of_units))
        self._own: dict[tuple[Device, ...], Costs] = {}
        self._speeds: dict[tuple[Device, ...], float] = {}
        self._again = frozenset(recomputed_units(self.units))
        self._counts = Counter(
            (cost, index in self._again) for index, cost in enumerate(self._costs)
        )
        self._sums: dict[tuple[str, bool], Sums] = {}
        self._rooms: dict[tuple[bool, ...], int] = {}
        self._stages: dict[tuple[AnyCutting, str, bool, bool], list[StageSums]] = {}
        self._cuts: dict[tuple[AnyCutting, str, bool], tuple[int, ...]] = {}
        ((usual, _), _) = self._counts.most_common(1)[0]
        alike = [index for index, cost in enumerate(self._costs) if cost == usual]
        self._usual = alike[0]
        self._alike = len(alike)
        self.parts = [self._part(range(len(self.units)), False)]
        if 2 * len(alike) > len(self.units):
            self.parts.append(self._part(alike, True))

    @property
    def parameters(self) -> int:
        return self.parts[0].parameters

    @property
    def computed(self) -> float:
        """Least seconds of a micro-batch's forwards and backwards, without what is sent."""
        return sum(cost.forward + cost.backward for cost in self._costs)

    @property
    def computed_again(self) -> float:
        """Least seconds of those forwards that full recomputation repeats."""
        return sum(self._costs[index].forward for index in self._again)

    @property
    def reduced(self) -> int:
        """Number of gradients that all ranks with the same layers add up; those of experts that these
        divide may be nobody else's.
        """
        whole = self.parts[0]
        return whole.parameters - (whole.experts if self.expert_copies > 1 else 0)

    def hiding(self) -> tuple[float, float]:
        """Return the most seconds of all forwards, and of all backwards with what they recompute, in
        which replicas may send beside them.
        """
        again = sum(self._slowest[index].forward for index in self._again)
        forward = sum(cost.forward + sum(cost.reduces) for cost in self._slowest)
        backward = sum(cost.backward + sum(cost.reduces) for cost in self._slowest)
        return forward, backward + again

    def speed(self, devices: tuple[Device, ...]) -> float:
        """Return the share, at most 1, of the rates by which times are the least that a pipeline rank
        with these devices reaches: no unit computes in less than its least time divided by it.
        """
        if devices not in self._speeds:
            self._speeds[devices] = max(map(_share, self._costs, self._on(devices)))
        return self._speeds[devices]

    def _on(self, devices: tuple[Device, ...]) -> Costs:
        """Return the times of all units on a pipeline rank with these devices. Cached."""
        if devices not in self._own:
            of_devices = [self._of_device[device] for device in devices]
            self._own[devices] = tuple(map(slowest, zip(*of_devices, strict=True)))
        return self._own[devices]

    def sent_more(self, part: ChainPart, sums: Sums) -> float:
        """Return the time of a part of the chain, at least 1 and relative to its computing alone, which
        other devices speed up.
        """
        units = [self._usual] if part.whole else range(len(self.units))
        computed = sum(self._costs[unit].forward + self._costs[unit].backward for unit in units)
        again = sum(self._costs[unit].forward for unit in units if unit in self._again)
        times_more = part.count if part.whole else 1
        shares = [part.seconds(sums) / (times_more * computed)] if computed else []
        shares += [part.repeated(sums) / (times_more * again)] if again else []
        return max([1.0, *shares])

    def largest(self, count: int) -> int:
        """Return the trained parameters of so many units that have most."""
        return sum(sorted(trained_parameters([unit]) for unit in self.units)[-count:])

    def _part(self, indices: Sequence[int], whole: bool) -> ChainPart:
        again = [index in self._again for index in indices]
        entering = [self._entering(index) for index in indices]
        units = [self.units[index] for index in indices]
        return ChainPart.of(units, whole, again, entering, self.dtype)

    def _entering(self, index: int) -> int:
        """Return the least bytes of a unit's input: without what only passes the one before."""
        if index == 0:
            return 0
        before = self.units[index - 1]
        return before.output_bytes - before.passed_bytes

    def sums(self, overlap: str, splits: bool) -> Sums:
        """Return the times of all units under an overlap of tensor-parallel collectives."""
        key = (overlap, splits)
        if key not in self._sums:
            self._sums[key] = self._added(overlap, splits)
        return self._sums[key]

    def _added(self, overlap: str, splits: bool) -> Sums:
        whole = times(self._costs, overlap, splits)
        again = [self._costs[index] for index in sorted(self._again)]
        hides = overlap in ("weight-gradient", "pair") and not splits
        rows: Counter[tuple[float, float, float]] = Counter()
        slack = 0.0
        start = 1.0
        for (cost, _), count in self._counts.items():
            each = times([cost], overlap, splits)
            exposed = each.backward - cost.backward if hides else 0.0
            hideable = cost.beyond[1] - cost.bare_beyond - cost.regathers
            slack += count * max(0.0, cost.hiding - hideable) if hides else 0.0
            seconds = each.forward + each.backward
            together = cost.beyond[0] + each.backward - cost.backward
            rows[seconds, together if overlap == "pair" else 0.0, exposed] += count
        for costs in self._of_device.values():
            for cost in dict.fromkeys(costs):
                both = cost.forward + cost.backward + sum(cost.reduces)
                start = min(start, cost.forward / both)
        usual = self._costs[self._usual]
        alike = times([usual] * self._alike, overlap, splits)
        return Sums(
            whole.forward,
            whole.backward,
            min(whole.weight, whole.backward),
            recompute=times(again, overlap).again,
            hidden=whole.hidden,
            usual=usual.forward + usual.beyond[0] + usual.backward
            if hides
            else (alike.forward + alike.backward) / self._alike,
            again=times([usual] * self._alike, overlap).again / self._alike
            if self._usual in self._again
            else 0.0,
            # of a stage in halves, a unit takes less time than alone
            units=() if overlap == "sub-pipeline" else tuple((*row, rows[row]) for row in rows),
            slack=slack,
            start=start,
        )

    def stages(
        self, cutting: AnyCutting, overlap: str, splits: bool, again: bool
    ) -> list[StageSums]:
        """Return the stages of ``cuts``.

        again: whether units are recomputed.
        """
        key = (cutting, overlap, splits, again)
        if key not in self._stages:
            bounds = self.cuts(cutting, overlap, again)
            self._stages[key] = [
                self._stage(first, last, overlap, splits, costs)
                for (first, last), costs in zip(
                    pairwise(bounds), self._of_stages(cutting), strict=True
                )
            ]
        return self._stages[key]

    def _of_stages(self, cutting: AnyCutting) -> list[Costs]:
        """Return the times of all units on the rank of each stage."""
        if isinstance(cutting, Cutting):
            return [self._costs] * len(cutting.homes)
        return [self._on(devices) for devices in cutting.devices]

    def planned(self, cutting: AnyCutting, overlap: str, again: bool) -> tuple[StagePlan, ...]:
        """Return the stages of ``cuts``, for plans."""
        return tuple(
            StagePlan(first, last, tuple(sorted(self._again.intersection(range(first, last)))))
            if again
            else StagePlan(first, last)
            for first, last in pairwise(self.cuts(cutting, overlap, again))
        )

    def cuts(self, cutting: AnyCutting, overlap: str, again: bool) -> tuple[int, ...]:
        """Return where the planner cuts the chain if memory suffices. Cached.

        again: whether units are recomputed.
        """
        key = (cutting, overlap, again)
        if key not in self._cuts:
            self._cuts[key] = self._bounds(cutting, overlap, again)
        return self._cuts[key]

    def _bounds(self, cutting: AnyCutting, overlap: str, again: bool) -> tuple[int, ...]:
        if isinstance(cutting, UnequalCutting):
            return self._unequal_bounds(cutting, overlap, again)
        exposed = [times([cost], overlap) for cost in self._costs]
        repeated = self._repeated(exposed, again)
        costs, shared = cut_costs(self.units, exposed, cutting.microbatches, cutting.update)

        def recomputation(stage: int, first: int, last: int) -> float:
            return in_ticks(cutting.microbatches * sum(repeated[first:last]))

        # without a function the cut is found by compiled code alone
        return self._cut(cutting, costs, recomputation if any(repeated) else None, shared)

    @staticmethod
    def _cut(
        cutting: AnyCutting,
        costs: Sequence[float],
        more: ExtraCost | None,
        shared: Sequence[tuple[float, Sequence[int]]],
    ) -> tuple[int, ...]:
        bounds = partition(costs, len(cutting.homes), more, shared)
        return level(bounds, cutting.homes, costs, more, shared) if cutting.levels else bounds

    def _repeated(self, exposed: Sequence[Times], again: bool) -> list[float]:
        """Return the seconds of each unit that its recomputation takes. again: whether there is
        any.
        """
        return [
            each.again if again and index in self._again else 0.0
            for index, each in enumerate(exposed)
        ]

    def _unequal_bounds(
        self, cutting: UnequalCutting, overlap: str, again: bool
    ) -> tuple[int, ...]:
        own: dict[tuple[Device, ...], CutCosts] = {}
        repeated: dict[tuple[Device, ...], list[float]] = {}
        for devices in dict.fromkeys(cutting.devices):
            exposed = [times([cost], overlap) for cost in self._on(devices)]
            update = max(device.passes_time(cutting.moved) for device in devices)
            own[devices] = cut_costs(self.units, exposed, cutting.microbatches, update)
            repeated[devices] = self._repeated(exposed, again)
        least = LeastCosts([*own.values()])

        def more(stage: int, first: int, last: int) -> float:
            devices = cutting.devices[stage]
            recomputed = in_ticks(cutting.microbatches * sum(repeated[devices][first:last]))
            return recomputed + least.beyond(own[devices], first, last)

        return self._cut(cutting, least.costs, more, least.shared)

    def _stage(self, first: int, last: int, overlap: str, splits: bool, costs: Costs) -> StageSums:
        own = times(costs[first:last], overlap, splits)
        again = [costs[unit] for unit in range(first, last) if unit in self._again]
        return StageSums(
            own.forward,
            own.backward,
            min(own.weight, own.backward),
            times(again, overlap).again,
            hidden=own.hidden,
            output=self.units[last - 1].output_bytes,
        )

    def least_room(self, shards: Shards, splits: bool, ranks: int) -> int:
        """Return the bytes that every rank needs while a unit runs, and for messages: where replicas
        share weights and gradients, those of a unit too. Cached.

        ranks: of the pipeline.
        """
        key = (shards.parameters > 1, shards.gradients > 1, splits, ranks == 1)
        if key not in self._rooms:
            self._rooms[key] = self._least_room(shards, splits, ranks)
        return self._rooms[key]

    def _least_room(self, shards: Shards, splits: bool, ranks: int) -> int:
        weights = DTYPE_BYTES[self.dtype] if shards.parameters > 1 else 0
        gradients = 4 if shards.gradients > 1 else 0
        each = max(weights, gradients) if splits else weights + gradients
        needs = [unit.working(splits) + each * trained_parameters([unit]) for unit in self.units]
        if ranks == 1:
            return max(needs)
        # one is received ahead, and one is on its way
        return min(needs) + 2 * min(unit.output_bytes for unit in self.units[:-1])
