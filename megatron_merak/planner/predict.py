"""Predicts the time of one step of a plan on its cluster."""

import math
from dataclasses import dataclass, replace

from megatron_merak.cluster import all_reduce
from megatron_merak.pipeline_parallel.ops import Kind, ops_of
from megatron_merak.pipeline_parallel.simulate import StageCosts, Timeline, simulate
from megatron_merak.plan import Plan, hardware_of, spread_parameters, trained_tied
from megatron_merak.planner.cost import UnitCost
from megatron_merak.planner.host import update_time
from megatron_merak.planner.links import reached_along
from megatron_merak.planner.memory import Ledger, stage_host_bytes, stage_memory
from megatron_merak.planner.offload import HostWaits, host_waits, unit_seconds
from megatron_merak.planner.overlap import Times, times
from megatron_merak.planner.rank_costs import Costs, plan_costs
from megatron_merak.planner.reduction import exposed_gather, exposed_reduction
from megatron_merak.planner.waits import Waits, stage_waits, unit_transfers


@dataclass(frozen=True)
class Ending:
    """Time outside the pipeline on the slowest rank, in seconds.

    reductions: of gradients, and all-gathers of weights.
    optimizer:  of its step.
    """

    reductions: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.reductions + self.optimizer


@dataclass(frozen=True)
class ByScale:
    """What a step takes longer for the number of its nodes and replicas alone.

    skew:     share of the step in which ranks wait for the slowest.
    replicas: seconds that grow with their number.
    """

    skew: float = 0.0
    replicas: float = 0.0


def priced(plan: Plan, ledger: Ledger | None = None) -> Plan:
    """Return the plan with its predictions recomputed; an equal plan if it was not edited.

    ledger: of its chain and schedule; None: it is made.
    """
    own = Ledger.of(plan) if ledger is None else ledger
    seconds, bubble = _predicted(plan)
    return replace(
        plan,
        predicted_time=seconds,
        predicted_bubble=bubble,
        predicted_bytes=tuple(memory.total for memory in stage_memory(plan, own)),
        predicted_host_bytes=stage_host_bytes(plan, own),
    )


def in_order(plan: Plan, order: str) -> Plan:
    """Return a priced plan with its ranks in another order, where all nodes are alike: it takes another
    time, and the same memory.
    """
    other = replace(plan, grid=replace(plan.grid, order=order))
    seconds, bubble = _predicted(other)
    return replace(other, predicted_time=seconds, predicted_bubble=bubble)


def _predicted(plan: Plan) -> tuple[float, float]:
    """Return the seconds of a step, and its bubble."""
    costs = plan_costs(plan)
    pipeline = timeline(plan, costs)
    return step_time(plan, pipeline, costs), pipeline.bubble


def stage_costs(plan: Plan, costs: Costs | None = None) -> StageCosts:
    """Return the times of one micro-batch on each stage, and of its transfers between neighbours.

    They include the exposed time of tensor-parallel collectives, given ``plan.overlap``, also in
    recomputation, of collectives over replicas where gradients or weights are sharded, and of
    copies to and from the host where activations, or weights and gradients, are there.

    costs: see ``plan_costs``, which makes them if they are None.
    """
    costs = costs or plan_costs(plan)
    transfer = []
    latency = []
    for border, stage in enumerate(plan.stages[:-1]):
        ends = tuple(plan.schedule.rank_of(border + side) for side in (0, 1))
        link = reached_along(plan.cluster, plan.grid, "pp", ends)
        transfer.append(plan.units[stage.last - 1].output_bytes / link.bandwidth)
        latency.append(link.latency)
    recompute = [
        times([costs[unit] for unit in stage.recompute], plan.overlap).again
        for stage in plan.stages
    ]
    both = list(zip(_stage_times(plan, costs), stage_waits(plan, costs), strict=True))
    handover = handover_time(plan)
    of_host = stage_host_waits(plan, costs)
    return StageCosts(
        forward=tuple(
            handover + stage.forward + wait.forward + host.forward
            for (stage, wait), host in zip(both, of_host, strict=True)
        ),
        backward=tuple(
            handover + stage.backward + wait.backward + wait.weight + host.backward
            for (stage, wait), host in zip(both, of_host, strict=True)
        ),
        weight=tuple(min(stage.weight, stage.backward) + wait.weight for stage, wait in both),
        recompute=tuple(
            seconds + wait.recompute for seconds, (_, wait) in zip(recompute, both, strict=True)
        ),
        transfer=tuple(transfer),
        latency=tuple(latency),
    )


def stage_host_waits(plan: Plan, costs: tuple[UnitCost, ...]) -> list[HostWaits]:
    """Return the seconds that passes of each stage wait for offloaded activations.

    costs: of each unit.
    """
    if not plan.offloads:
        return [HostWaits()] * len(plan.stages)
    kinds = {(op.stage, op.kind) for entry in plan.schedule.entries() for op in ops_of(entry)}
    hardware = hardware_of(plan.cluster, plan.grid)
    return [
        host_waits(
            plan.units,
            stage,
            unit_seconds(costs, plan.overlap, splits=(index, Kind.W) in kinds),
            hardware[plan.schedule.rank_of(index)].slowest_copies,
            early=(index, Kind.R) in kinds,
        )
        for index, stage in enumerate(plan.stages)
    ]


def handover_time(plan: Plan) -> float:
    """Return the seconds that a pass spends on handing over to a neighbour."""
    practice = plan.cluster.practice
    return 0.0 if practice is None or plan.grid.pp == 1 else practice.handover


def _stage_times(plan: Plan, costs: tuple[UnitCost, ...]) -> list[Times]:
    split = {
        op.stage for entry in plan.schedule.entries() for op in ops_of(entry) if op.kind is Kind.W
    }
    return [
        times([costs[unit] for unit in stage.units], plan.overlap, index in split)
        for index, stage in enumerate(plan.stages)
    ]


def hidden_share(plan: Plan, costs: Costs | None = None) -> float:
    """Return the hidden share, 0 to 1, of the shorter one of a forward and a backward that run
    together. costs: see ``stage_costs``.
    """
    stages = _stage_times(plan, costs or plan_costs(plan))
    return min(
        (s.hidden / max(min(s.forward, s.backward), s.hidden) if s.hidden else 0.0) for s in stages
    )


def timeline(plan: Plan, costs: Costs | None = None) -> Timeline:
    """Return the simulated forwards and backwards of one step. costs: see ``stage_costs``."""
    units = costs or plan_costs(plan)
    return simulate(plan.schedule, stage_costs(plan, units), hidden_share(plan, units))


def step_time(plan: Plan, pipeline: Timeline, costs: Costs | None = None) -> float:
    """Return the seconds of the pipeline and of what follows it, with those that ranks wait for the
    slowest. costs: see ``stage_costs``.
    """
    scale = by_scale(plan)
    return (pipeline.makespan + ending(plan, costs).total) * (1 + scale.skew) + scale.replicas


def by_scale(plan: Plan) -> ByScale:
    """Return what a step takes longer for its nodes and replicas; nothing on a cluster without
    ``practice``.
    """
    practice = plan.cluster.practice
    if practice is None:
        return ByScale()
    nodes = max(plan.grid.size / plan.cluster.ranks_per_node, 1.0)
    return ByScale(
        skew=practice.skew * math.log2(nodes),
        replicas=practice.step * math.log2(plan.grid.copies),
    )


def ending(plan: Plan, costs: Costs | None = None) -> Ending:
    """Return the time that follows the pipeline on the slowest rank.

    It consists of the exposed data-parallel reductions of gradients, the exposed all-gathers of
    sharded parameters, the all-reduces of tied tensors' gradients, and the optimizer's updates, all
    of them where a step has several.

    costs: see ``stage_costs``.
    """
    units = costs or plan_costs(plan)
    waits = stage_waits(plan, units)
    hardware = hardware_of(plan.cluster, plan.grid)
    ties = _tie_times(plan)
    endings = []
    for rank in range(plan.grid.pp):
        own = [unit for stage in plan.stages_of(rank) for unit in plan.stages[stage].units]
        updated = [plan.units[unit] for unit in own]
        divided = plan.expert_copies if plan.optimizer_shards > 1 else 1
        parameters = spread_parameters(updated, divided)
        reductions = _reductions(plan, rank, own, units, waits=waits) + ties[rank]
        update = update_time(plan, hardware[rank])
        endings.append(Ending(reductions, parameters * update * _updates(plan)))
    return max(endings, key=lambda ending: ending.total)


def _updates(plan: Plan) -> int:
    """Return how often a step updates the weights."""
    updates = plan.schedule.updates
    return 1 if updates is None else plan.schedule.microbatches // updates.every


def _reductions(
    plan: Plan, rank: int, own: list[int], units: tuple[UnitCost, ...], waits: list[Waits]
) -> float:
    """Return the seconds that a rank waits for its replicas after its last backward and before its
    first forward.

    own: indices of the rank's units.
    """
    gathers = 0.0 if plan.shards_parameters else exposed_gather(plan, own, units)
    if not plan.shards_gradients:
        return exposed_reduction(plan, own, units) + gathers
    if plan.shards_parameters and plan.schedule.rank_of(0) == rank:
        gathers = unit_transfers(plan)[0][0]  # other ranks gather while they wait for an input
    return max(waits[stage].end for stage in plan.stages_of(rank)) + gathers


def _tie_times(plan: Plan) -> list[float]:
    """Return the seconds of each pipeline rank for all-reducing gradients of tied tensors."""
    holders: dict[tuple[str, int], list[int]] = {}
    for rank in range(plan.grid.pp):
        units = [unit for stage in plan.stages_of(rank) for unit in plan.stage_units(stage)]
        for tensor in dict.fromkeys(pair for unit in units for pair in trained_tied(unit)):
            holders.setdefault(tensor, []).append(rank)
    seconds = [0.0] * plan.grid.pp
    for (_, values), ranks in holders.items():
        link = reached_along(plan.cluster, plan.grid, "pp", tuple(ranks), summed=True)
        for rank in ranks if len(ranks) > 1 else ():
            seconds[rank] += all_reduce(len(ranks), 4 * values / plan.shards.gradients, link)
    return seconds
