"""How long one step of a plan takes on a cluster."""

from megatron_merak.cluster import Cluster, all_reduce
from megatron_merak.pipeline_parallel.simulate import StageCosts, Timeline, simulate
from megatron_merak.plan import Plan
from megatron_merak.planner.cost import UnitCost, unit_costs


def stage_costs(plan: Plan, cluster: Cluster) -> StageCosts:
    """The times of one micro-batch on each stage, and of its transfers between neighbours."""
    units = unit_costs(plan.units, cluster, plan.dtype, plan.grid)
    transfer, latency = [], []
    for border, stage in enumerate(plan.stages[:-1]):
        ends = [plan.grid.rank(pp=plan.schedule.rank_of(border + side)) for side in (0, 1)]
        link = cluster.link(ends)
        transfer.append(plan.units[stage.last - 1].output_bytes / link.bandwidth)
        latency.append(link.latency)
    return StageCosts(
        forward=tuple(sum(units[unit].forward for unit in stage.units) for stage in plan.stages),
        backward=tuple(sum(units[unit].backward for unit in stage.units) for stage in plan.stages),
        weight=(0.0,) * len(plan.stages),
        recompute=tuple(sum(units[unit].forward for unit in stage.recompute) for stage in plan.stages),
        transfer=tuple(transfer),
        latency=tuple(latency),
    )


def timeline(plan: Plan, cluster: Cluster) -> Timeline:
    """The simulated forwards and backwards of one step."""
    return simulate(plan.schedule, stage_costs(plan, cluster))


def step_time(plan: Plan, cluster: Cluster, pipeline: Timeline, overlap_grad_reduce: bool) -> float:
    """Seconds of the pipeline, then of what follows on the slowest stage: the data-parallel all-reduce of the fp32
    gradients (behind the last backward of the stage as far as it reaches, with overlap), the all-reduce of a tied
    weight between first and last stage, and the optimizer."""
    units = unit_costs(plan.units, cluster, plan.dtype, plan.grid)
    grid = plan.grid
    replicas = cluster.link([grid.rank(dp=0), grid.rank(dp=grid.dp - 1)])
    last = len(plan.stages) - 1
    tied = sum(unit.shared_parameters for unit in plan.units)
    ends = cluster.link([grid.rank(pp=plan.schedule.rank_of(0)), grid.rank(pp=plan.schedule.rank_of(last))])
    tails = []
    for index, stage in enumerate(plan.stages):
        reduce = all_reduce(grid.dp, 4 * plan.stage_parameters(index), replicas)
        if overlap_grad_reduce:
            reduce = max(0.0, reduce - sum(units[unit].backward for unit in stage.units))
        if index in (0, last) and last > 0 and tied:
            reduce += all_reduce(2, 4 * tied, ends)
        tails.append(reduce + _optimizer_time(plan, index, units))
    return pipeline.makespan + max(tails)


def _optimizer_time(plan: Plan, stage: int, units: tuple[UnitCost, ...]) -> float:
    costs = [units[unit] for unit in plan.stages[stage].units]
    return sum(cost.step + (cost.shared_step if stage > 0 else 0.0) for cost in costs)
