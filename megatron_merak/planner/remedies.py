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
FIELD = "data_parallel_sharding_strategy"
_TIMES = (2, 4, 8)  # ranks of a replica, and of the job, that are tried, of those that there are
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
        changes = {FIELD: sharding, **more}
        if (other := remake(changes)) is None:
            return
        yield changes, other
        if _largest(other) <= device.memory:
            return


def _degrees(plan: Plan, device: Device, remake: Remake, again: bool) -> list[str]:
    """A line for the fastest plan that fits with more ranks in each replica, as few more as do; where none does, with
    more ranks in all; or one that says that there is none."""
    for ranks in (plan.grid.size, *(plan.grid.size * more for more in _TIMES)):
        for times in _TIMES if ranks == plan.grid.size else (1, *_TIMES):
            fitting = list(_fitting(plan, device, remake, again, ranks, times))
            if fitting:
                changes, other = min(fitting, key=lambda pair: pair[1].predicted_time)
                needs, takes = f"{_largest(other) / GIB:.1f} GiB", time_text(other.predicted_time)
                return [f"  with {flags(changes)} the largest rank needs {needs}, and a step takes {takes}: it fits"]
    return [f"  up to {ranks} ranks with larger degrees do not suffice either: use a smaller micro-batch or model"]


def _fitting(
    plan: Plan, device: Device, remake: Remake, again: bool, ranks: int, times: int
) -> Iterator[tuple[Changes, Plan]]:
    """For each pair of degrees with so many times the plan's ranks of a replica, the plan that fits and changes least
    besides. ranks: of the job."""
    strategies = [{}, {FIELD: "optim"}, {FIELD: SHARDINGS[-1]}]
    variants: list[Changes] = strategies[:2] + [{**one, **FULL} for one in strategies[:2] if again]
    variants.append({**strategies[2], **(FULL if again else {})})
    more: Changes = {} if ranks == plan.grid.size else {"world_size": ranks}
    for degrees in _factors(plan, times, ranks):
        for variant in variants:
            changes = {**more, **degrees, **variant}
            other = remake(changes)
            if other is not None and _largest(other) <= device.memory:
                yield changes, other
                break


def _factors(plan: Plan, times: int, ranks: int) -> Iterator[Changes]:
    """Degrees whose product is so many times that of the plan; tensor parallelism stays inside a node."""
    grid = plan.grid
    if times == 1:
        yield {}
        return
    for more in (factor for factor in (1, *_TIMES) if factor <= times):
        tensor, pipeline = grid.tp * more, grid.pp * times // more
        inside = more == 1 or tensor <= plan.cluster.ranks_per_node
        if inside and ranks % (tensor * pipeline) == 0 and pipeline <= len(plan.units):
            yield {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}


def _changed(plan: Plan, changes: Changes) -> Plan:
    """The plan with another strategy, or with all recomputed, and the stages that it has."""
    stages = plan.stages
    if "recompute_granularity" in changes:
        stages = tuple(StagePlan(stage.first, stage.last, tuple(stage.units)) for stage in stages)
    sharding = str(changes.get(FIELD, plan.sharding))
    return replace(plan, stages=stages, sharding=sharding)


def _largest(plan: Plan) -> int:
    """Bytes of the rank that needs most."""
    return max(memory.total for memory in rank_memory(plan))
