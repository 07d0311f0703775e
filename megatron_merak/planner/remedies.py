"""Reports a plan that does not fit into its devices, and the flags with which it would fit."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from megatron_merak.cluster import GIB, Device
from megatron_merak.config.parallel import SHARDINGS
from megatron_merak.plan import (
    Plan,
    StagePlan,
    hardware_of,
    limits_of,
    refused_together,
    time_text,
)
from megatron_merak.plan.replicas import FLAG
from megatron_merak.planner.memory import overflowing_ranks, rank_memory
from megatron_merak.planner.written import is_paired

Changes = Mapping[str, str | int]  # settings of parallelism, and their new values
FULL = MappingProxyType({"recompute_granularity": "full"})
CAPACITY = MappingProxyType({**FULL, "recompute_method": "capacity"})
OFFLOADED: Changes = MappingProxyType({"cpu_offloading": True})
ON_HOST: Changes = MappingProxyType({"offload_model_states": True})
# strategies with a flag of their own
ALONE = MappingProxyType({"optim": "--use-distributed-optimizer"})
FIELD = "data_parallel_sharding_strategy"
_TIMES = (2, 4, 8)  # factors tried for the ranks of a replica and of the job
Remake = Callable[[Changes], Plan | None]


def misfits(plan: Plan, limit: float, remake: Remake | None = None) -> list[str]:
    """Return a line for each pipeline rank whose predicted peak exceeds its limit, then one per
    remedy.

    The list is empty where the plan fits.

    limit:  bytes that a rank may use, see ``limit_of``; 0: unknown.
    remake: makes the plan with changed settings; returns None where these are invalid. Without it,
            as for a stored plan, stages and degrees stay unchanged.
    """
    ranks = overflowing_ranks(plan, limit)
    if not ranks:
        return []
    hardware = hardware_of(plan.cluster, plan.grid)
    full = [limit_text(each.smallest, each.limit(limit)) for each in hardware]
    lines = [f"pipeline rank {rank} does not fit into the {full[rank]}" for rank in ranks]
    may_recompute = any(len(stage.recompute) < len(stage.units) for stage in plan.stages)
    fitting = False
    variant = remake or (lambda changes: _changed(plan, changes))
    for changes, other in _cheapest_first(plan, limit, variant, may_recompute):
        largest = _largest(other)
        fitting |= _fits(other, limit)
        fits = "fits" if _fits(other, limit) else "does not fit either"
        lines.append(
            f"  with {flags(changes)} the largest rank needs {largest / GIB:.1f} GiB: it {fits}"
        )
    lines += _offloaded(plan, limit, remake) if remake is not None else []
    if not fitting and remake is not None:
        lines += _on_host(plan, limit, remake, may_recompute)
    if not fitting and remake is not None:
        lines += _degrees(plan, limit, remake, may_recompute)
    return lines


def limit_of(device: Device, memory_gb: float | None) -> float:
    """Return the bytes that a rank may use: what was stated, as far as the device has it, else what
    is usable of it.

    memory_gb: of ``--device-memory-gb``.
    """
    if memory_gb is None:
        return device.usable
    return min(memory_gb * GIB, device.memory or math.inf)


def limit_text(device: Device, limit: float) -> str:
    """Return a limit in words, with what it leaves of the device's memory."""
    text = f"{limit / GIB:.0f} GiB of {device.name}"
    if limit != device.usable or limit == device.memory:
        return text
    return f"{text} that plans use (it has {device.memory / GIB:.0f})"


def flags(changes: Changes) -> str:
    """Return the settings as command-line flags."""
    return " ".join(
        ALONE.get(str(value), f"{FLAG} {value}")
        if FLAG == (flag := f"--{name.replace('_', '-')}")
        else flag
        if value is True
        else f"{flag} {value}"
        for name, value in changes.items()
    )


def _offloaded(plan: Plan, limit: float, remake: Remake) -> list[str]:
    """Return a line for activations in host memory, if the plan fits with these: alone, or as far as
    they cost less than recomputation.
    """
    variants: list[Changes] = [] if plan.offloads else [OFFLOADED, {**OFFLOADED, **CAPACITY}]
    for changes in variants:
        other = remake(changes)
        if other is not None and other.offloads and _fits(other, limit):
            return [_timed(changes, other)]
    return []


def _on_host(plan: Plan, limit: float, remake: Remake, may_recompute: bool) -> list[str]:
    """Return a line for weights, gradients and optimizer state in host memory, if the plan fits with
    these, where it recomputes as little as it does or all.
    """
    variants: list[Changes] = [ON_HOST, {**ON_HOST, **FULL}] if may_recompute else [ON_HOST]
    for changes in variants if not plan.offload_model_states else ():
        other = remake(changes)
        if other is not None and _fits(other, limit):
            return [_timed(changes, other)]
    return []


def _timed(changes: Changes, fitting: Plan) -> str:
    needs = f"{_largest(fitting) / GIB:.1f} GiB"
    return (
        f"  with {flags(changes)} the largest rank needs {needs}, and a step takes "
        f"{time_text(fitting.predicted_time)}: it fits"
    )


def _cheapest_first(
    plan: Plan, limit: float, remake: Remake, may_recompute: bool
) -> Iterator[tuple[Changes, Plan]]:
    """Yield (settings, plan) that need less memory, those that cost least time first.

    These are the sharding strategies up to the first that fits, with the plan's recomputation, then
    with full recomputation.

    may_recompute: whether the plan recomputes less than everything.
    """
    yield from _sharded(plan, {}, limit, remake)
    if may_recompute and (recomputed := remake(FULL)) is not None:
        yield FULL, recomputed
        yield from _sharded(plan, FULL, limit, remake)


def _sharded(
    plan: Plan, more: Changes, limit: float, remake: Remake
) -> Iterator[tuple[Changes, Plan]]:
    """Yield plans with strategies that shard more than the plan's own, up to the first that fits.

    more: other settings to change.
    """
    stronger = SHARDINGS[SHARDINGS.index(plan.sharding) + 1 :] if plan.grid.copies > 1 else ()
    for sharding in stronger:
        if refused_together(sharding, plan.grid.copies, plan.overlap, is_paired(plan.schedule)):
            return
        changes = {FIELD: sharding, **more}
        if (other := remake(changes)) is None:
            return
        yield changes, other
        if _fits(other, limit):
            return


def _degrees(plan: Plan, limit: float, remake: Remake, may_recompute: bool) -> list[str]:
    """Return a line for the fastest plan that fits with as few more ranks per replica as possible.

    Where none fits, the job gets more ranks, too; if that does not suffice, the line says so.
    """
    for ranks in (plan.grid.size, *(plan.grid.size * more for more in _TIMES)):
        for times in _TIMES if ranks == plan.grid.size else (1, *_TIMES):
            fitting = list(_fitting(plan, limit, remake, may_recompute, ranks=ranks, times=times))
            if fitting:
                changes, other = min(fitting, key=lambda pair: pair[1].predicted_time)
                return [_timed(changes, other)]
    return [
        f"  up to {ranks} ranks with larger degrees do not suffice either: use a smaller "
        "micro-batch or model"
    ]


def _fitting(
    plan: Plan, limit: float, remake: Remake, may_recompute: bool, ranks: int, times: int
) -> Iterator[tuple[Changes, Plan]]:
    """Yield, for each pair of degrees, the plan that fits with the fewest other changes.

    ranks: of the job.
    times: by which factor a replica has more ranks than in ``plan``.
    """
    strategies: list[Changes] = [{}, {FIELD: "optim"}, {FIELD: SHARDINGS[-1]}]
    variants: list[Changes] = strategies[:2] + [
        {**strategy, **FULL} for strategy in strategies[:2] if may_recompute
    ]
    variants.append({**strategies[2], **(FULL if may_recompute else {})})
    more: Changes = {} if ranks == plan.grid.size else {"world_size": ranks}
    for degrees in _factors(plan, times, ranks):
        # The last needs least: where that does not suffice, none before it does. Each is planned,
        # which takes half a second of a small captured model.
        least: Changes = {**more, **degrees, **variants[-1]}
        last = remake(least)
        if last is not None and not _fits(last, limit):
            continue
        for variant in variants[:-1]:
            changes: Changes = {**more, **degrees, **variant}
            other = remake(changes)
            if other is not None and _fits(other, limit):
                yield changes, other
                break
        else:
            if last is not None:
                yield least, last


def _factors(plan: Plan, times: int, ranks: int) -> Iterator[Changes]:
    """Yield degrees whose product is ``times`` that of the plan; tensor parallelism stays inside a
    node.
    """
    grid = plan.grid
    if times == 1:
        yield {}
        return
    for more in (factor for factor in (1, *_TIMES) if factor <= times):
        tensor = grid.tp * more
        pipeline = grid.pp * times // more
        inside = more == 1 or tensor <= plan.cluster.ranks_per_node
        if inside and ranks % (tensor * pipeline) == 0 and pipeline <= len(plan.units):
            yield {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}


def _changed(plan: Plan, changes: Changes) -> Plan:
    """Return the plan with another strategy or full recomputation, and unchanged stages."""
    stages = plan.stages
    if "recompute_granularity" in changes:
        stages = tuple(StagePlan(stage.first, stage.last, tuple(stage.units)) for stage in stages)
    sharding = str(changes.get(FIELD, plan.sharding))
    return replace(plan, stages=stages, sharding=sharding)


def _fits(plan: Plan, limit: float) -> bool:
    """Whether every rank needs at most ``limit`` bytes, and at most what plans use of its device
    where nodes differ.
    """
    peaks = [memory.total for memory in rank_memory(plan)]
    limits = limits_of(plan.cluster, plan.grid, limit)
    return all(peak <= most for peak, most in zip(peaks, limits, strict=True))


def _largest(plan: Plan) -> int:
    """Return the memory in bytes of the rank that needs most."""
    return max(memory.total for memory in rank_memory(plan))
