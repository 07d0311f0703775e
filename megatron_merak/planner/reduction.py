"""How long the reduction of gradients over the replicas outlasts the backward that it runs behind."""

from megatron_merak.cluster import all_reduce
from megatron_merak.plan import Plan, Unit
from megatron_merak.planner.cost import UnitCost


def exposed_reduction(plan: Plan, mine: list[int], costs: tuple[UnitCost, ...]) -> float:
    """Seconds from the end of a rank's last backward until its fp32 gradients are summed over the replicas.

    mine: the rank's units, ascending. With overlap a bucket is sent once the last backward has filled it, one bucket at
    a time; without, all are sent behind it. A unit's gradients come evenly during its backward.
    """
    grid = plan.grid
    if grid.dp == 1:
        return 0.0
    link = plan.cluster.link([grid.rank(dp=0), grid.rank(dp=grid.dp - 1)])
    again = {unit for stage in plan.stages for unit in stage.recompute}
    seconds = {unit: costs[unit].backward + (costs[unit].forward if unit in again else 0.0) for unit in mine}
    now = -sum(seconds.values()) if plan.overlap_grad_reduce else 0.0
    free, filled = now, 0.0
    for unit, values in reversed(_own_values(plan.units, mine)):
        pieces = max(1, values // plan.bucket_size)
        for _ in range(pieces):
            now += seconds[unit] / pieces if plan.overlap_grad_reduce else 0.0
            filled += values / pieces
            if filled >= plan.bucket_size:
                free, filled = max(free, now) + all_reduce(grid.dp, 4 * filled, link), 0.0
    if filled:
        free = max(free, 0.0) + all_reduce(grid.dp, 4 * filled, link)
    return max(0.0, free)


def _own_values(units: tuple[Unit, ...], mine: list[int]) -> list[tuple[int, int]]:
    """The values of each unit; a tied tensor is one of the first unit's that has it."""
    seen: set[tuple[str, int]] = set()
    found = []
    for unit in mine:
        tied = [pair for pair in units[unit].tied if pair not in seen]
        seen.update(tied)
        found.append((unit, units[unit].parameters + sum(values for _, values in tied)))
    return found
