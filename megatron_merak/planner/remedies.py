"""What a plan that does not fit into its devices lacks, and the flags with which it would."""

from collections.abc import Iterator
from dataclasses import replace

from megatron_merak.cluster import GIB, Device
from megatron_merak.plan import Plan, StagePlan
from megatron_merak.planner.memory import overflowing_ranks, rank_memory

SHARD, RECOMPUTE = "--use-distributed-optimizer", "--recompute-granularity full"


def misfits(plan: Plan, device: Device) -> list[str]:
    """A line for each pipeline rank whose predicted peak exceeds the device's memory, and behind them one for each way
    to need less; empty where the plan fits."""
    ranks = overflowing_ranks(plan, device)
    full = f"{device.memory / GIB:.0f} GiB of {device.name}"
    lines = [f"pipeline rank {rank} does not fit into the {full}" for rank in ranks]
    for flags, other in _others(plan) if ranks else ():
        largest = max(memory.total for memory in rank_memory(other))
        fits = "fits" if largest <= device.memory else "does not fit either"
        lines.append(f"  with {flags} the largest rank needs {largest / GIB:.1f} GiB: it {fits}")
    return lines


def _others(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Plans that need less memory, with the flags that make them so, those that cost least time first."""
    sharded = plan if plan.optimizer_shards > 1 or plan.grid.dp == 1 else replace(plan, distributed_optimizer=True)
    stages = tuple(StagePlan(stage.first, stage.last, tuple(stage.units)) for stage in plan.stages)
    if sharded is not plan:
        yield SHARD, sharded
    if any(len(stage.recompute) < len(stage.units) for stage in plan.stages):
        yield RECOMPUTE, replace(plan, stages=stages)
        if sharded is not plan:
            yield f"{SHARD} {RECOMPUTE}", replace(sharded, stages=stages)
