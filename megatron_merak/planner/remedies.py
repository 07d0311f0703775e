"""What a plan that does not fit into its devices lacks, and the flags with which it would."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from megatron_merak.cluster import GIB, Device
from megatron_merak.config.parallel import SHARDINGS
from megatron_merak.plan import Plan, StagePlan, refused_together, time_text
from megatron_merak.plan.replicas import FLAG
from megatron_merak.planner.memory import overflowing_ranks, rank_memory
from megatron_merak.planner.written import is_paired

FULL = MappingProxyType({"recompute_granularity": "full"})
ALONE = MappingProxyType({"optim": "--use-distributed-optimizer"})  # strategies that have a flag of their own
_TIMES = (2, 4, 8)  # ranks of a replica that are tried, of those that it has
Changes = Mapping[str, str | int]  # settings of parallelism, and their new values
Remake = Callable[[Changes], Plan | None]


def misfits(plan: Plan, device: Device, remake: Remake | None = None) -> list[str]:
    """A line for each pipeline rank whose predicted peak exceeds the device's memory, and behind them one for each way
    to need less; empty where the plan fits.

    remake: makes the plan with other settings, None where it is refused with these; without it, as for a stored plan,
    the stages stay as they are and so do the degrees.
    """
    ranks = overflowing_ranks(plan, device)
    if not ranks:
        return []
    full = f"{device.memory / GIB:.0f} GiB of {device.name}"
    lines = [f"pipeline rank {rank} does not fit into the {full}" for rank in ranks]
    again = any(len(stage.recompute) < len(stage.units) for stage in plan.stages)
    fitting = False
    for changes, other in _weaker_first(plan, device, remake or (lambda changes: _changed(plan, changes)), again):
        largest = _largest(other)
        fitting |= largest <= device.memory
        fits = "fits" if largest <= device.memory else "does not fit either"
        lines.append(f"  with {flags(changes)} the largest rank needs {largest / GIB:.1f} GiB: it {fits}")
    if not fitting and remake is not None:
        lines += _degrees(plan, device, remake, again)
    return lines


def flags(changes: Changes) -> str:
    """The settings as a command line has them."""
    return " ".join(
        ALONE.get(str(value), f"{FLAG} {value}")
        if FLAG == (flag := f"--{name.replace('_', '-')}")
        else f"{flag} {value}"
        for name, value in changes.items()
    )


def _weaker_first(plan: Plan, device: Device, remake: Remake, again: bool) -> Iterator[tuple[Changes, Plan]]:
    """Plans that need less memory, with the settings that make them so, those that cost least time first: of the
    sharding strategies those up to the first that fits, as the plan recomputes and with all recomputed.

    again: whether it recomputes less than all.
    """
    yield from _sharded(plan, {}, device, remake)
    if again and (recomputed := remake(FULL)) is not None:
        yield FULL, recomputed
        yield from _sharded(plan, FULL, device, remake)


def _sharded(plan: Plan, more: Changes, device: Device, remake: Remake) -> Iterator[tuple[Changes, Plan]]:
    """Plans under the strategies that shard more than the plan's own, up to the first that fits. more: what they change
    besides."""
    stronger = SHARDINGS[SHARDINGS.index(plan.sharding) + 1 :] if plan.grid.dp > 1 else ()
    for sharding in stronger:
        if refused_together(sharding, plan.grid.dp, plan.overlap, is_paired(plan.schedule)):
            return
        changes = {"data_parallel_sharding_strategy": sharding, **more}
        if (other := remake(changes)) is None:
            return
        yield changes, other
        if _largest(other) <= device.memory:
            return


def _degrees(plan: Plan, device: Device, remake: Remake, again: bool) -> list[str]:
    """A line for the fastest plan that fits with more ranks in each replica, as few more as do, or one that says that
    there is none."""
    strongest = {"data_parallel_sharding_strategy": SHARDINGS[-1]}
    variants: list[Changes] = [{}, {"data_parallel_sharding_strategy": "optim"}]
    variants += [{**one, **FULL} for one in variants] if again else []
    variants += [strongest | (FULL if again else {})]
    for times in _TIMES:
        found = []
        for degrees in _factors(plan, times):
            for more in variants:
                changes = {**degrees, **more}
                other = remake(changes)
                if other is not None and _largest(other) <= device.memory:
                    found.append((changes, other))
                    break
        if found:
            changes, other = min(found, key=lambda pair: pair[1].predicted_time)
            needs, takes = f"{_largest(other) / GIB:.1f} GiB", time_text(other.predicted_time)
            return [f"  with {flags(changes)} the largest rank needs {needs}, and a step takes {takes}: it fits"]
    return [f"  on {plan.grid.size} ranks no larger degrees that were tried fit: use more ranks"]


def _factors(plan: Plan, times: int) -> Iterator[Changes]:
    """Degrees whose product is so many times that of the plan; tensor parallelism stays inside a node."""
    grid = plan.grid
    for more in (factor for factor in (1, 2, 4, 8) if factor <= times):
        tensor, pipeline = grid.tp * more, grid.pp * times // more
        inside = tensor <= max(plan.cluster.ranks_per_node, grid.tp)
        if inside and grid.size % (tensor * pipeline) == 0 and pipeline <= len(plan.units):
            yield {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}


def _changed(plan: Plan, changes: Changes) -> Plan:
    """The plan with another strategy, or with all recomputed, and the stages that it has."""
    stages = plan.stages
    if "recompute_granularity" in changes:
        stages = tuple(StagePlan(stage.first, stage.last, tuple(stage.units)) for stage in stages)
    sharding = str(changes.get("data_parallel_sharding_strategy", plan.sharding))
    return replace(plan, stages=stages, sharding=sharding)


def _largest(plan: Plan) -> int:
    """Bytes of the rank that needs most."""
    return max(memory.total for memory in rank_memory(plan))
