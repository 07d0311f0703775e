"""How many bytes one rank of each stage needs at its peak, and which stages a device can hold."""

from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass

from megatron_merak.cluster import Device
from megatron_merak.pipeline_parallel.check import peak_in_flight
from megatron_merak.pipeline_parallel.ops import Schedule
from megatron_merak.plan import DTYPE_BYTES, Plan, Unit, held_parameters


@dataclass(frozen=True)
class StageMemory:
    """Bytes: ``weights`` in the compute dtype, fp32 ``gradients``, ``optimizer`` (both moments in fp32, and an fp32
    weight beside a 16-bit one), ``activations`` of all micro-batches in flight, ``working`` while one unit runs."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    working: int

    @property
    def total(self) -> int:
        return sum(astuple(self))


def memory_of(
    units: Sequence[Unit], stage: range, recompute: Collection[int], in_flight: int, dtype: str
) -> StageMemory:
    """Of a stage that holds ``stage`` of the chain ``units``, on one rank, with replicated optimizer state.

    A unit's input is kept while its micro-batch is in flight; what it saved besides is too, unless the unit is
    recomputed: then that exists for one unit at a time. The token ids, the first unit's input, weigh nothing.
    """
    parameters = held_parameters(units[stage.start : stage.stop])
    inputs = units[stage.start - 1].output_bytes if stage.start > 0 else 0
    inputs += sum(units[unit].output_bytes - units[unit].passed_bytes for unit in stage[:-1])
    kept = inputs + sum(units[unit].saved_bytes for unit in stage if unit not in recompute)
    return StageMemory(
        weights=parameters * DTYPE_BYTES[dtype],
        gradients=parameters * 4,
        optimizer=parameters * (8 if dtype == "float32" else 12),
        activations=in_flight * kept,
        working=max(
            units[unit].transient_bytes + (units[unit].saved_bytes if unit in recompute else 0) for unit in stage
        ),
    )


def stage_memory(plan: Plan) -> tuple[StageMemory, ...]:
    """Of each stage of the plan."""
    in_flight = peak_in_flight(plan.schedule)
    return tuple(
        memory_of(plan.units, stage.units, stage.recompute, in_flight[index], plan.dtype)
        for index, stage in enumerate(plan.stages)
    )


def overflowing_stages(plan: Plan, device: Device) -> tuple[int, ...]:
    """The stages whose predicted peak exceeds the device's memory; none where that has no fixed size."""
    return tuple(stage for stage, peak in enumerate(plan.predicted_bytes) if 0 < device.memory < peak)


def reaches(
    units: Sequence[Unit], schedule: Schedule, recompute: Collection[int], dtype: str, memory: float
) -> list[list[int]]:
    """``reaches[stage][end]``: the lowest unit at which a stage that ends before unit ``end`` may start and still fit
    into ``memory`` bytes; ``end`` itself where not even one unit fits."""
    found: dict[int, list[int]] = {}
    for in_flight in peak_in_flight(schedule):
        if in_flight not in found:
            found[in_flight] = _lowest_starts(units, recompute, in_flight, dtype, memory)
    return [found[in_flight] for in_flight in peak_in_flight(schedule)]


def _lowest_starts(
    units: Sequence[Unit], recompute: Collection[int], in_flight: int, dtype: str, memory: float
) -> list[int]:
    lowest, start = [0], 0
    for end in range(1, len(units) + 1):
        # A stage only grows with its units, so what did not fit before does not fit with one more.
        while start < end and memory_of(units, range(start, end), recompute, in_flight, dtype).total > memory:
            start += 1
        lowest.append(start)
    return lowest
