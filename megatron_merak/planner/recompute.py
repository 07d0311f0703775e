"""Which units of each stage keep no tape and run their forward again in the backward."""

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_merak.errors import PlanError
from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule, ops_of
from megatron_merak.plan import StagePlan, Unit
from megatron_merak.planner.memory import Ledger

_LAYER = re.compile(r"(.*?\d+)(?:\.|$)")


@dataclass(frozen=True)
class Recompute:
    """What to recompute: ``method`` "none", "full", or one of ``--recompute-method`` with its ``layers``."""

    method: str = "none"
    layers: int = 1

    @classmethod
    def of(cls, granularity: str | None, method: str | None, layers: int | None) -> "Recompute":
        """As the flags ``--recompute-granularity``, ``-method`` and ``-num-layers`` say."""
        return cls(method or "full", layers or 1) if granularity == "full" else cls()

    @property
    def needs_limit(self) -> bool:
        """Whether it recomputes only what does not fit, so that it must know the memory of a rank."""
        return self.method in ("stage-aware", "capacity")


def recomputed_units(units: Sequence[Unit]) -> tuple[int, ...]:
    """Full recomputation: every unit that keeps more than an activation (an embedding has a dropout mask at most), but
    not the last, whose output product is the costliest of the model while its backward follows its forward at once."""
    return tuple(index for index, unit in enumerate(units[:-1]) if unit.saved_bytes > unit.output_bytes)


class Chooser:
    """What a method recomputes of the stages of a chain.

    seconds: of each unit's forward. memory: bytes that a rank may use, 0 where there is no limit.
    """

    def __init__(
        self, recompute: Recompute, units: Sequence[Unit], seconds: Sequence[float], ledger: Ledger, memory: float
    ):
        self.recompute, self.units, self.seconds, self.ledger, self.memory = recompute, units, seconds, ledger, memory
        self.usual = recomputed_units(units)
        early = {op.stage for op in _ops(ledger.schedule) if op.kind is Kind.R}
        last = ledger.schedule.stages - 1
        # Where other stages recompute ahead of their backwards the last one has no time to: it keeps its tapes.
        self._keeping = last if early and last not in early else None
        kinds: dict[tuple, int] = {}
        self._kinds = [
            kinds.setdefault((unit.saved_bytes, unit.output_bytes, unit.passed_bytes, unit.transient_bytes,
                              unit.unread_bytes, unit.held_bytes, unit.parameters, unit.tied, unit.frozen,
                              unit.tied_frozen, unit.state_bytes, unit.tied_state_bytes, second), len(kinds))
            for unit, second in zip(units, seconds, strict=True)
        ]  # fmt: skip
        self._known: dict[object, tuple[int, ...] | None] = {}
        self._fitting: dict[object, bool] = {}
        sharing = [len(ledger.stages_of[ledger.schedule.rank_of(index)]) for index in range(last + 1)]
        states: dict[object, int] = {}
        self._states = [
            states.setdefault((ledger.alike(index), share), len(states)) for index, share in enumerate(sharing)
        ]
        self._sharing = sharing

    def stages(self, bounds: Sequence[int]) -> tuple[StagePlan, ...]:
        """The stages between these bounds, each with what it recomputes."""
        if self.recompute.method == "stage-aware":
            return self._by_ratio(bounds)
        return tuple(self.stage(index, bounds[index], bounds[index + 1]) for index in range(len(bounds) - 1))

    def stage(self, index: int, first: int, last: int) -> StagePlan:
        """One stage by itself. Where nothing makes it fit, it recomputes all that it may."""
        usual = self.usual[bisect_left(self.usual, first) : bisect_left(self.usual, last)]
        match self.recompute.method:
            case "none":
                return StagePlan(first, last)
            case "uniform":
                return StagePlan(first, last, tuple(usual), self._span(usual))
            case "block":
                layers = list(dict.fromkeys(self._layer(unit) for unit in usual))[: self.recompute.layers]
                return StagePlan(first, last, tuple(unit for unit in usual if self._layer(unit) in layers))
            case "capacity":
                found = self._fewest(index, first, last)
                return StagePlan(first, last, tuple(range(first, last)) if found is None else found)
        whole = StagePlan(first, last)
        if index == self._keeping and (not self.memory or self._fits(index, whole)):
            return whole
        return StagePlan(first, last, tuple(usual))

    def extra(self, index: int, first: int, last: int) -> float:
        """Seconds of recomputation of a stage and micro-batch; infinity where the stage does not fit."""
        if self.recompute.method == "capacity":
            found = self._fewest(index, first, last)
            return math.inf if found is None else sum(self.seconds[unit] for unit in found)
        # The ratio rule is for stages that were cut without regard to recomputation: nothing of it counts here.
        chosen = self.stage(index, first, last)
        if self.memory and not self._fits(index, chosen):
            return math.inf
        return 0.0 if self.recompute.method == "stage-aware" else sum(self.seconds[unit] for unit in chosen.recompute)

    def _layer(self, unit: int) -> str:
        """What tells layers apart: a unit's name up to its first number."""
        found = _LAYER.match(self.units[unit].name)
        return found[1] if found else self.units[unit].name

    def _span(self, usual: Sequence[int]) -> int:
        """The run of ``layers`` layers in units: a captured layer may be several."""
        sizes: dict[str, int] = {}
        for unit in usual:
            sizes[self._layer(unit)] = sizes.get(self._layer(unit), 0) + 1
        return self.recompute.layers * max(sizes.values(), default=1)

    def _fits(self, index: int, stage: StagePlan) -> bool:
        """Of several stages of a rank each may use its part of the memory. Stages that are alike are looked at once."""
        again = tuple(unit - stage.first for unit in stage.recompute)
        key = *self._alike(index, stage.first, stage.last), again, stage.span
        if key not in self._fitting:
            self._fitting[key] = self.ledger.alone(index, stage).total * self._sharing[index] <= self.memory
        return self._fitting[key]

    def _alike(self, index: int, first: int, last: int) -> tuple[object, ...]:
        """Equal for runs of units that as these stages need the same memory and take the same time."""
        before = self.units[first - 1].output_bytes if first else 0
        return self._states[index], before, last == len(self.units), tuple(self._kinds[first:last])

    def _fewest(self, index: int, first: int, last: int) -> tuple[int, ...] | None:
        """The capacity form: cheapest seconds per byte first until the stage fits, the first units of the stage before
        later ones, whose tapes a backward frees first; then the dearest that it fits without. None if none fits."""
        key = self._alike(index, first, last)
        if key not in self._known:
            found = self._search(index, first, last)
            self._known[key] = None if found is None else tuple(unit - first for unit in found)
        known = self._known[key]
        return None if known is None else tuple(unit + first for unit in known)

    def _search(self, index: int, first: int, last: int) -> tuple[int, ...] | None:
        def fits(units: Sequence[int]) -> bool:
            return self._fits(index, StagePlan(first, last, tuple(sorted(units))))

        if fits(()):
            return ()
        useful = [unit for unit in range(first, last) if self.units[unit].saved_bytes]
        order = sorted(useful, key=lambda unit: (self.seconds[unit] / self.units[unit].saved_bytes, unit))
        chosen = order[: _least(len(order), lambda count: fits(order[:count]))]
        if not fits(chosen):
            return None
        refused: list[int] = []
        for unit in sorted(chosen, key=lambda unit: (-self.seconds[unit], -unit)):
            if self._kinds[unit] in refused:
                continue
            if fits([other for other in chosen if other != unit]):
                chosen.remove(unit)
            else:
                refused.append(self._kinds[unit])
        return tuple(sorted(chosen))

    def _by_ratio(self, bounds: Sequence[int]) -> tuple[StagePlan, ...]:
        """Merak's rule: the last of s stages keeps all tapes, stage i (from 1) those of a_i = min(L_i, a_1 (s - 1) /
        (s - i)) of its L_i layers, with the largest a_1 for which every stage fits."""
        count = len(bounds) - 1
        layers = [[unit for unit in self.usual if bounds[k] <= unit < bounds[k + 1]] for k in range(count)]

        def stages(first: int) -> tuple[StagePlan, ...]:
            made = []
            for index, mine in enumerate(layers):
                rest = count - 1 - index
                keep = min(len(mine), first * (count - 1) // rest) if rest else len(mine)
                made.append(StagePlan(bounds[index], bounds[index + 1], tuple(mine[: len(mine) - keep])))
            return tuple(made)

        found = stages(0)
        for first in range(1, max(map(len, layers)) + 1):
            larger = stages(first)
            if self.memory and self.largest_rank(larger) > self.memory:
                break
            found = larger
        return found

    def largest_rank(self, stages: Sequence[StagePlan]) -> int:
        """The bytes of the rank that needs most."""
        found = self.ledger.together(stages)
        return max(sum(found[stage].total for stage in mine) for mine in self.ledger.stages_of)


def _ops(schedule: Schedule) -> Iterator[Op]:
    return (op for entry in schedule.entries() for op in ops_of(entry))


def _least(most: int, enough: Callable[[int], bool]) -> int:
    """The lowest count up to ``most`` that is enough, if more are too; ``most`` if none is."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return low


def check_limit(recompute: Recompute, memory: float, device: str) -> None:
    """Raises PlanError for a method that needs to know the memory of a rank where that is unknown."""
    if recompute.needs_limit and not memory:
        reason = f"it recomputes what does not fit, and the memory of a {device} is not known"
        raise PlanError("--recompute-method", recompute.method, reason, "Give --device-memory-gb")
