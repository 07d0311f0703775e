"""From a configuration and a world size to a Plan."""

from dataclasses import replace

from megatron_merak.cluster import find_cluster
from megatron_merak.config import Config
from megatron_merak.pipeline_parallel.builders import BUILDERS
from megatron_merak.plan import DTYPE_BYTES, Grid, Plan, StagePlan, TensorSharding, Unit
from megatron_merak.planner.cost import gpt_units, unit_costs
from megatron_merak.planner.memory import stage_memory
from megatron_merak.planner.partition import partition
from megatron_merak.planner.predict import step_time, timeline


def plan(config: Config, world_size: int, device: str = "cpu", shardings: tuple[TensorSharding, ...] = ()) -> Plan:
    """The plan of a native model with the degrees and schedule of ``config``, its layers cut into stages by cost.

    ``device`` is a name that ``cluster.find_device`` knows. Raises ConfigError for degrees and sizes that do not fit
    ``world_size``, PlanError for more stages than units or an unknown device.
    """
    config.validate(world_size, training=False)
    cluster = find_cluster(device)
    model, parallel, train = config.model, config.parallel, config.train
    grid = Grid(
        tp=parallel.tensor_model_parallel_size,
        dp=config.data_parallel_size(world_size),
        pp=parallel.pipeline_model_parallel_size,
    )
    fused_dropout = cluster.device.name != "cpu"
    units = gpt_units(model, train.micro_batch_size, DTYPE_BYTES[train.dtype], grid.tp, fused_dropout)
    recompute = recomputed_units(units) if parallel.recompute_granularity == "full" else ()
    microbatches = config.num_microbatches(world_size)
    costs = unit_costs(units, cluster, train.dtype, grid)
    bounds = partition(
        [cost.per_step(microbatches, index in recompute) for index, cost in enumerate(costs)],
        grid.pp,
        [0.0] * (grid.pp - 1) + [sum(cost.shared_step for cost in costs) if grid.pp > 1 else 0.0],
    )
    stages = tuple(
        StagePlan(first, last, tuple(unit for unit in recompute if first <= unit < last))
        for first, last in zip(bounds, bounds[1:], strict=False)
    )
    schedule = BUILDERS[parallel.pipeline_schedule](grid.pp, microbatches)
    made = Plan(grid, units, stages, schedule, train.micro_batch_size, model.seq_length, train.dtype, shardings)
    pipeline = timeline(made, cluster)
    return replace(
        made,
        device=cluster.device.name,
        predicted_time=step_time(made, cluster, pipeline, not parallel.no_overlap_grad_reduce),
        predicted_bubble=pipeline.bubble,
        predicted_bytes=tuple(memory.total for memory in stage_memory(made)),
    )


def recomputed_units(units: tuple[Unit, ...]) -> tuple[int, ...]:
    """Full recomputation: every layer. Not the embedding, which keeps no more than a dropout mask, and not the head,
    whose output product is the costliest of the model while its backward follows its forward at once."""
    return tuple(index for index, unit in enumerate(units) if unit.kind == "layer")
