"""What units cost on each pipeline rank, where these compute with unequal devices.

A pipeline rank takes what the slowest of its devices takes, unit by unit.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

from megatron_merak.cluster import Cluster
from megatron_merak.plan import Grid, Plan, Unit, hardware_of
from megatron_merak.planner.cost import UnitCost, unit_costs

Costs = tuple[UnitCost, ...]  # of each unit of a chain


def rank_costs(
    units: Sequence[Unit], cluster: Cluster, dtype: str, grid: Grid, expert_copies: int = 1
) -> tuple[Costs, ...]:
    """Return the times of each unit on each pipeline rank; of ranks that compute with the same, one
    and the same object. Arguments: see ``unit_costs``.
    """
    known: dict[object, Costs] = {}
    costs = []
    for hardware in hardware_of(cluster, grid):
        devices = hardware.devices
        if devices not in known:
            of_device = [
                unit_costs(units, cluster, dtype, grid, expert_copies, device) for device in devices
            ]
            each_unit = zip(*of_device, strict=True)
            known[devices] = tuple(slowest(of_unit) for of_unit in each_unit)
        costs.append(known[devices])
    return tuple(costs)


def plan_costs(plan: Plan) -> Costs:
    """Return the times of each unit of a plan on the pipeline rank that has it."""
    of_ranks = rank_costs(plan.units, plan.cluster, plan.dtype, plan.grid, plan.expert_copies)
    costs: list[UnitCost] = []
    for index, stage in enumerate(plan.stages):
        costs += of_ranks[plan.schedule.rank_of(index)][stage.first : stage.last]
    return tuple(costs)


def slowest(costs: Sequence[UnitCost]) -> UnitCost:
    """Return the times of a unit of which several devices compute copies: the longest of each."""
    return costs[0] if len(costs) == 1 else _of_each(costs, max)


def fastest(costs: Sequence[UnitCost]) -> UnitCost:
    """Return times of a unit than which no stage of such units is faster, on whichever of some
    devices they are.

    What hides a collective is the most of any device; where nothing else hides any, only as much as
    the device with the least that is left of its backward has.
    """
    if len(costs) == 1:
        return costs[0]
    least = vars(_of_each(costs, min))
    most = _of_each(costs, max)
    hiding = most.hiding
    if not (most.regathers or any(most.behind)):
        hiding = least["backward"] - min(each.backward - each.hiding for each in costs)
    hides = {"weight": most.weight, "hiding": hiding, "behind": most.behind}
    return UnitCost(**{**least, **hides})


def _of_each(costs: Sequence[UnitCost], chosen: Callable[[Iterable[float]], float]) -> UnitCost:
    """Return the times that are chosen, field by field."""
    values: dict[str, Any] = {}
    for field in fields(UnitCost):
        own = [getattr(each, field.name) for each in costs]
        pairs = isinstance(own[0], tuple)
        values[field.name] = tuple(map(chosen, zip(*own, strict=True))) if pairs else chosen(own)
    return UnitCost(**values)
