"""How long one step of a plan takes on a cluster."""

from megatron_merak.cluster import Cluster, all_reduce
from megatron_merak.pipeline_parallel.simulate import StageCosts, Timeline, simulate
from megatron_merak.plan import Plan
from megatron_merak.planner.cost import optimizer_bytes, unit_costs


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
    gradients (behind the last backward of the stage as far as it reaches, with overlap), the all-reduces of tied
    tensors among the stages that hold them, and the optimizer."""
    units = unit_costs(plan.units, cluster, plan.dtype, plan.grid)
    grid = plan.grid
    replicas = cluster.link([grid.rank(dp=0), grid.rank(dp=grid.dp - 1)])
    update = cluster.device.compute_time(0, optimizer_bytes(plan.dtype), plan.dtype)
    ties = _tie_times(plan, cluster)
    tails = []
    for index, stage in enumerate(plan.stages):
        reduce = all_reduce(grid.dp, 4 * plan.stage_parameters(index), replicas)
        if overlap_grad_reduce:
            reduce = max(0.0, reduce - sum(units[unit].backward for unit in stage.units))
        tails.append(reduce + ties[index] + plan.stage_parameters(index) * update)
    return pipeline.makespan + max(tails)


def _tie_times(plan: Plan, cluster: Cluster) -> list[float]:
    """Seconds that each stage spends on summing the gradients of tensors that other stages hold as well."""
    holders: dict[tuple[str, int], list[int]] = {}
    for index in range(len(plan.stages)):
        for tensor in dict.fromkeys(pair for unit in plan.stage_units(index) for pair in unit.tied):
            holders.setdefault(tensor, []).append(index)
    times = [0.0] * len(plan.stages)
    for (_, values), stages in holders.items():
        link = cluster.link([plan.grid.rank(pp=plan.schedule.rank_of(stage)) for stage in stages])
        for stage in stages if len(stages) > 1 else ():
            times[stage] += all_reduce(len(stages), 4 * values, link)
    return times
