"""The exposed time of data-parallel communication.

The reduction of gradients overlaps with the last backward, the all-gather of sharded parameters
with the next forward.
"""

from collections.abc import Callable, Iterable, Iterator

from megatron_merak.cluster import Link, all_gather, all_reduce, reduce_scatter
from megatron_merak.plan import DTYPE_BYTES, Plan, trained_tied
from megatron_merak.planner.cost import UnitCost
from megatron_merak.planner.instances import (
    CrossInstanceReduction,
    link_inside,
    share_of_experts,
)


def exposed_reduction(plan: Plan, own: list[int], costs: tuple[UnitCost, ...]) -> float:
    """Return the seconds from the end of a rank's last backward until its gradients are reduced
    over the replicas.

    With overlap a bucket is reduced once the last backward has filled it, one bucket at a time;
    without, all buckets after the backward. A unit's gradients are assumed to come evenly during
    its backward. A bucket is reduced inside an instance first, then across instances.

    own: indices of the rank's units, ascending.
    """
    if plan.grid.copies == 1:
        return 0.0
    reduction_time = _reduction(plan)
    across = CrossInstanceReduction(plan)
    recomputed = {unit for stage in plan.stages for unit in stage.recompute}
    seconds = {
        unit: costs[unit].backward + (costs[unit].forward if unit in recomputed else 0.0)
        for unit in own
    }
    now = free = -sum(seconds.values()) if plan.overlap_grad_reduce else 0.0
    for unit, share, bucket in _fill_buckets(plan, own):
        now += seconds[unit] * share if plan.overlap_grad_reduce else 0.0
        if bucket:
            free = max(free, now) + reduction_time(bucket)
            free = across.send(bucket, free, free)
    return max(0.0, free, across.free)


def exposed_gather(plan: Plan, own: list[int], costs: tuple[UnitCost, ...]) -> float:
    """Return the seconds that a rank's forward waits for the all-gather of updated parameters.

    Buckets are gathered one at a time, those of the first units first. With overlap a unit starts
    when its buckets have arrived; without, when all have.

    own: indices of the rank's units, ascending.
    """
    shards = plan.optimizer_shards
    if shards == 1:
        return 0.0
    link = _link(plan)
    arrived = 0.0
    computed = 0.0
    forward = {unit: costs[unit].forward if plan.overlap_param_gather else 0.0 for unit in own}
    for unit, share, bucket in reversed([*_fill_buckets(plan, own)]):
        if bucket:
            arrived += all_gather(shards, DTYPE_BYTES[plan.dtype] * bucket / shards, link)
        computed = max(computed, arrived) + forward[unit] * share
    return computed - sum(forward.values())


def _fill_buckets(plan: Plan, own: list[int]) -> Iterator[tuple[int, float, float]]:
    """Yield how buckets fill from the last parameter of a rank to the first.

    Each item is (unit, share of its parameters that are added, size of the bucket that is full
    then, or 0). Where gradients are sharded a unit is a bucket.
    """
    filled = 0.0
    unit = own[0]
    for unit, values in reversed(own_values(plan, own)):
        if plan.shards_gradients:
            yield unit, 1.0, float(values)
            continue
        pieces = max(1, values // plan.bucket_size)
        for _ in range(pieces):
            filled += values / pieces
            full, filled = (filled, 0.0) if filled >= plan.bucket_size else (0.0, filled)
            yield unit, 1 / pieces, full
    if filled:
        yield unit, 0.0, filled


def _reduction(plan: Plan) -> Callable[[float], float]:
    """Return a function: gradient elements of a bucket -> seconds of its reduction."""
    link = _link(plan)
    replicas = plan.shard_ranks
    value_bytes = plan.gradient_bytes
    if plan.sharding != "no_shard":
        return lambda values: reduce_scatter(replicas, value_bytes * values / replicas, link)
    return lambda values: all_reduce(replicas, value_bytes * values, link)


def _link(plan: Plan) -> Link:
    """Return the link between the replicas that shards are spread over."""
    return link_inside(plan)


def own_values(plan: Plan, own: Iterable[int]) -> list[tuple[int, int]]:
    """Return (unit, number of trained parameters); a tied tensor counts for the first unit that has
    it, and an expert that copies of a layer divide as much as its reduction takes.
    """
    units = plan.units
    share = share_of_experts(plan)
    seen: set[tuple[str, int]] = set()
    counts = []
    for unit in own:
        tied = [pair for pair in trained_tied(units[unit]) if pair not in seen]
        seen.update(tied)
        less = round((1 - share) * units[unit].experts)
        trained = units[unit].parameters - units[unit].frozen - less
        counts.append((unit, trained + sum(values for _, values in tied)))
    return counts
