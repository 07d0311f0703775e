"""How many bytes one rank of each stage needs at its peak."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from math import ceil

from megatron_merak.cluster import Device
from megatron_merak.pipeline_parallel.ops import Kind, Schedule, ops_of
from megatron_merak.plan import (
    DTYPE_BYTES,
    UNSHARDED,
    Plan,
    Shards,
    StagePlan,
    Unit,
    held_parameters,
    trained_parameters,
)
from megatron_merak.planner.saved import Footprint, footprint, moments, of_stage, peak
from megatron_merak.planner.uneven import shared_state


@dataclass(frozen=True)
class Values:
    """What replicas hold of parameters, together where they share them: how many are ``trained``, the bytes of the
    optimizer's ``state``, as if each had as much as the one that has most, and those of ``frozen`` weights, which they
    never share."""

    trained: int
    state: float
    frozen: float = 0.0

    def __sub__(self, other: "Values") -> "Values":
        return Values(self.trained - other.trained, self.state - other.state, self.frozen - other.frozen)


@dataclass(frozen=True)
class StageMemory:
    """Bytes: ``weights`` in the compute dtype, fp32 ``gradients`` of those that are trained, ``optimizer`` (its state,
    and an fp32 weight beside a 16-bit one), ``activations`` that the micro-batches in flight keep for their backwards
    when the rank keeps most, ``working`` while one unit runs, ``transfers`` from and to neighbouring stages. Of what
    replicas share, a rank's shard counts, and in ``working`` what is whole for a time."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    transfers: int

    @property
    def total(self) -> int:
        return sum(astuple(self))

    @classmethod
    def of(
        cls, values: "Values", dtype: str, activations: int, working: int, transfers: int, shards: Shards = UNSHARDED
    ) -> "StageMemory":
        weights = -(-values.trained * DTYPE_BYTES[dtype] // shards.parameters) + ceil(values.frozen)
        gradients = -(-values.trained * 4 // shards.gradients)
        kept = ceil(values.state) + (0 if dtype == "float32" else 4 * values.trained)
        optimizer = -(-kept // shards.optimizer)
        return cls(weights, gradients, optimizer, activations, working, transfers)

    def __add__(self, other: "StageMemory") -> "StageMemory":
        return StageMemory(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def transfer_bytes(units: Sequence[Unit], stage: StagePlan) -> int:
    """An activation and a gradient on their way over each border of a stage: receives are posted ahead of need, and
    what is sent stays until it has arrived."""
    before = units[stage.first - 1].output_bytes if stage.first else 0
    return 2 * (before + (units[stage.last - 1].output_bytes if stage.last < len(units) else 0))


class WholeUnits:
    """Whole weights and gradients that exist only while units compute, where replicas share them."""

    def __init__(self, units: Sequence[Unit], schedule: Schedule, dtype: str, shards: Shards):
        self.weight = DTYPE_BYTES[dtype] if shards.parameters > 1 else 0
        self.gradient = 4 if shards.gradients > 1 else 0
        ops = (op for entry in schedule.entries() for op in ops_of(entry)) if self.gradient else ()
        self.splits = {op.stage for op in ops if op.kind is Kind.W}
        self.values = [trained_parameters([unit]) for unit in units] if self.gradient else []

    def bytes(self, index: int, stage: StagePlan, unit: int) -> int:
        """The most while a unit of stage ``index`` runs. A forward has its weights and those of the next unit; a
        backward its weights, those of the unit before, its gradient, and that of the next unit, which is on its way;
        where W ops make the gradients, these and the weights are not there at once."""
        if not self.gradient:
            return 0
        own = self.values[unit]
        before = self.values[unit - 1] if unit > stage.first else 0
        behind = self.values[unit + 1] if unit + 1 < stage.last else 0
        weights, gradients = self.weight * (own + before), self.gradient * (own + behind)
        backward = max(weights, gradients) if index in self.splits else weights + gradients
        return max(self.weight * (own + behind), backward)


class Ledger:
    """The memory of the stages of a schedule, for whatever cut and recomputation of a chain of units.

    shards: over how many ranks each part of a stage's state is sharded. copied: gradients that are rounded to bf16 and
    sent at a time, 0 where they travel as they are. state_bytes, frozen_bytes, bucket_size: see ``Plan``; 0: unknown.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        schedule: Schedule,
        dtype: str,
        shards: Shards = UNSHARDED,
        copied: int = 0,
        state_bytes: float = 8.0,
        frozen_bytes: float = 0.0,
        bucket_size: int = 0,
    ):
        self.state_bytes, self.frozen_bytes = state_bytes, frozen_bytes or DTYPE_BYTES[dtype]
        self._bucket_size = 0 if shards.gradients > 1 else bucket_size
        self.units, self.schedule, self.dtype, self.shards, self.copied = units, schedule, dtype, shards, copied
        self.stages_of = [
            [stage for stage in range(schedule.stages) if schedule.rank_of(stage) == rank]
            for rank in range(len(schedule.ranks))
        ]
        self._whole = WholeUnits(units, schedule, dtype, shards)
        self.moments = [moments(schedule, rank) for rank in range(len(schedule.ranks))]
        self._own = [of_stage(self.moments[schedule.rank_of(stage)], stage) for stage in range(schedule.stages)]

    def alone(self, index: int, stage: StagePlan) -> StageMemory:
        """Of a stage, if its rank held no other."""
        footprints = {index: footprint(self.units, stage)}
        activations, values = peak(self._own[index], footprints)[index], self._values([stage])[0]
        return self._memory(stage, activations, values, self._working(index, stage))

    def alike(self, index: int) -> object:
        """Equal for stages that need the same memory for the same units."""
        return tuple(tuple((state, count) for (_, state), count in moment) for moment in self._own[index])

    def together(self, stages: Sequence[StagePlan]) -> list[StageMemory]:
        """Of every stage, at the peak of its rank. What only one stage of a rank needs at a time (``working``), or
        holds for others too (tied tensors), counts for one of them."""
        found: list[StageMemory | None] = [None] * len(stages)
        for rank, mine in enumerate(self.stages_of):
            footprints: dict[int, Footprint] = {index: footprint(self.units, stages[index]) for index in mine}
            shares = peak(self.moments[rank], footprints)
            busiest = max(mine, key=lambda index: self._working(index, stages[index]))
            held = self._values([stages[index] for index in mine])
            for index, values in zip(mine, held, strict=True):
                working = self._working(index, stages[index]) if index == busiest else 0
                found[index] = self._memory(stages[index], shares[index], values, working)
        return [memory for memory in found if memory is not None]

    def _working(self, index: int, stage: StagePlan) -> int:
        """What the unit that needs most keeps only while it runs, and copies of gradients that travel meanwhile."""
        most = max(self.units[unit].transient_bytes + self._whole.bytes(index, stage, unit) for unit in stage.units)
        return most + (self._copies(stage) if self.copied else 0)

    def _copies(self, stage: StagePlan) -> int:
        """In bf16: what is sent of a bucket and what comes; where all ranks need the sum, the bucket before it too."""
        units = [self.units[unit] for unit in stage.units]
        values, largest = trained_parameters(units), max(trained_parameters([unit]) for unit in units)
        bucket = largest if self.shards.gradients > 1 else min(self.copied, values)
        before = min(bucket, values - bucket) if self.shards.optimizer == 1 else 0
        return 4 * bucket + 2 * before

    def _memory(self, stage: StagePlan, activations: int, values: Values, working: int) -> StageMemory:
        transfers = transfer_bytes(self.units, stage)
        return StageMemory.of(values, self.dtype, activations, working, transfers, self.shards)

    def _values(self, stages: Sequence[StagePlan]) -> list[Values]:
        """Of each stage, the values that no stage before it in the list holds."""
        found, held = [], Values(0, 0.0)
        for end in range(1, len(stages) + 1):
            units = [self.units[unit] for stage in stages[:end] for unit in stage.units]
            trained, ranks = trained_parameters(units), self.shards.optimizer
            state = shared_state(units, self.state_bytes, ranks, self._bucket_size)
            together = Values(trained, state, self.frozen_bytes * (held_parameters(units) - trained))
            found.append(together - held)
            held = together
        return found


def stage_memory(plan: Plan) -> tuple[StageMemory, ...]:
    """Of each stage of the plan, at the peak of its rank."""
    of_values = plan.state_bytes, plan.frozen_bytes, plan.bucket_size
    ledger = Ledger(plan.units, plan.schedule, plan.dtype, plan.shards, plan.copied, *of_values)
    return tuple(ledger.together(plan.stages))


def rank_memory(plan: Plan) -> tuple[StageMemory, ...]:
    """Of each pipeline rank of the plan: its stages together."""
    stages = stage_memory(plan)
    found = []
    for rank in range(plan.grid.pp):
        first, *others = plan.stages_of(rank)
        total = stages[first]
        for stage in others:
            total += stages[stage]
        found.append(total)
    return tuple(found)


def overflowing_ranks(plan: Plan, device: Device) -> tuple[int, ...]:
    """The pipeline ranks whose predicted peak exceeds the device's memory; none where that has no fixed size."""
    peaks = [sum(plan.predicted_bytes[stage] for stage in plan.stages_of(rank)) for rank in range(plan.grid.pp)]
    return tuple(rank for rank, peak in enumerate(peaks) if plan.predicted_bytes and 0 < device.memory < peak)


Fits = Callable[[int, StagePlan], bool]


def fits(ledger: Ledger, memory: float) -> Fits:
    """Whether a stage keeps within ``memory`` bytes of its rank; of several stages of a rank, each within its part."""

    def within(index: int, stage: StagePlan) -> bool:
        share = len(ledger.stages_of[ledger.schedule.rank_of(index)])
        return ledger.alone(index, stage).total * share <= memory

    return within
