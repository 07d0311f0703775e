"""The peak memory in bytes of one rank of each stage."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from math import ceil

from megatron_merak.pipeline_parallel.ops import Kind, Schedule, ops_of
from megatron_merak.pipeline_parallel.unflushed import held_versions
from megatron_merak.plan import (
    DTYPE_BYTES,
    UNSHARDED,
    Plan,
    Shards,
    StagePlan,
    Unit,
    held_parameters,
    spread_parameters,
    trained_parameters,
)
from megatron_merak.planner.saved import Footprint, footprint, moments, of_stage, peak
from megatron_merak.planner.uneven import shared_state


@dataclass(frozen=True)
class Values:
    """Parameters and optimizer state of all replicas together.

    trained: number of trained parameters.
    state:   bytes of the optimizer's state; where it is sharded, the number of shards times the
             largest one.
    frozen:  bytes of frozen weights, which are never sharded over replicas.
    spread:  how many more values are trained by the ranks that shard, where these have different
             experts; their state is part of ``state`` if it is sharded.
    """

    trained: int
    state: float
    frozen: float = 0.0
    spread: int = 0

    def __sub__(self, other: "Values") -> "Values":
        return Values(
            self.trained - other.trained,
            self.state - other.state,
            self.frozen - other.frozen,
            self.spread - other.spread,
        )


@dataclass(frozen=True)
class StageMemory:
    """Memory of a stage at the peak of its rank, in bytes.

    Of what is sharded over replicas only this rank's shard counts; what is temporarily unsharded is
    in ``working``.

    weights:     in the compute dtype, all versions that the schedule holds of them.
    gradients:   fp32, of trained weights.
    optimizer:   its state, and fp32 weights beside 16-bit ones.
    activations: kept by the micro-batches in flight for their backwards.
    working:     needed only while one unit runs.
    transfers:   buffers of messages from and to neighbouring stages.
    """

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
        cls,
        values: "Values",
        dtype: str,
        activations: int,
        working: int,
        transfers: int,
        shards: Shards = UNSHARDED,
        versions: int = 1,
    ) -> "StageMemory":
        together = values.trained + values.spread
        stored = (together if shards.parameters > 1 else values.trained) * versions
        weights = -(-stored * DTYPE_BYTES[dtype] // shards.parameters) + ceil(values.frozen)
        summed = together if shards.gradients > 1 else values.trained
        gradients = -(-summed * 4 // shards.gradients)
        updated = together if shards.optimizer > 1 else values.trained
        kept = ceil(values.state) + (0 if dtype == "float32" else 4 * updated)
        optimizer = -(-kept // shards.optimizer)
        return cls(weights, gradients, optimizer, activations, working, transfers)

    def __add__(self, other: "StageMemory") -> "StageMemory":
        return StageMemory(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def transfer_bytes(units: Sequence[Unit], stage: StagePlan) -> int:
    """Return the bytes of transfer buffers: an activation and a gradient in flight at each end of a
    stage.

    Receives are pre-posted, and a sent tensor is kept until it has arrived.
    """
    before = units[stage.first - 1].output_bytes if stage.first else 0
    return 2 * (before + (units[stage.last - 1].output_bytes if stage.last < len(units) else 0))


class UnshardedUnits:
    """Unsharded weights and gradients, which exist only while units compute, where they are sharded
    over replicas.
    """

    def __init__(self, units: Sequence[Unit], schedule: Schedule, dtype: str, shards: Shards):
        self.weight = DTYPE_BYTES[dtype] if shards.parameters > 1 else 0
        self.gradient = 4 if shards.gradients > 1 else 0
        ops = (op for entry in schedule.entries() for op in ops_of(entry)) if self.gradient else ()
        self.splits = {op.stage for op in ops if op.kind is Kind.W}
        self.values = [trained_parameters([unit]) for unit in units] if self.gradient else []

    def bytes(self, index: int, stage: StagePlan, unit: int) -> int:
        """Return the peak in bytes while a unit of stage ``index`` runs.

        A forward has the weights of the unit and of the next one. A backward has those of the unit
        and of the one before, and the gradients of the unit and of the next one, which is being
        reduced. Where W ops compute gradients, weights and gradients do not exist at the same time.
        """
        if not self.gradient:
            return 0
        own = self.values[unit]
        before = self.values[unit - 1] if unit > stage.first else 0
        after = self.values[unit + 1] if unit + 1 < stage.last else 0
        weights = self.weight * (own + before)
        gradients = self.gradient * (own + after)
        backward = max(weights, gradients) if index in self.splits else weights + gradients
        return max(self.weight * (own + after), backward)


class Ledger:
    """The memory of the stages of a schedule, for any cut and recomputation of a chain of units.

    shards: over how many ranks each part of a stage's state is sharded.
    copied: number of gradients that are rounded to bf16 and sent at a time; 0 where fp32 is sent.
    state_bytes, frozen_bytes, bucket_size: see ``Plan``; 0: unknown.
    expert_copies: see ``Plan``.
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
        expert_copies: int = 1,
    ):
        self.expert_copies = expert_copies
        self.state_bytes = state_bytes
        self.frozen_bytes = frozen_bytes or DTYPE_BYTES[dtype]
        self._bucket_size = 0 if shards.gradients > 1 else bucket_size
        self.units = units
        self.schedule = schedule
        self.dtype = dtype
        self.shards = shards
        self.copied = copied
        self.stages_of = [
            [stage for stage in range(schedule.stages) if schedule.rank_of(stage) == rank]
            for rank in range(len(schedule.ranks))
        ]
        self._unsharded = UnshardedUnits(units, schedule, dtype, shards)
        self.moments = [moments(schedule, rank) for rank in range(len(schedule.ranks))]
        self._versions = held_versions(schedule)
        self._own = [
            of_stage(self.moments[schedule.rank_of(stage)], stage)
            for stage in range(schedule.stages)
        ]

    @classmethod
    def of(cls, plan: Plan) -> "Ledger":
        """Return the memory of a plan's chain and schedule, whatever its stages."""
        return cls(
            plan.units,
            plan.schedule,
            plan.dtype,
            shards=plan.shards,
            copied=plan.copied,
            state_bytes=plan.state_bytes,
            frozen_bytes=plan.frozen_bytes,
            bucket_size=plan.bucket_size,
            expert_copies=plan.expert_copies,
        )

    def alone(self, index: int, stage: StagePlan) -> StageMemory:
        """Return the memory of a stage as if it were the only one of its rank."""
        footprints = {index: footprint(self.units, stage)}
        activations = peak(self._own[index], footprints)[index]
        values = self._values([stage])[0]
        return self._memory(index, stage, activations, values, self._working(index, stage))

    def in_flight(self, index: int) -> int:
        """Return the most micro-batches of a stage that keep at least what its recomputation
        needs.
        """
        most = 0
        for moment in self._own[index]:
            keeping = (count for (_, state), count in moment if state != "held")
            most = max(most, sum(keeping))
        return most

    def alike(self, index: int) -> object:
        """Return a key that is equal for stages which need the same memory for the same units."""
        return tuple(
            tuple((state, count) for (_, state), count in moment) for moment in self._own[index]
        )

    def together(self, stages: Sequence[StagePlan]) -> list[StageMemory]:
        """Return the memory of every stage at the peak of its rank.

        What stages of a rank need one at a time (``working``) or have in common (tied tensors)
        counts for one of them.
        """
        memories: list[StageMemory | None] = [None] * len(stages)
        for rank, own in enumerate(self.stages_of):
            footprints: dict[int, Footprint] = {
                index: footprint(self.units, stages[index]) for index in own
            }
            shares = peak(self.moments[rank], footprints)
            busiest = max(own, key=lambda index: self._working(index, stages[index]))
            for index, values in zip(
                own, self._values([stages[index] for index in own]), strict=True
            ):
                working = self._working(index, stages[index]) if index == busiest else 0
                memories[index] = self._memory(index, stages[index], shares[index], values, working)
        return [memory for memory in memories if memory is not None]

    def _working(self, index: int, stage: StagePlan) -> int:
        """Return what the most demanding unit needs only while it runs, with the copies of
        gradients in flight.
        """
        most = max(
            self.units[unit].transient_bytes + self._unsharded.bytes(index, stage, unit)
            for unit in stage.units
        )
        return most + (self._copies(stage) if self.copied else 0)

    def _copies(self, stage: StagePlan) -> int:
        """Return the bytes of bf16 copies: sent, received, and of the bucket before where gradients
        are unsharded.
        """
        units = [self.units[unit] for unit in stage.units]
        values = trained_parameters(units)
        largest = max(trained_parameters([unit]) for unit in units)
        bucket = largest if self.shards.gradients > 1 else min(self.copied, values)
        before = min(bucket, values - bucket) if self.shards.optimizer == 1 else 0
        return 4 * bucket + 2 * before

    def _memory(
        self, index: int, stage: StagePlan, activations: int, values: Values, working: int
    ) -> StageMemory:
        return StageMemory.of(
            values,
            self.dtype,
            activations,
            working,
            transfers=transfer_bytes(self.units, stage),
            shards=self.shards,
            versions=self._versions[index],
        )

    def _values(self, stages: Sequence[StagePlan]) -> list[Values]:
        """Return, per stage, the values that no earlier stage of the list has."""
        added = []
        earlier = Values(0, 0.0)
        for end in range(1, len(stages) + 1):
            units = [self.units[unit] for stage in stages[:end] for unit in stage.units]
            trained = trained_parameters(units)
            ranks = self.shards.optimizer
            state = shared_state(units, self.state_bytes, ranks, self._bucket_size)
            spread = spread_parameters(units, self.expert_copies) - trained
            if ranks > 1:
                state += self.state_bytes * spread
            together = Values(
                trained,
                state,
                self.frozen_bytes * (held_parameters(units) - trained),
                spread,
            )
            added.append(together - earlier)
            earlier = together
        return added


def stage_memory(plan: Plan) -> tuple[StageMemory, ...]:
    """Return the memory of each stage of the plan, at the peak of its rank."""
    return tuple(Ledger.of(plan).together(plan.stages))


def rank_memory(plan: Plan) -> tuple[StageMemory, ...]:
    """Return the memory of each pipeline rank of the plan: the sum over its stages."""
    stages = stage_memory(plan)
    totals = []
    for rank in range(plan.grid.pp):
        first, *others = plan.stages_of(rank)
        total = stages[first]
        for stage in others:
            total += stages[stage]
        totals.append(total)
    return tuple(totals)


def overflowing_ranks(plan: Plan, limit: float) -> tuple[int, ...]:
    """Return the pipeline ranks whose predicted peak exceeds ``limit`` bytes; none if that is 0,
    unknown.
    """
    peaks = [
        sum(plan.predicted_bytes[stage] for stage in plan.stages_of(rank))
        for rank in range(plan.grid.pp)
    ]
    return tuple(
        rank for rank, peak in enumerate(peaks) if plan.predicted_bytes and 0 < limit < peak
    )


Fits = Callable[[int, StagePlan], bool]


def fits(ledger: Ledger, memory: float) -> Fits:
    """Whether a stage keeps within ``memory`` bytes of its rank; of several stages of a rank, each
    within its part.
    """

    def within(index: int, stage: StagePlan) -> bool:
        share = len(ledger.stages_of[ledger.schedule.rank_of(index)])
        return ledger.alone(index, stage).total * share <= memory

    return within
