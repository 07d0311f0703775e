"""How long what replicas send one another outlasts the computing that it runs behind: the reduction of gradients the
last backward, the all-gather of sharded parameters the next forward."""

from collections.abc import Callable, Iterable, Iterator

from megatron_merak.cluster import Link, all_gather, all_reduce, reduce_scatter
from megatron_merak.plan import DTYPE_BYTES, Plan, Unit, trained_tied
from megatron_merak.planner.cost import UnitCost
from megatron_merak.planner.instances import Across, link_inside


def exposed_reduction(plan: Plan, mine: list[int], costs: tuple[UnitCost, ...]) -> float:
    """Seconds from the end of a rank's last backward until its gradients are summed over the replicas.

    mine: the rank's units, ascending. With overlap a bucket is sent once the last backward has filled it, one bucket at
    a time; without, all are sent behind it. A unit's gradients come evenly during its backward. What is reduced inside
    an instance is then reduced across instances.
    """
    if plan.grid.dp == 1:
        return 0.0
    reduced, across = _reduction(plan), Across(plan)
    again = {unit for stage in plan.stages for unit in stage.recompute}
    seconds = {unit: costs[unit].backward + (costs[unit].forward if unit in again else 0.0) for unit in mine}
    now = free = -sum(seconds.values()) if plan.overlap_grad_reduce else 0.0
    for unit, share, bucket in _filling(plan, mine):
        now += seconds[unit] * share if plan.overlap_grad_reduce else 0.0
        if bucket:
            free = max(free, now) + reduced(bucket)
            free = across.send(bucket, free, free)
    return max(0.0, free, across.free)


def exposed_gather(plan: Plan, mine: list[int], costs: tuple[UnitCost, ...]) -> float:
    """Seconds that a rank's forward waits for parameters which other replicas have updated.

    mine: the rank's units, ascending. Buckets travel one at a time, those of its first units first. With overlap a unit
    starts when the buckets that hold its values have arrived; without, all have.
    """
    shards = plan.optimizer_shards
    if shards == 1:
        return 0.0
    link, arrived, computed = _link(plan), 0.0, 0.0
    forward = {unit: costs[unit].forward if plan.overlap_param_gather else 0.0 for unit in mine}
    for unit, share, bucket in reversed([*_filling(plan, mine)]):
        if bucket:
            arrived += all_gather(shards, DTYPE_BYTES[plan.dtype] * bucket / shards, link)
        computed = max(computed, arrived) + forward[unit] * share
    return computed - sum(forward.values())


def _filling(plan: Plan, mine: list[int]) -> Iterator[tuple[int, float, float]]:
    """How buckets fill from the last value of a rank to the first: (unit, share of its values that come next, values of
    the bucket that is full then, or 0). Where gradients are sharded a unit is a bucket."""
    filled, unit = 0.0, mine[0]
    for unit, values in reversed(own_values(plan.units, mine)):
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
    """Gradient elements of a bucket -> seconds of its reduction."""
    link, replicas, each = _link(plan), plan.shard_ranks, plan.gradient_bytes
    if plan.sharding != "no_shard":
        return lambda values: reduce_scatter(replicas, each * values / replicas, link)
    return lambda values: all_reduce(replicas, each * values, link)


def _link(plan: Plan) -> Link:
    """What the replicas that share are connected by."""
    return link_inside(plan)


def own_values(units: tuple[Unit, ...], mine: Iterable[int]) -> list[tuple[int, int]]:
    """The trained values of each unit; a tied tensor is one of the first unit's that has it."""
    seen: set[tuple[str, int]] = set()
    found = []
    for unit in mine:
        tied = [pair for pair in trained_tied(units[unit]) if pair not in seen]
        seen.update(tied)
        found.append((unit, units[unit].parameters - units[unit].frozen + sum(values for _, values in tied)))
    return found
