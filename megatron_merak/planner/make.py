"""From a chain of units, or a configuration of the native model, to a Plan."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from megatron_merak.cluster import Cluster, find_cluster
from megatron_merak.config import Config
from megatron_merak.errors import PlanError
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.check import peak_in_flight
from megatron_merak.pipeline_parallel.ops import Schedule
from megatron_merak.plan import DTYPE_BYTES, Grid, Plan, StagePlan, TensorSharding, Unit, bytes_text
from megatron_merak.planner.cost import gpt_units, optimizer_bytes, unit_costs
from megatron_merak.planner.memory import memory_of, reaches, stage_memory
from megatron_merak.planner.partition import partition
from megatron_merak.planner.predict import step_time, timeline
from megatron_merak.planner.tables import by_family

GIB = 2**30


def plan(config: Config, world_size: int, device: str = "cpu", shardings: tuple[TensorSharding, ...] = ()) -> Plan:
    """The plan of a native model with the degrees and schedule of ``config``, its layers cut into stages by cost.

    ``device`` is a name that ``cluster.find_device`` knows. Raises ConfigError for degrees and sizes that do not fit
    ``world_size``, PlanError for more stages than units, an unknown device or too little memory.
    """
    config.validate(world_size, training=False)
    model, parallel, train = config.model, config.parallel, config.train
    grid = Grid(
        tp=parallel.tensor_model_parallel_size,
        dp=config.data_parallel_size(world_size),
        pp=parallel.pipeline_model_parallel_size,
    )
    fused_dropout = find_cluster(device).device.name != "cpu"
    return plan_chain(
        gpt_units(model, train.micro_batch_size, DTYPE_BYTES[train.dtype], grid.tp, fused_dropout),
        grid,
        microbatches=config.num_microbatches(world_size),
        micro_batch_size=train.micro_batch_size,
        sequence_length=model.seq_length,
        dtype=train.dtype,
        device=device,
        schedule=parallel.pipeline_schedule,
        recompute=parallel.recompute_granularity == "full",
        overlap=not parallel.no_overlap_grad_reduce,
        memory_gb=parallel.device_memory_gb,
        shardings=shardings,
    )


def plan_chain(
    units: Sequence[Unit],
    grid: Grid,
    *,
    microbatches: int,
    micro_batch_size: int,
    sequence_length: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    schedule: str = "1f1b",
    recompute: bool = False,
    overlap: bool = True,
    memory_gb: float | None = None,
    shardings: tuple[TensorSharding, ...] = (),
    reasons: Iterable[tuple[str, str]] = (),
) -> Plan:
    """The plan that runs a chain on a grid: stages balanced by cost, each within the memory of a rank.

    ``microbatches`` per step and replica; ``overlap``: gradients are reduced during the backward. ``memory_gb`` is the
    memory of a rank in GiB; without it the device's own is respected where some cut does. ``reasons``: of each tensor,
    why it is divided as it is. Raises PlanError for more
    stages than units, an unknown device or schedule, or where ``memory_gb`` does not suffice.
    """
    cluster, units = find_cluster(device), tuple(units)
    if schedule not in BUILDERS:
        raise PlanError("schedule", schedule, "there is no such one", f"Use one of {', '.join(BUILDERS)}")
    built = build_schedule(schedule, grid.pp, microbatches)
    again = recomputed_units(units) if recompute else ()
    bounds = _Chain(units, built, again, dtype, cluster, grid).cut(memory_gb)
    stages = tuple(
        StagePlan(first, last, tuple(unit for unit in again if first <= unit < last))
        for first, last in zip(bounds, bounds[1:], strict=False)
    )
    made = Plan(
        grid, units, stages, built, micro_batch_size, sequence_length, dtype, shardings, reasons=by_family(reasons)
    )
    pipeline = timeline(made, cluster)
    return replace(
        made,
        device=cluster.device.name,
        predicted_time=step_time(made, cluster, pipeline, overlap),
        predicted_bubble=pipeline.bubble,
        predicted_bytes=tuple(memory.total for memory in stage_memory(made)),
    )


def recomputed_units(units: Sequence[Unit]) -> tuple[int, ...]:
    """Full recomputation: every unit that keeps more than an activation (an embedding has a dropout mask at most), but
    not the last, whose output product is the costliest of the model while its backward follows its forward at once."""
    return tuple(index for index, unit in enumerate(units[:-1]) if unit.saved_bytes > unit.output_bytes)


class _Chain:
    """A chain of units to be cut into the stages of a schedule."""

    def __init__(
        self,
        units: tuple[Unit, ...],
        schedule: Schedule,
        recompute: Collection[int],
        dtype: str,
        cluster: Cluster,
        grid: Grid,
    ):
        self.units, self.schedule, self.recompute, self.dtype = units, schedule, recompute, dtype
        self.device = cluster.device
        costs = unit_costs(units, cluster, dtype, grid)
        update = self.device.compute_time(0, optimizer_bytes(dtype), dtype)
        users: dict[tuple[str, int], list[int]] = {}
        for index, unit in enumerate(units):
            for tensor in unit.tied:
                users.setdefault(tensor, []).append(index)
        # A stage updates its copy of a tied tensor once, whichever number of its units use it.
        self.shared = [(values * update, found) for (_, values), found in users.items()]
        self.costs = [
            cost.per_step(schedule.microbatches, index in recompute) - sum(values for _, values in unit.tied) * update
            for index, (unit, cost) in enumerate(zip(units, costs, strict=True))
        ]

    def cut(self, memory_gb: float | None) -> tuple[int, ...]:
        """The bounds of the stages. Raises PlanError."""
        stages = self.schedule.stages
        memory = self.device.memory if memory_gb is None else memory_gb * GIB
        if memory and stages <= len(self.units):
            reach = reaches(self.units, self.schedule, self.recompute, self.dtype, memory)
            try:
                return partition(self.costs, stages, reach, self.shared)
            except PlanError:
                if memory_gb is not None:
                    raise self._too_little(memory_gb) from None
        return partition(self.costs, stages, None, self.shared)

    def _too_little(self, memory_gb: float) -> PlanError:
        """The error that names the stage which needs most when memory is not looked at."""
        bounds, in_flight = self.cut(0), peak_in_flight(self.schedule)
        needs = [
            memory_of(self.units, range(first, last), self.recompute, in_flight[stage], self.dtype).total
            for stage, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False))
        ]
        stage = needs.index(max(needs))
        first, last = self.units[bounds[stage]].name, self.units[bounds[stage + 1] - 1].name
        reason = f"no cut into {len(needs)} stages fits; cut by cost, stage {stage} ({first} .. {last}) needs "
        reason += bytes_text(needs[stage])
        remedy = "Use more tensor- or pipeline-parallel ranks, a smaller micro-batch or full recomputation"
        return PlanError("--device-memory-gb", memory_gb, reason, remedy)
