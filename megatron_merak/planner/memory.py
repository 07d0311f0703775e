"""How many bytes one rank of each stage needs at its peak."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from megatron_merak.cluster import Device
from megatron_merak.pipeline_parallel.check import peak_in_flight
from megatron_merak.plan import DTYPE_BYTES, Plan


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


def stage_memory(plan: Plan) -> tuple[StageMemory, ...]:
    """Of each stage of the plan, on one rank, with replicated optimizer state.

    A unit's input is kept while its micro-batch is in flight; what it saved besides is too, unless the unit is
    recomputed: then that exists for one unit at a time.
    """
    in_flight = peak_in_flight(plan.schedule)
    value = DTYPE_BYTES[plan.dtype]
    state = 8 if plan.dtype == "float32" else 12
    stages = []
    for index, stage in enumerate(plan.stages):
        parameters = plan.stage_parameters(index)
        stages.append(
            StageMemory(
                weights=parameters * value,
                gradients=parameters * 4,
                optimizer=parameters * state,
                activations=in_flight[index] * _kept_bytes(plan, stage.units, stage.recompute),
                working=max(_working_bytes(plan, unit, stage.recompute) for unit in stage.units),
            )
        )
    return tuple(stages)


def overflowing_stages(plan: Plan, device: Device) -> tuple[int, ...]:
    """The stages whose predicted peak exceeds the device's memory; none where that has no fixed size."""
    return tuple(stage for stage, peak in enumerate(plan.predicted_bytes) if 0 < device.memory < peak)


def _kept_bytes(plan: Plan, units: Sequence[int], recompute: Sequence[int]) -> int:
    """Of one micro-batch between its forward and its backward. The token ids, the first unit's input, weigh nothing."""
    inputs = sum(plan.units[unit - 1].output_bytes for unit in units if unit > 0)
    return inputs + sum(plan.units[unit].saved_bytes for unit in units if unit not in recompute)


def _working_bytes(plan: Plan, unit: int, recompute: Sequence[int]) -> int:
    return plan.units[unit].transient_bytes + (plan.units[unit].saved_bytes if unit in recompute else 0)
