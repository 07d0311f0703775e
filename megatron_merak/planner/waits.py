"""The time that passes wait for communication where gradients, or weights too, are sharded over
replicas.

In every micro-batch a unit's weights are all-gathered before it computes, and its gradient is
reduce-scattered after its backward. Where they are in host memory they are copied from and to it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_merak.cluster import all_gather, reduce_scatter
from megatron_merak.pipeline_parallel.ops import Kind, ops_of
from megatron_merak.plan import (
    DTYPE_BYTES,
    Plan,
    StagePlan,
    hardware_of,
    held_parameters,
    trained_parameters,
)
from megatron_merak.planner.cost import UnitCost
from megatron_merak.planner.host import host_bandwidth
from megatron_merak.planner.instances import (
    CrossInstanceReduction,
    link_inside,
    share_of_experts,
)
from megatron_merak.planner.overlap import times
from megatron_merak.planner.reduction import own_values


@dataclass(frozen=True)
class UnitTimes:
    """A unit in a pass, in seconds: all-gathering its weights, computing, reducing its gradient; 0
    where not done.

    returned: how long the sum of its earlier gradients comes back before its own are added.
    """

    unit: int
    gather: float
    compute: float
    reduce: float
    returned: float = 0.0


@dataclass(frozen=True)
class Waits:
    """Average seconds that the ops of a stage wait for communication, by kind of op.

    end: how long the last reductions of a step outlast its last op.
    """

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    recompute: float = 0.0
    end: float = 0.0

    @property
    def total(self) -> float:
        """What all passes of a micro-batch wait."""
        return self.forward + self.backward + self.weight + self.recompute


def durations(
    passes: Sequence[Sequence[UnitTimes]],
    across: CrossInstanceReduction | None = None,
    values: Mapping[int, float] | None = None,
    duplex: bool = False,
) -> tuple[list[float], float]:
    """Return the seconds of consecutive passes, and how long reductions outlast the last of them.

    Messages are sent one at a time. A unit's weights are gathered while the previous one computes;
    consecutive visits of the same unit gather once. Gradients of at most two units exist at a time:
    a third unit waits until the first one's are reduced.

    across: models the all-reduces across instances of what the last pass reduced, each launched
            when the next unit has computed; None: no such reductions.
    values: number of trained parameters of each unit, with those of a tied tensor once; required
            with ``across``.
    duplex: whether reductions do not wait for gathers, nor these for them: copies from a host and
            to it.
    """
    visits = [visit for each in passes for visit in each]
    last = len(visits) - len(passes[-1]) if across is not None else len(visits)
    sizes: Mapping[int, float] = values or {}
    now = 0.0
    reduced = [0.0, 0.0]
    link = arrived = visits[0].gather if visits else 0.0
    out = (
        0.0  # where gathers and reductions have links of their own: when that of reductions is free
    )
    ends = []
    adds = False  # whether the visit before let the sum of this one come back
    before: UnitTimes | None = None  # whose shard is not reduced across instances yet
    for index, (visit, following) in enumerate(zip(visits, [*visits[1:], None], strict=True)):
        now = max(now, arrived, reduced[-2] if visit.reduce else 0.0)
        if following is not None and following.gather and following.unit != visit.unit:
            link = arrived = max(link, now) + following.gather
        if visit.returned and not adds:
            link = now = max(link, now) + visit.returned
        adds = bool(visit.reduce and following is not None and following.returned)
        if following is not None and adds:
            link = arrived = max(link, now) + following.returned
        now += visit.compute
        if visit.reduce and duplex:
            out = max(out, now) + visit.reduce
            reduced.append(out)
        elif visit.reduce:
            if across is not None and before is not None:
                link = across.send(sizes[before.unit], max(now, reduced[-1]), link)
            link = max(link, now) + visit.reduce
            reduced.append(link)
            before = visit if index >= last else None
        ends.append(now)
    if across is not None and before is not None:
        link = max(link, across.send(sizes[before.unit], max(now, reduced[-1]), link), across.free)
    return _differences(passes, ends), max(0.0, (out if duplex else link) - now)


def _differences(passes: Sequence[Sequence[UnitTimes]], ends: Sequence[float]) -> list[float]:
    """Return the seconds of each pass, given the end of every visit."""
    durations = []
    count = 0
    before = 0.0
    for each in passes:
        count += len(each)
        after = ends[count - 1] if count else 0.0
        durations.append(after - before)
        before = after
    return durations


def unit_transfers(plan: Plan) -> list[tuple[float, float]]:
    """Return the seconds of gathering each unit's weights (0 if unsharded) and of reducing its
    gradient, with their copies from and to the host.
    """
    ranks = plan.shard_ranks
    transfers = []
    share = share_of_experts(plan)
    link = link_inside(plan) if ranks > 1 else None
    rates = _host_rates(plan)
    for index, unit in enumerate(plan.units):
        shard = (trained_parameters([unit]) - (1 - share) * unit.experts) / ranks
        gather = 0.0
        reduce = 0.0
        if link is not None and shard:
            reduce = reduce_scatter(ranks, plan.gradient_bytes * shard, link)
            if plan.shards_parameters:
                gather = all_gather(ranks, DTYPE_BYTES[plan.dtype] * shard, link)
        if plan.offload_model_states:
            frozen = held_parameters([unit]) - trained_parameters([unit])
            rate = rates[index]
            gather += DTYPE_BYTES[plan.dtype] * (shard + frozen) / rate
            reduce += 4 * shard / rate
            # of several ranks a shard comes back to be added to
            reduce += _added(plan) * 4 * shard / rate if ranks > 1 else 0.0
        transfers.append((gather, reduce))
    return transfers


def _added(plan: Plan) -> float:
    """Return the share of micro-batches whose gradients are added to those of others."""
    return 1 - 1 / plan.num_microbatches


def _returned(plan: Plan) -> list[float]:
    """Return, per unit, how long a sum of gradients comes back from the host before a backward that
    adds to it.
    """
    if not plan.offload_model_states or plan.shard_ranks > 1:
        return [0.0] * len(plan.units)
    return [
        4 * trained_parameters([unit]) / rate
        for unit, rate in zip(plan.units, _host_rates(plan), strict=True)
    ]


def _host_rates(plan: Plan) -> list[float]:
    """Return the bytes per second of copies from and to the host of the rank that has each unit; none
    where weights are on the device.
    """
    if not plan.offload_model_states:
        return []
    hardware = hardware_of(plan.cluster, plan.grid)
    rates: list[float] = []
    for index, stage in enumerate(plan.stages):
        device = hardware[plan.schedule.rank_of(index)].slowest_copies
        rates += [host_bandwidth(device)] * len(stage.units)
    return rates


def _duplex(plan: Plan) -> bool:
    """Whether nothing but copies from the host and to it is waited for."""
    return plan.offload_model_states and plan.shard_ranks == 1


def stage_waits(plan: Plan, costs: Sequence[UnitCost]) -> list[Waits]:
    """Return the waits of each stage; zeros where at most the optimizer's state is sharded."""
    if not plan.shards_gradients:
        return [Waits()] * len(plan.stages)
    first = _stage_waits(plan, costs, [0.0] * len(plan.units))
    returned = _returned(plan)
    share = _added(plan)
    if not any(returned) or not share:
        return first
    others = _stage_waits(plan, costs, returned)
    return [
        Waits(
            forward=(1 - share) * one.forward + share * other.forward,
            backward=(1 - share) * one.backward + share * other.backward,
            weight=(1 - share) * one.weight + share * other.weight,
            recompute=(1 - share) * one.recompute + share * other.recompute,
            end=other.end,
        )
        for one, other in zip(first, others, strict=True)
    ]


def _stage_waits(plan: Plan, costs: Sequence[UnitCost], returned: Sequence[float]) -> list[Waits]:
    """Return the waits of each stage. returned: of each unit, see `UnitTimes`."""
    transfers = unit_transfers(plan)
    reuse = _reuse(plan)
    duplex = _duplex(plan)
    kinds = {(op.stage, op.kind) for entry in plan.schedule.entries() for op in ops_of(entry)}
    waits = []
    for index, stage in enumerate(plan.stages):
        splits = (index, Kind.W) in kinds
        early = (index, Kind.R) in kinds
        passes = _passes(plan, stage, costs, transfers, returned, splits=splits, early=early)
        forward = passes[Kind.F]
        backward = passes[Kind.B]
        weight = passes[Kind.W]
        forward_reuse = reuse.get((index, Kind.F), 0.0)
        backward_reuse = reuse.get((index, Kind.B), 0.0)
        values = dict(own_values(plan, stage.units))
        again = passes[Kind.R]
        recompute = _wait(again, again, duplex) if early and again else 0.0
        waits.append(
            Waits(
                forward=forward_reuse * _wait(forward, backward, duplex)
                + (1 - forward_reuse) * _wait(forward, forward, duplex),
                backward=backward_reuse * _wait(backward, forward, duplex)
                + (1 - backward_reuse) * _wait(backward, backward, duplex),
                weight=_wait(weight, backward, duplex) if splits else 0.0,
                recompute=recompute,
                end=durations(
                    [weight if splits else backward] * 2,
                    None if duplex else CrossInstanceReduction(plan),
                    values,
                    duplex=duplex,
                )[1],
            )
        )
    return waits


def _passes(
    plan: Plan,
    stage: StagePlan,
    costs: Sequence[UnitCost],
    transfers: Sequence[tuple[float, float]],
    returned: Sequence[float],
    splits: bool,
    early: bool,
) -> Mapping[Kind, list[UnitTimes]]:
    """Return the units of each kind of op of a stage.

    returned: of each unit, see `UnitTimes`.
    splits:   whether weight gradients are separate ops (W).
    early:    whether recomputations are separate ops (R).
    """
    passes: dict[Kind, list[UnitTimes]] = {kind: [] for kind in (Kind.F, Kind.B, Kind.W, Kind.R)}
    for unit in stage.units:
        gather, reduce = transfers[unit]
        seconds = times([costs[unit]], plan.overlap, splits)
        backward = seconds.backward - (seconds.weight if splits else 0.0)
        recomputed = unit in stage.recompute
        backward = max(0.0, backward) + (seconds.again if recomputed and not early else 0.0)
        passes[Kind.F].append(UnitTimes(unit, gather, seconds.forward, 0.0))
        back = returned[unit]
        passes[Kind.B].insert(
            0,
            UnitTimes(unit, gather, backward, 0.0)
            if splits
            else UnitTimes(unit, gather, backward, reduce, back),
        )
        passes[Kind.W].insert(0, UnitTimes(unit, 0.0, seconds.weight, reduce, back))
        passes[Kind.R] += [UnitTimes(unit, gather, seconds.again, 0.0)] if recomputed else []
    return passes


def _wait(own: Sequence[UnitTimes], before: Sequence[UnitTimes], duplex: bool) -> float:
    """Return the seconds by which a pass exceeds its compute time when it alternates with another
    pass.
    """
    seconds, _ = durations([before, own, before, own], duplex=duplex)
    return max(0.0, seconds[-1] - sum(visit.compute for visit in own))


def _reuse(plan: Plan) -> dict[tuple[int, Kind], float]:
    """Return the share of a stage's ops, by kind, that start with the unit which their rank used
    last.

    The first op of a step counts as one: its wait is in `predict.ending`.
    """
    ops: Counter[tuple[int, Kind]] = Counter()
    reused: Counter[tuple[int, Kind]] = Counter()
    for rank in plan.schedule.ranks:
        last: int | None = None
        for op in (
            op for entry in rank for op in ops_of(entry) if op.kind in (Kind.F, Kind.B, Kind.R)
        ):
            stage = plan.stages[op.stage]
            units = stage.recompute if op.kind is Kind.R else stage.units
            if not units:
                continue
            ends = (units[-1], units[0]) if op.kind is Kind.B else (units[0], units[-1])
            ops[op.stage, op.kind] += 1
            reused[op.stage, op.kind] += last in (None, ends[0])
            last = ends[1]
    return {key: reused[key] / count for key, count in ops.items()}
