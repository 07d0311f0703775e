"""How long passes wait for other replicas where these share gradients, or weights too: a unit's weights are gathered
before it computes, and its gradient is reduced behind it, in every micro-batch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_merak.cluster import all_gather, reduce_scatter
from megatron_merak.pipeline_parallel.ops import Kind, ops_of
from megatron_merak.plan import DTYPE_BYTES, Plan, StagePlan, trained_parameters
from megatron_merak.planner.cost import UnitCost
from megatron_merak.planner.instances import Across, link_inside
from megatron_merak.planner.overlap import times
from megatron_merak.planner.reduction import own_values


@dataclass(frozen=True)
class Visit:
    """A unit in a pass: seconds of gathering its weights, of computing, of reducing its gradient; 0 for none."""

    unit: int
    gather: float
    compute: float
    reduce: float


@dataclass(frozen=True)
class Waits:
    """Seconds that the ops of a stage wait beyond their computing, on average; how long the last reductions of a step
    outlast its last op (``end``)."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    recompute: float = 0.0
    end: float = 0.0


def durations(
    passes: Sequence[Sequence[Visit]], across: Across | None = None, values: Mapping[int, float] | None = None
) -> tuple[list[float], float]:
    """Seconds of passes that follow one another, and how long reductions outlast the last of them.

    One message travels at a time. Weights are gathered while the unit before computes, unless that is the same unit,
    whose weights are there. Gradients of two units exist at a time: a third waits until the first is reduced. across:
    sums over instances of what the last pass reduced, each launched when the next unit has computed. values: of each
    unit, those of a tied tensor once.
    """
    visits = [visit for each in passes for visit in each]
    last = len(visits) - len(passes[-1]) if across is not None else len(visits)
    now, reduced = 0.0, [0.0, 0.0]
    link = arrived = visits[0].gather if visits else 0.0
    ends = []
    before: Visit | None = None  # whose shard is not summed over instances yet
    for place, (visit, following) in enumerate(zip(visits, [*visits[1:], None], strict=True)):
        now = max(now, arrived, reduced[-2] if visit.reduce else 0.0)
        if following is not None and following.gather and following.unit != visit.unit:
            link = arrived = max(link, now) + following.gather
        now += visit.compute
        if visit.reduce:
            if before is not None:
                link = across.send(values[before.unit], max(now, reduced[-1]), link)
            link = max(link, now) + visit.reduce
            reduced.append(link)
            before = visit if place >= last else None
        ends.append(now)
    if before is not None:
        link = max(link, across.send(values[before.unit], max(now, reduced[-1]), link), across.free)
    return _differences(passes, ends), max(0.0, link - now)


def _differences(passes: Sequence[Sequence[Visit]], ends: Sequence[float]) -> list[float]:
    """The seconds of each pass, of which ``ends`` has the end of every visit."""
    found = []
    count, before = 0, 0.0
    for each in passes:
        count += len(each)
        after = ends[count - 1] if count else 0.0
        found.append(after - before)
        before = after
    return found


def unit_transfers(plan: Plan) -> list[tuple[float, float]]:
    """Of each unit, the seconds of gathering its weights where they are sharded, and of reducing its gradient."""
    link, ranks = link_inside(plan), plan.shard_ranks
    found = []
    for unit in plan.units:
        shard = trained_parameters([unit]) / ranks
        gather = all_gather(ranks, DTYPE_BYTES[plan.dtype] * shard, link) if shard and plan.shards_parameters else 0.0
        found.append((gather, reduce_scatter(ranks, plan.gradient_bytes * shard, link) if shard else 0.0))
    return found


def stage_waits(plan: Plan, costs: Sequence[UnitCost]) -> list[Waits]:
    """Of each stage; none where replicas share no more than the optimizer's state."""
    if not plan.shards_gradients:
        return [Waits()] * len(plan.stages)
    transfers, kept = unit_transfers(plan), _kept(plan)
    kinds = {(op.stage, op.kind) for entry in plan.schedule.entries() for op in ops_of(entry)}
    found = []
    for index, stage in enumerate(plan.stages):
        splits, early = (index, Kind.W) in kinds, (index, Kind.R) in kinds
        passes = _passes(plan, stage, costs, transfers, splits, early)
        forward, backward, weight = passes[Kind.F], passes[Kind.B], passes[Kind.W]
        there, back = kept.get((index, Kind.F), 0.0), kept.get((index, Kind.B), 0.0)
        values = dict(own_values(plan.units, stage.units))
        again = _wait(passes[Kind.R], passes[Kind.R]) if early and passes[Kind.R] else 0.0
        found.append(
            Waits(
                forward=there * _wait(forward, backward) + (1 - there) * _wait(forward, forward),
                backward=back * _wait(backward, forward) + (1 - back) * _wait(backward, backward),
                weight=_wait(weight, backward) if splits else 0.0,
                recompute=again,
                end=durations([weight if splits else backward] * 2, Across(plan), values)[1],
            )
        )
    return found


def _passes(
    plan: Plan,
    stage: StagePlan,
    costs: Sequence[UnitCost],
    transfers: Sequence[tuple[float, float]],
    splits: bool,
    early: bool,
) -> Mapping[Kind, list[Visit]]:
    """What each op of a stage visits. splits: weight gradients are ops of their own. early: recomputation is."""
    found: dict[Kind, list[Visit]] = {kind: [] for kind in (Kind.F, Kind.B, Kind.W, Kind.R)}
    for unit in stage.units:
        gather, reduce = transfers[unit]
        seconds = times([costs[unit]], plan.overlap, splits)
        backward, again = seconds.backward - (seconds.weight if splits else 0.0), unit in stage.recompute
        backward = max(0.0, backward) + (seconds.forward if again and not early else 0.0)
        found[Kind.F].append(Visit(unit, gather, seconds.forward, 0.0))
        found[Kind.B].insert(0, Visit(unit, gather, backward, 0.0 if splits else reduce))
        found[Kind.W].insert(0, Visit(unit, 0.0, seconds.weight, reduce))
        found[Kind.R] += [Visit(unit, gather, seconds.forward, 0.0)] if again else []
    return found


def _wait(one: Sequence[Visit], before: Sequence[Visit]) -> float:
    """Seconds by which a pass is longer than its computing when it takes turns with another."""
    found, _ = durations([before, one, before, one])
    return max(0.0, found[-1] - sum(visit.compute for visit in one))


def _kept(plan: Plan) -> dict[tuple[int, Kind], float]:
    """The share of a stage's ops, by kind, whose rank has just used the unit that they start with. The first op of a
    step counts among them: ``ending`` has what it waits."""
    ops: Counter[tuple[int, Kind]] = Counter()
    kept: Counter[tuple[int, Kind]] = Counter()
    for rank in plan.schedule.ranks:
        last: int | None = None
        for op in (op for entry in rank for op in ops_of(entry) if op.kind in (Kind.F, Kind.B, Kind.R)):
            stage = plan.stages[op.stage]
            units = stage.recompute if op.kind is Kind.R else stage.units
            if not units:
                continue
            ends = (units[-1], units[0]) if op.kind is Kind.B else (units[0], units[-1])
            ops[op.stage, op.kind] += 1
            kept[op.stage, op.kind] += last in (None, ends[0])
            last = ends[1]
    return {key: kept[key] / count for key, count in ops.items()}
