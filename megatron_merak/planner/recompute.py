"""Chooses the units of each stage that keep no activations on the device: that are recomputed in
the backward, or whose activations are in host memory until then.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_merak.cluster import Device
from megatron_merak.errors import PlanError
from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule, ops_of
from megatron_merak.plan import StagePlan, Unit, exceeding, kind_of_unit
from megatron_merak.planner.memory import Ledger, StageNeeds
from megatron_merak.planner.offload import (
    AUTOMATIC_FLAG,
    FLAG,
    NOTHING,
    Offload,
    UnitSeconds,
    host_waits,
    offload_costs,
)

_LAYER = re.compile(r"(.*?\d+)(?:\.|$)")


@dataclass(frozen=True)
class Recompute:
    """What to recompute.

    method: "none", "full", or one of ``--recompute-method``.
    layers: see ``--recompute-num-layers``.
    """

    method: str = "none"
    layers: int = 1

    @classmethod
    def of(cls, granularity: str | None, method: str | None, layers: int | None) -> "Recompute":
        """Make it from the flags ``--recompute-granularity``, ``--recompute-method`` and
        ``--recompute-num-layers``.
        """
        if granularity == "selective":
            return cls(method or "none")
        return cls(method or "full", layers or 1) if granularity == "full" else cls()

    @property
    def needs_limit(self) -> bool:
        """Whether it depends on the memory of a rank, as it recomputes only what does not fit."""
        return self.method in ("stage-aware", "capacity")


def recomputed_units(units: Sequence[Unit]) -> tuple[int, ...]:
    """Return the units of full recomputation: those that keep more than their output, except the
    last one.

    An embedding keeps at most a dropout mask. The last unit has the costliest product of the model,
    the output layer, and its backward follows its forward immediately.
    """
    return tuple(
        index for index, unit in enumerate(units[:-1]) if unit.saved_bytes > unit.output_bytes
    )


@dataclass(frozen=True)
class Relief:
    """Units of a stage that keep nothing on the device.

    recompute: those that are recomputed.
    offload:   those that are offloaded.
    """

    recompute: tuple[int, ...] = ()
    offload: tuple[int, ...] = ()

    def moved(self, by: int) -> "Relief":
        """Return the same of a stage that begins ``by`` units later."""
        if not (self.recompute or self.offload):
            return self
        return Relief(
            tuple(unit + by for unit in self.recompute), tuple(unit + by for unit in self.offload)
        )


@dataclass(frozen=True)
class _Move:
    """One unit that is recomputed, or offloaded (``away``), in ``seconds`` of a micro-batch, so that
    ``freed`` bytes of it are not on the device.
    """

    unit: int
    away: bool
    seconds: float
    freed: int

    @property
    def price(self) -> float:
        return self.seconds / self.freed


class Chooser:
    """Chooses what a method recomputes, and what is offloaded, in each stage of a chain.

    times:  of each unit.
    memory: bytes that a rank may use, 0 where there is no limit.
    device: of a rank.
    limits: the bytes of each pipeline rank, where they are not all ``memory``.
    """

    def __init__(
        self,
        recompute: Recompute,
        units: Sequence[Unit],
        times: Sequence[UnitSeconds],
        ledger: Ledger,
        memory: float,
        device: Device,
        offload: Offload = NOTHING,
        limits: Sequence[float] | None = None,
    ):
        self._limits = limits
        self.recompute = recompute
        self.offload = offload
        self.device = device
        self.units = units
        self.times = times
        self.seconds = [each.forward for each in times]
        self.ledger = ledger
        self.memory = memory
        self.candidates = recomputed_units(units)
        early = {op.stage for op in _ops(ledger.schedule) if op.kind is Kind.R}
        last = ledger.schedule.stages - 1
        # Where other stages have R ops, the last one has no idle time for recomputation: it keeps
        # its tapes.
        self._keeping = last if early and last not in early else None
        self._early = frozenset(early)
        kinds: dict[tuple[object, ...], int] = {}
        self._kinds = [
            kinds.setdefault((kind_of_unit(unit), seconds), len(kinds))
            for unit, seconds in zip(units, times, strict=True)
        ]
        self._fewest_cache: dict[object, Relief | None] = {}
        self._fits_cache: dict[object, bool] = {}
        self._needs_cache: dict[object, StageNeeds] = {}
        stages_per_rank = [
            len(ledger.stages_of[ledger.schedule.rank_of(index)]) for index in range(last + 1)
        ]
        states: dict[object, int] = {}
        self._states = [
            states.setdefault((ledger.alike(index), share), len(states))
            for index, share in enumerate(stages_per_rank)
        ]
        self._stages_per_rank = stages_per_rank

    def stages(self, bounds: Sequence[int]) -> tuple[StagePlan, ...]:
        """Return the stages between these bounds, with what each recomputes and offloads."""
        if self.recompute.method == "stage-aware":
            return self._by_ratio(bounds)
        return tuple(
            self.stage(index, bounds[index], bounds[index + 1]) for index in range(len(bounds) - 1)
        )

    def stage(self, index: int, first: int, last: int) -> StagePlan:
        """Return one stage, chosen independently of the others. If it cannot fit, it recomputes, or
        offloads where it does not recompute, as much as possible.
        """
        if self._fits_fewest:
            fewest = self._fewest(index, first, last)
            if fewest is not None:
                return StagePlan(first, last, fewest.recompute, offload=fewest.offload)
            if self.recompute.method == "capacity":
                return StagePlan(first, last, tuple(range(first, last)))
            return StagePlan(first, last, offload=tuple(self._candidates(first, last)))
        candidates = self._candidates(first, last)
        away = self._first_layers(candidates, self.offload.layers)
        candidates = [unit for unit in candidates if unit not in away] if away else candidates
        span = 1
        match self.recompute.method:
            case "none":
                candidates = []
            case "uniform":
                span = self._span(candidates)
            case "block":
                candidates = list(self._first_layers(candidates, self.recompute.layers))
            case _:
                without = StagePlan(first, last, offload=away)
                if index == self._keeping and (not self.memory or self._fits(index, without)):
                    return without
        return StagePlan(first, last, tuple(candidates), span, offload=away)

    @property
    def _fits_fewest(self) -> bool:
        """Whether as few units as fit are recomputed or offloaded."""
        return self.recompute.method == "capacity" or self.offload.automatic

    def _candidates(self, first: int, last: int) -> list[int]:
        """Return the units of a stage that full recomputation has."""
        begin, end = (bisect_left(self.candidates, bound) for bound in (first, last))
        return list(self.candidates[begin:end])

    def _first_layers(self, candidates: Sequence[int], count: int) -> tuple[int, ...]:
        """Return the units of the first layers among some units."""
        if not count:
            return ()
        layers = list(dict.fromkeys(self._layer(unit) for unit in candidates))[:count]
        return tuple(unit for unit in candidates if self._layer(unit) in layers)

    def extra(self, index: int, first: int, last: int) -> float:
        """Return the seconds of recomputation of a stage per micro-batch, and of its waits for the
        host; infinity where the stage does not fit.
        """
        if self._fits_fewest and self._fewest(index, first, last) is None:
            return math.inf
        # The stage-aware rule applies to stages that were cut without regard to the cost of
        # recomputation.
        chosen = self.stage(index, first, last)
        if not self._fits_fewest and self.memory and not self._fits(index, chosen):
            return math.inf
        again = (
            0.0
            if self.recompute.method == "stage-aware"
            else sum(self.seconds[unit] for unit in chosen.recompute)
        )
        early = index in self._early
        return again + host_waits(self.units, chosen, self.times, self.device, early).total

    def _layer(self, unit: int) -> str:
        return _layer_of(self.units[unit])

    def _span(self, candidates: Sequence[int]) -> int:
        """Return the number of units in ``layers`` layers: a captured layer may have several."""
        sizes: dict[str, int] = {}
        for unit in candidates:
            sizes[self._layer(unit)] = sizes.get(self._layer(unit), 0) + 1
        return self.recompute.layers * max(sizes.values(), default=1)

    def _fits(self, index: int, stage: StagePlan) -> bool:
        """Return whether a stage fits, where each of n stages of a rank may use 1/n of the memory.
        Cached.
        """
        relief = Relief(stage.recompute, stage.offload).moved(-stage.first)
        alike = self._units_key(stage.first, stage.last), relief, stage.span
        key = self._states[index], alike
        if key not in self._fits_cache:
            memory = self.ledger.alone(index, stage, self._needs(index, stage, alike))
            self._fits_cache[key] = memory.total * self._stages_per_rank[index] <= self.memory
        return self._fits_cache[key]

    def _needs(self, index: int, stage: StagePlan, alike: object) -> StageNeeds:
        """Return what a stage needs by itself. Cached. alike: equal for stages of such units."""
        key = alike, self.ledger.splits(index)
        if key not in self._needs_cache:
            self._needs_cache[key] = self.ledger.needs(index, stage)
        return self._needs_cache[key]

    def _units_key(self, first: int, last: int) -> tuple[object, ...]:
        """Return a key that is equal for stages whose units, and what enters them, are alike."""
        before = self.units[first - 1].output_bytes if first else 0
        return before, last == len(self.units), tuple(self._kinds[first:last])

    def _fewest(self, index: int, first: int, last: int) -> Relief | None:
        """Return the units that are recomputed or offloaded where these are to be as few as fit;
        None if the stage cannot fit. Cached.

        Units are added by ascending seconds per byte until the stage fits, earlier units first,
        because a backward frees the tapes of later ones first. Then those that are not needed are
        removed, the costliest first.
        """
        key = self._states[index], self._units_key(first, last)
        if key not in self._fewest_cache:
            fewest = self._search(index, first, last)
            self._fewest_cache[key] = None if fewest is None else fewest.moved(-first)
        offsets = self._fewest_cache[key]
        return None if offsets is None else offsets.moved(first)

    def _search(self, index: int, first: int, last: int) -> Relief | None:
        def relief(moves: Sequence[_Move]) -> Relief:
            again, away = (
                tuple(sorted(move.unit for move in moves if move.away is side))
                for side in (False, True)
            )
            return Relief(again, away)

        def fits(moves: Sequence[_Move]) -> bool:
            found = relief(moves)
            return self._fits(index, StagePlan(first, last, found.recompute, offload=found.offload))

        if fits(()):
            return Relief()
        order = sorted(self._moves(first, last), key=lambda move: (move.price, move.unit))
        chosen = order[: _least(len(order), lambda count: fits(order[:count]))]
        if not fits(chosen):
            return None
        needed: list[tuple[int, bool]] = []  # kinds of moves without which the stage does not fit
        for move in sorted(chosen, key=lambda move: (-move.seconds, -move.unit)):
            kind = (self._kinds[move.unit], move.away)
            if kind in needed:
                continue
            if fits([other for other in chosen if other is not move]):
                chosen.remove(move)
            else:
                needed.append(kind)
        return relief(chosen)

    def _moves(self, first: int, last: int) -> list[_Move]:
        """Return the cheaper way to keep nothing of a unit on the device, for each unit of a stage
        that keeps anything.
        """
        again = [
            _Move(unit, False, self.seconds[unit], self.units[unit].saved_bytes)
            for unit in range(first, last)
            if self.units[unit].saved_bytes and self.recompute.method == "capacity"
        ]
        moves = {move.unit: move for move in again}
        if self.offload.automatic:
            stage = StagePlan(first, last)
            candidates = self._candidates(first, last)
            costs = offload_costs(self.units, stage, candidates, self.times, device=self.device)
            for unit, (seconds, freed) in costs.items():
                move = _Move(unit, True, seconds, freed)
                if unit not in moves or move.price < moves[unit].price:
                    moves[unit] = move
        return list(moves.values())

    def _by_ratio(self, bounds: Sequence[int]) -> tuple[StagePlan, ...]:
        """Return the stages by Merak's rule, which keeps more activations on later stages.

        The last of s stages keeps all tapes; stage i (from 1) those of a_i = min(L_i, a_1 (s - 1) /
        (s - i)) of its L_i layers, with the largest a_1 for which every stage fits.
        """
        count = len(bounds) - 1
        layers = [
            [unit for unit in self.candidates if bounds[k] <= unit < bounds[k + 1]]
            for k in range(count)
        ]

        def stages(first: int) -> tuple[StagePlan, ...]:
            plans = []
            for index, own in enumerate(layers):
                rest = count - 1 - index
                keep = min(len(own), first * (count - 1) // rest) if rest else len(own)
                plans.append(
                    StagePlan(bounds[index], bounds[index + 1], tuple(own[: len(own) - keep]))
                )
            return tuple(plans)

        best = stages(0)
        for first in range(1, max(map(len, layers)) + 1):
            larger = stages(first)
            if exceeding(self.peaks(larger), self.limits):
                break
            best = larger
        return best

    @property
    def limits(self) -> Sequence[float]:
        """Bytes that each pipeline rank may use."""
        return self._limits or [self.memory] * len(self.ledger.stages_of)

    def peaks(self, stages: Sequence[StagePlan]) -> list[int]:
        """Return the memory in bytes of each pipeline rank."""
        memories = self.ledger.together(stages)
        return [sum(memories[stage].total for stage in own) for own in self.ledger.stages_of]


def _ops(schedule: Schedule) -> Iterator[Op]:
    return (op for entry in schedule.entries() for op in ops_of(entry))


def _least(most: int, enough: Callable[[int], bool]) -> int:
    """Return the lowest count up to ``most`` that is enough, by bisection; ``most`` if none is."""
    low = 0
    high = most
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _layer_of(unit: Unit) -> str:
    """Return the layer that a unit belongs to: its name up to the first number."""
    match = _LAYER.match(unit.name)
    return match[1] if match else unit.name


def check_layers(offload: Offload, units: Sequence[Unit]) -> None:
    """Raise PlanError for more layers to offload than there are."""
    layers = {_layer_of(units[index]) for index in recomputed_units(units)}
    if offload.layers > len(layers):
        reason = f"the model has {len(layers)} layers"
        raise PlanError(FLAG, offload.layers, reason, f"Give at most {len(layers)}")


def check_limit(recompute: Recompute, memory: float, device: str, offload: Offload) -> None:
    """Raise PlanError for a method that depends on the memory of a rank where that is unknown."""
    if offload.automatic and not memory:
        reason = f"it offloads what does not fit, and the memory of a {device} is not known"
        remedy = f"Give --device-memory-gb, or {FLAG}"
        raise PlanError(AUTOMATIC_FLAG, "(given)", reason, remedy)
    if recompute.needs_limit and not memory:
        reason = f"it recomputes what does not fit, and the memory of a {device} is not known"
        raise PlanError("--recompute-method", recompute.method, reason, "Give --device-memory-gb")
