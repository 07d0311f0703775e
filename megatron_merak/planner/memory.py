"""How many bytes one rank of each stage needs at its peak."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from megatron_merak.cluster import Device
from megatron_merak.pipeline_parallel.ops import Schedule
from megatron_merak.plan import DTYPE_BYTES, Plan, StagePlan, Unit, held_parameters
from megatron_merak.planner.saved import Footprint, footprint, moments, of_stage, peak


@dataclass(frozen=True)
class StageMemory:
    """Bytes: ``weights`` in the compute dtype, fp32 ``gradients``, ``optimizer`` (both moments in fp32, and an fp32
    weight beside a 16-bit one), ``activations`` that the micro-batches in flight keep for their backwards when the rank
    keeps most, ``working`` while one unit runs, ``transfers`` from and to neighbouring stages."""

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
        cls, parameters: int, dtype: str, activations: int, working: int, transfers: int, shards: int = 1
    ) -> "StageMemory":
        """``shards``: ranks that share the optimizer's state."""
        optimizer = -(-parameters * (8 if dtype == "float32" else 12) // shards)
        return cls(parameters * DTYPE_BYTES[dtype], parameters * 4, optimizer, activations, working, transfers)

    def __add__(self, other: "StageMemory") -> "StageMemory":
        return StageMemory(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def working_bytes(units: Sequence[Unit], stage: StagePlan) -> int:
    """What the unit that needs most keeps only while it runs."""
    return max(units[unit].transient_bytes for unit in stage.units)


def transfer_bytes(units: Sequence[Unit], stage: StagePlan) -> int:
    """An activation and a gradient on their way over each border of a stage: receives are posted ahead of need, and
    what is sent stays until it has arrived."""
    before = units[stage.first - 1].output_bytes if stage.first else 0
    return 2 * (before + (units[stage.last - 1].output_bytes if stage.last < len(units) else 0))


class Ledger:
    """The memory of the stages of a schedule, for whatever cut and recomputation of a chain of units.

    shards: ranks that share the optimizer's state of a stage.
    """

    def __init__(self, units: Sequence[Unit], schedule: Schedule, dtype: str, shards: int = 1):
        self.units, self.schedule, self.dtype, self.shards = units, schedule, dtype, shards
        self.stages_of = [
            [stage for stage in range(schedule.stages) if schedule.rank_of(stage) == rank]
            for rank in range(len(schedule.ranks))
        ]
        self.moments = [moments(schedule, rank) for rank in range(len(schedule.ranks))]
        self._own = [of_stage(self.moments[schedule.rank_of(stage)], stage) for stage in range(schedule.stages)]

    def alone(self, index: int, stage: StagePlan) -> StageMemory:
        """Of a stage, if its rank held no other."""
        footprints = {index: footprint(self.units, stage)}
        return self._memory(stage, peak(self._own[index], footprints)[index], self._parameters([stage])[0], True)

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
            busiest = max(mine, key=lambda index: working_bytes(self.units, stages[index]))
            counts = self._parameters([stages[index] for index in mine])
            for index, parameters in zip(mine, counts, strict=True):
                found[index] = self._memory(stages[index], shares[index], parameters, index == busiest)
        return [memory for memory in found if memory is not None]

    def _memory(self, stage: StagePlan, activations: int, parameters: int, works: bool) -> StageMemory:
        working = working_bytes(self.units, stage) if works else 0
        transfers = transfer_bytes(self.units, stage)
        return StageMemory.of(parameters, self.dtype, activations, working, transfers, self.shards)

    def _parameters(self, stages: Sequence[StagePlan]) -> list[int]:
        """Of each stage, the values that no stage before it in the list holds."""
        counts, held = [], 0
        for end in range(1, len(stages) + 1):
            together = held_parameters([self.units[unit] for stage in stages[:end] for unit in stage.units])
            counts.append(together - held)
            held = together
        return counts


def stage_memory(plan: Plan) -> tuple[StageMemory, ...]:
    """Of each stage of the plan, at the peak of its rank."""
    return tuple(Ledger(plan.units, plan.schedule, plan.dtype, plan.optimizer_shards).together(plan.stages))


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
