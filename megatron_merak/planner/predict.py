"""How long one step of a plan takes on its cluster."""

from dataclasses import dataclass, replace

from megatron_merak.cluster import all_reduce
from megatron_merak.pipeline_parallel.ops import Kind, ops_of
from megatron_merak.pipeline_parallel.simulate import StageCosts, Timeline, simulate
from megatron_merak.plan import Plan, trained_parameters, trained_tied
from megatron_merak.planner.cost import UnitCost, optimizer_bytes, unit_costs
from megatron_merak.planner.links import link_along
from megatron_merak.planner.memory import stage_memory
from megatron_merak.planner.overlap import Times, times
from megatron_merak.planner.reduction import exposed_gather, exposed_reduction
from megatron_merak.planner.waits import Waits, stage_waits, unit_transfers


@dataclass(frozen=True)
class Ending:
    """Seconds beside the pipeline on the slowest rank: for ``reductions`` of gradients (and gathers of weights), and
    for the ``optimizer``."""

    reductions: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.reductions + self.optimizer


def priced(plan: Plan) -> Plan:
    """The plan with the predictions that follow from the rest of it; the same plan where nothing was edited."""
    pipeline = timeline(plan)
    return replace(
        plan,
        predicted_time=step_time(plan, pipeline),
        predicted_bubble=pipeline.bubble,
        predicted_bytes=tuple(memory.total for memory in stage_memory(plan)),
    )


def stage_costs(plan: Plan) -> StageCosts:
    """The times of one micro-batch on each stage, and of its transfers between neighbours.

    Collectives of tensor parallelism count as far as ``plan.overlap`` leaves them exposed, in recomputation too, and
    those of replicas that share gradients or weights as far as no computing hides them.
    """
    costs = _unit_costs(plan)
    transfer, latency = [], []
    for border, stage in enumerate(plan.stages[:-1]):
        ends = tuple(plan.schedule.rank_of(border + side) for side in (0, 1))
        link = link_along(plan.cluster, plan.grid, "pp", ends)
        transfer.append(plan.units[stage.last - 1].output_bytes / link.bandwidth)
        latency.append(link.latency)
    found = _stage_times(plan, costs)
    again = [times([costs[unit] for unit in stage.recompute], plan.overlap).forward for stage in plan.stages]
    both = list(zip(found, stage_waits(plan, costs), strict=True))
    return StageCosts(
        forward=tuple(one.forward + wait.forward for one, wait in both),
        backward=tuple(one.backward + wait.backward + wait.weight for one, wait in both),
        weight=tuple(min(one.weight, one.backward) + wait.weight for one, wait in both),
        recompute=tuple(seconds + wait.recompute for seconds, (_, wait) in zip(again, both, strict=True)),
        transfer=tuple(transfer),
        latency=tuple(latency),
    )


def _unit_costs(plan: Plan) -> tuple[UnitCost, ...]:
    return unit_costs(plan.units, plan.cluster, plan.dtype, plan.grid)


def _stage_times(plan: Plan, costs: tuple[UnitCost, ...]) -> list[Times]:
    split = {op.stage for entry in plan.schedule.entries() for op in ops_of(entry) if op.kind is Kind.W}
    return [
        times([costs[unit] for unit in stage.units], plan.overlap, index in split)
        for index, stage in enumerate(plan.stages)
    ]


def hidden_share(plan: Plan) -> float:
    """The part of the shorter of a forward and a backward that run together which takes no time, 0 to 1."""
    found = _stage_times(plan, _unit_costs(plan))
    return min((one.hidden / max(min(one.forward, one.backward), one.hidden) if one.hidden else 0.0) for one in found)


def timeline(plan: Plan) -> Timeline:
    """The simulated forwards and backwards of one step."""
    return simulate(plan.schedule, stage_costs(plan), hidden_share(plan))


def step_time(plan: Plan, pipeline: Timeline) -> float:
    """Seconds of the pipeline and of what follows."""
    return pipeline.makespan + ending(plan).total


def ending(plan: Plan) -> Ending:
    """What follows the pipeline on the slowest rank: what is left of the data-parallel reductions of its gradients and
    of the all-gathers of sharded parameters, the sums of tied tensors among the ranks that hold them, the optimizer."""
    units = _unit_costs(plan)
    waits = stage_waits(plan, units)
    moved = optimizer_bytes(plan.dtype, plan.state_bytes)
    update = plan.cluster.device.compute_time(0, moved, plan.dtype) / plan.optimizer_shards
    ties = _tie_times(plan)
    endings = []
    for rank in range(plan.grid.pp):
        mine = [unit for stage in plan.stages_of(rank) for unit in plan.stages[stage].units]
        parameters = trained_parameters([plan.units[unit] for unit in mine])
        reductions = _reductions(plan, rank, mine, units, waits) + ties[rank]
        endings.append(Ending(reductions, parameters * update))
    return max(endings, key=lambda one: one.total)


def _reductions(plan: Plan, rank: int, mine: list[int], units: tuple[UnitCost, ...], waits: list[Waits]) -> float:
    """Seconds that a pipeline rank waits for its replicas behind its last backward, and before its first forward."""
    gathers = 0.0 if plan.shards_parameters else exposed_gather(plan, mine, units)
    if not plan.shards_gradients:
        return exposed_reduction(plan, mine, units) + gathers
    if plan.shards_parameters and plan.schedule.rank_of(0) == rank:
        gathers = unit_transfers(plan)[0][0]  # nothing computes yet; on other ranks, before their first input is there
    return max(waits[stage].end for stage in plan.stages_of(rank)) + gathers


def _tie_times(plan: Plan) -> list[float]:
    """Seconds that each pipeline rank spends on summing the gradients of tensors that other ranks hold as well."""
    holders: dict[tuple[str, int], list[int]] = {}
    for rank in range(plan.grid.pp):
        units = [unit for stage in plan.stages_of(rank) for unit in plan.stage_units(stage)]
        for tensor in dict.fromkeys(pair for unit in units for pair in trained_tied(unit)):
            holders.setdefault(tensor, []).append(rank)
    seconds = [0.0] * plan.grid.pp
    for (_, values), ranks in holders.items():
        link = link_along(plan.cluster, plan.grid, "pp", tuple(ranks))
        for rank in ranks if len(ranks) > 1 else ():
            seconds[rank] += all_reduce(len(ranks), 4 * values / plan.shards.gradients, link)
    return seconds
