"""What a plan that does not fit into its devices lacks, and the flags with which it would."""

from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType

from megatron_merak.cluster import GIB, Device
from megatron_merak.config.parallel import SHARDINGS
from megatron_merak.plan import Plan, StagePlan, refused_together
from megatron_merak.plan.replicas import FLAG
from megatron_merak.planner.memory import overflowing_ranks, rank_memory
from megatron_merak.planner.written import is_paired

RECOMPUTE = "--recompute-granularity full"
ALONE = MappingProxyType({"optim": "--use-distributed-optimizer"})  # strategies that have a flag of their own


def misfits(plan: Plan, device: Device) -> list[str]:
    """A line for each pipeline rank whose predicted peak exceeds the device's memory, and behind them one for each way
    to need less; empty where the plan fits."""
    ranks = overflowing_ranks(plan, device)
    full = f"{device.memory / GIB:.0f} GiB of {device.name}"
    lines = [f"pipeline rank {rank} does not fit into the {full}" for rank in ranks]
    for flags, other in _others(plan, device) if ranks else ():
        largest = _largest(other)
        fits = "fits" if largest <= device.memory else "does not fit either"
        lines.append(f"  with {flags} the largest rank needs {largest / GIB:.1f} GiB: it {fits}")
    return lines


def _others(plan: Plan, device: Device) -> Iterator[tuple[str, Plan]]:
    """Plans that need less memory, with the flags that make them so, those that cost least time first: of the sharding
    strategies those up to the first that fits, as the plan recomputes and with all recomputed."""
    stages = tuple(StagePlan(stage.first, stage.last, tuple(stage.units)) for stage in plan.stages)
    again = any(len(stage.recompute) < len(stage.units) for stage in plan.stages)
    yield from _sharded(plan, "", device)
    if again:
        recomputed = replace(plan, stages=stages)
        yield RECOMPUTE, recomputed
        yield from _sharded(recomputed, f" {RECOMPUTE}", device)


def _sharded(plan: Plan, more: str, device: Device) -> Iterator[tuple[str, Plan]]:
    """A plan under the strategies that shard more than its own, up to the first under which it fits. more: the flags
    that it has besides."""
    stronger = SHARDINGS[SHARDINGS.index(plan.sharding) + 1 :] if plan.grid.dp > 1 else ()
    for sharding in stronger:
        if refused_together(sharding, plan.grid.dp, plan.overlap, is_paired(plan.schedule)):
            return
        other = replace(plan, sharding=sharding)
        yield ALONE.get(sharding, f"{FLAG} {sharding}") + more, other
        if _largest(other) <= device.memory:
            return


def _largest(plan: Plan) -> int:
    """Bytes of the rank that needs most."""
    return max(memory.total for memory in rank_memory(plan))
