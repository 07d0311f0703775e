"""The peak memory in bytes of one rank of each stage."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass, replace
from math import ceil

from megatron_merak.pipeline_parallel.ops import Schedule
from megatron_merak.pipeline_parallel.unflushed import held_versions
from megatron_merak.plan import (
    DTYPE_BYTES,
    UNSHARDED,
    Plan,
    Shards,
    StagePlan,
    Unit,
    exceeding,
    held_parameters,
    limits_of,
    packed_weights,
    spread_parameters,
    trained_parameters,
)
from megatron_merak.planner.saved import (
    Footprint,
    InFlight,
    footprint,
    most_kept,
    peak,
    tape_bytes,
)
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

    Of what is sharded over replicas only this rank's shard counts, and nothing where that is in host
    memory; what is temporarily unsharded is in ``working``.

    weights:     in the compute dtype, all versions that the schedule holds of them.
    gradients:   fp32, of trained weights.
    optimizer:   its state, and fp32 weights beside 16-bit ones.
    activations: kept on the device by the micro-batches in flight for their backwards.
    working:     needed only while one unit runs, and what is being copied to the host.
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
        stored = self.weights + self.gradients + self.optimizer
        return stored + self.activations + self.working + self.transfers

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
        if shards.on_host:
            weights = gradients = optimizer = 0
        return cls(weights, gradients, optimizer, activations, working, transfers)

    def __add__(self, other: "StageMemory") -> "StageMemory":
        return StageMemory(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Messages:
    """Bytes of one message at each end of a stage; 0 where its neighbour is on the same rank.

    At each end one is received ahead of the op that reads it. What was sent is kept until a message
    comes back that shows that it has arrived: an activation while its micro-batch is in flight, and
    two gradients. Later gradients take the place of tapes, or count with what waits for a W.
    """

    before: int
    after: int

    @property
    def steady(self) -> int:
        """Bytes that are there at any time."""
        return 3 * self.before + self.after

    def added(self, own: Footprint) -> Footprint:
        """Return a footprint with the messages that its micro-batch has sent."""
        states = ("kept", "taped", "backward", "backward_held", "late", "late_held")
        more = {state: getattr(own, state) + self.after for state in states}
        return replace(own, **more, held=own.held + self.before)


class UnshardedUnits:
    """Unsharded weights and gradients, which exist only while units compute, where they are sharded
    over replicas, or in host memory.

    splits: stages whose weight gradients are separate ops (W).
    frozen: bytes of a frozen weight on the device.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        schedule: Schedule,
        dtype: str,
        shards: Shards,
        splits: Collection[int],
        frozen: float,
    ):
        weight = DTYPE_BYTES[dtype] if shards.brings_parameters else 0
        self.gradient = 4 if shards.brings_gradients else 0
        self._shards = shards
        self.splits = splits
        self.values = [trained_parameters([unit]) for unit in units] if self.gradient else []
        self.weights = [weight * values for values in self.values]
        if shards.on_host:
            self.weights = [
                own + ceil(frozen * (held_parameters([unit]) - values))
                for own, values, unit in zip(self.weights, self.values, units, strict=True)
            ]
        # gradients of earlier micro-batches come back from the host
        self._sums = shards.on_host and shards.gradients == 1 and schedule.microbatches > 1

    def bytes(self, index: int, stage: StagePlan, unit: int) -> int:
        """Return the peak in bytes while a unit of stage ``index`` runs.

        A forward has the weights of the unit and of the next one. A backward has those of the unit
        and of the one before, and the gradients of the unit and of the next one, which is being
        reduced. Where W ops compute gradients, weights and gradients do not exist at the same time.
        From the host the sum of the one before may be coming back, too; of several ranks a shard is
        reduced, and added to what comes back, while another one is on its way there.
        """
        if not self.gradient:
            return 0
        before = unit - 1 if unit > stage.first else None
        after = unit + 1 if unit + 1 < stage.last else None
        own = self.values[unit]
        reduced = 0 if after is None else self.values[after]
        gradients = self.gradient * (own + reduced)
        if self._sums and before is not None:
            gradients += self.gradient * self.values[before]
        if self._shards.on_host and self._shards.gradients > 1:
            largest = max(own, reduced)
            gradients += 3 * self.gradient * -(-largest // self._shards.gradients)
        weights = self.weights[unit] + (0 if before is None else self.weights[before])
        backward = max(weights, gradients) if index in self.splits else weights + gradients
        forward = self.weights[unit] + (0 if after is None else self.weights[after])
        return max(forward, backward)


@dataclass(frozen=True)
class StageNeeds:
    """What a stage needs whatever is in flight, see ``Ledger.alone``.

    footprint: of a micro-batch.
    values:    of its units.
    working:   bytes, see ``StageMemory``.
    """

    footprint: Footprint
    values: Values
    working: int


class Ledger:
    """The memory of the stages of a schedule, for any cut and recomputation of a chain of units.

    shards: over how many ranks each part of a stage's state is sharded.
    copied: number of gradients that are rounded to bf16 and sent at a time; 0 where fp32 is sent.
    state_bytes, frozen_bytes, bucket_size: see ``Plan``; 0: unknown.
    expert_copies: see ``Plan``.
    in_flight: in the schedule; None: it is found.
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
        in_flight: InFlight | None = None,
    ):
        self.expert_copies = expert_copies
        self.state_bytes = state_bytes
        self.frozen_bytes = frozen_bytes or DTYPE_BYTES[dtype]
        self._bucket_size = 0 if shards.brings_gradients else bucket_size
        self.units = units
        self.schedule = schedule
        self.dtype = dtype
        self.shards = shards
        self.copied = copied
        self.stages_of = [
            [stage for stage in range(schedule.stages) if schedule.rank_of(stage) == rank]
            for rank in range(len(schedule.ranks))
        ]
        found = InFlight(schedule) if in_flight is None else in_flight
        self._splits = found.splits
        # in the model's own dtype and in the one that computes, of which the latter is copied
        on_device = max(DTYPE_BYTES[dtype], min(self.frozen_bytes, 4.0))
        self._unsharded = UnshardedUnits(
            units, schedule, dtype, shards, self._splits, frozen=on_device
        )
        self.moments = found.moments
        self._versions = held_versions(schedule)
        self._own = found.of_stages

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

    def needs(self, index: int, stage: StagePlan) -> StageNeeds:
        """Return what a stage needs by itself, the same wherever its weight gradients are separate ops,
        and wherever they are not.
        """
        return StageNeeds(
            footprint(self.units, stage), self._values([stage])[0], self._working(index, stage)
        )

    def splits(self, index: int) -> bool:
        """Whether the weight gradients of a stage are separate ops."""
        return index in self._splits

    def alone(self, index: int, stage: StagePlan, needs: StageNeeds | None = None) -> StageMemory:
        """Return the memory of a stage as if it were the only one of its rank.

        needs: of such a stage; None: they are found.
        """
        own = self.needs(index, stage) if needs is None else needs
        moments = self._own[index]
        activations = most_kept(moments, own.footprint)
        ends = self._ends(index, stage)
        both = most_kept(moments, ends.added(own.footprint))
        return self._memory(
            index,
            activations,
            own.values,
            working=own.working,
            transfers=ends.steady + both - activations,
        )

    def _apart(self, index: int) -> tuple[bool, bool]:
        """Whether the stage before, and the one after, is there and on another rank."""
        own = self.schedule.rank_of(index)
        before = index > 0 and self.schedule.rank_of(index - 1) != own
        last = index + 1 == self.schedule.stages
        return before, not last and self.schedule.rank_of(index + 1) != own

    def _ends(self, index: int, stage: StagePlan) -> Messages:
        before, after = self._apart(index)
        return Messages(
            self.units[stage.first - 1].output_bytes if before else 0,
            self.units[stage.last - 1].output_bytes if after else 0,
        )

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
        """Return a key that is equal for stages which need the same memory for the same units, of which
        as much enters.
        """
        in_flight = []
        for moment in self._own[index]:
            in_flight.append(tuple((state, count) for (_, state), count in moment))
        return self._versions[index], self._apart(index), tuple(in_flight)

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
            ends = {index: self._ends(index, stages[index]) for index in own}
            more = {index: ends[index].added(footprints[index]) for index in own}
            sent = sum(peak(self.moments[rank], more).values()) - sum(shares.values())
            busiest = max(own, key=lambda index: self._working(index, stages[index]))
            for index, values in zip(
                own, self._values([stages[index] for index in own]), strict=True
            ):
                working = self._working(index, stages[index]) if index == busiest else 0
                memories[index] = self._memory(
                    index,
                    shares[index],
                    values,
                    working=working,
                    transfers=ends[index].steady + (sent if index == busiest else 0),
                )
        return [memory for memory in memories if memory is not None]

    def _working(self, index: int, stage: StagePlan) -> int:
        """Return what the most demanding unit needs only while it runs, with the copies of
        gradients in flight and the tape that is being copied to the host.
        """
        most = max(
            self.units[unit].working(index in self._splits)
            + self._unsharded.bytes(index, stage, unit)
            for unit in stage.units
        )
        leaving = max(self._tapes(stage), default=0)
        return most + leaving + (self._copies(stage) if self.copied else 0)

    def _tapes(self, stage: StagePlan) -> list[int]:
        """Return the bytes of each tape that a stage offloads."""
        return [tape_bytes(self.units, stage, unit) for unit in stage.offload]

    def on_host(self, stages: Sequence[StagePlan]) -> list[int]:
        """Return the bytes of host memory of every stage: of tapes the most that the micro-batches in
        flight need, and of model states that are there.
        """
        needs = [
            self.in_flight(index) * sum(self._tapes(stage)) for index, stage in enumerate(stages)
        ]
        if self.shards.on_host:
            stored = replace(self.shards, on_host=False)
            for own in self.stages_of:
                values = self._values([stages[index] for index in own])
                for index, each in zip(own, values, strict=True):
                    states = StageMemory.of(each, self.dtype, 0, 0, transfers=0, shards=stored)
                    needs[index] += states.total
        return needs

    def _copies(self, stage: StagePlan) -> int:
        """Return the bytes of bf16 copies: sent, received, and of the bucket before where gradients
        are unsharded.
        """
        units = [self.units[unit] for unit in stage.units]
        values = trained_parameters(units)
        largest = max(trained_parameters([unit]) for unit in units)
        bucket = largest if self.shards.brings_gradients else min(self.copied, values)
        before = min(bucket, values - bucket) if self.shards.optimizer == 1 else 0
        return 4 * bucket + 2 * before

    def _memory(
        self,
        index: int,
        activations: int,
        values: Values,
        working: int,
        transfers: int,
    ) -> StageMemory:
        return StageMemory.of(
            values,
            self.dtype,
            activations,
            working,
            transfers=transfers,
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
            packed, packed_bytes = packed_weights(units)
            together = Values(
                trained,
                state,
                self.frozen_bytes * (held_parameters(units) - trained - packed) + packed_bytes,
                spread,
            )
            added.append(together - earlier)
            earlier = together
        return added


def stage_memory(plan: Plan, ledger: Ledger | None = None) -> tuple[StageMemory, ...]:
    """Return the memory of each stage of the plan, at the peak of its rank.

    ledger: of its chain and schedule; None: it is made.
    """
    return tuple((ledger or Ledger.of(plan)).together(plan.stages))


def stage_host_bytes(plan: Plan, ledger: Ledger | None = None) -> tuple[int, ...]:
    """Return the bytes of host memory of each stage of the plan; empty if nothing is there.

    ledger: see ``stage_memory``.
    """
    if not (plan.offloads or plan.offload_model_states):
        return ()
    return tuple((ledger or Ledger.of(plan)).on_host(plan.stages))


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
    """Return the pipeline ranks whose predicted peak exceeds ``limit`` bytes, or what plans use of
    their own devices where nodes differ; none if that is 0, unknown.
    """
    if not plan.predicted_bytes:
        return ()
    return exceeding(predicted_peaks(plan), limits_of(plan.cluster, plan.grid, limit))


def predicted_peaks(plan: Plan) -> list[int]:
    """Return the predicted peak of each pipeline rank of a priced plan, in bytes."""
    return plan.by_rank(plan.predicted_bytes)


Fits = Callable[[int, StagePlan], bool]


def fits(ledger: Ledger, memory: float) -> Fits:
    """Whether a stage keeps within ``memory`` bytes of its rank; of several stages of a rank, each
    within its part.
    """

    def within(index: int, stage: StagePlan) -> bool:
        share = len(ledger.stages_of[ledger.schedule.rank_of(index)])
        return ledger.alone(index, stage).total * share <= memory

    return within
