"""A plan that was found, in words: where its time goes, what binds it, and what else was near."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_merak.cluster import Device
from megatron_merak.config.checks import divisors
from megatron_merak.config.parallel import SHARDINGS
from megatron_merak.counting import counted
from megatron_merak.errors import MerakError
from megatron_merak.plan import (
    Plan,
    bytes_text,
    hardware_of,
    limits_of,
    nodes_text,
    time_text,
)
from megatron_merak.planner.arithmetic import arithmetic
from megatron_merak.planner.automatic import largest
from megatron_merak.planner.cost import UnitCost
from megatron_merak.planner.memory import predicted_peaks, rank_memory, stage_memory
from megatron_merak.planner.overlap import times
from megatron_merak.planner.predict import (
    by_scale,
    ending,
    handover_time,
    stage_host_waits,
    timeline,
)
from megatron_merak.planner.rank_costs import plan_costs
from megatron_merak.planner.search.choice import ONE_STAGE
from megatron_merak.planner.search.search import FoundPlan, Result, Search
from megatron_merak.planner.tables import align
from megatron_merak.planner.waits import stage_waits

_FULL = 0.9  # of the memory of a rank: above it memory is what binds
_TIMES = (2, 4, 8, 16, 32, 64)  # by which factors a job gets more ranks
_ENDLESS = 1 << 20  # GiB
_NOTHING = 1e-6  # of a step: a difference that is rounding
_LITTLE = 1e-4  # of a step: a part that is not shown
_RANKS = 8  # whose memory is shown; of more ranks some
_JOINS = re.compile(" (?:in|of|over|to|with|for) ")  # what follows the noun of a row
_SHOWN = 5  # plans that are shown beside the best


@dataclass(frozen=True)
class Breakdown:
    """Where the time of a step goes, on the pipeline rank that works longest, in seconds.

    products:  of matrix products and attention.
    passes:    of what moves memory only, and of launches.
    tensor:    of collectives between the ranks of a layer that nothing hides.
    recompute: of forwards that the backward repeats.
    shards:    in which gradients and weights that replicas share are sent, or copied from the host
               and to it, and nothing is computed.
    offload:   in which the rank waits for copies of activations to the host and back.
    handover:  that the host spends on handing over to neighbours.
    bubble:    in which the rank waits for its neighbours.
    replicas:  of the reduction of gradients after the last backward, and of gathered weights.
    optimizer: of its step.
    scale:     that grows with the number of replicas, whatever these send.
    skew:      in which all ranks wait for the slowest.
    """

    products: float
    passes: float
    tensor: float
    recompute: float
    shards: float
    offload: float
    handover: float
    bubble: float
    replicas: float
    optimizer: float
    scale: float
    skew: float

    @classmethod
    def of(cls, plan: Plan) -> "Breakdown":
        """Return the parts of ``predicted_time``, which they add up to."""
        costs = plan_costs(plan)
        pipeline = timeline(plan)
        rank = max(range(plan.grid.pp), key=lambda each: pipeline.busy[each])
        stages = plan.stages_of(rank)
        count = plan.num_microbatches
        waits = stage_waits(plan, costs)
        devices = hardware_of(plan.cluster, plan.grid)[rank].devices
        products = count * sum(
            max(_arithmetic(plan, unit, device) for device in devices)
            for stage in stages
            for unit in plan.stages[stage].units
        )
        own = [costs[unit] for stage in stages for unit in plan.stages[stage].units]
        computed = count * sum(cost.forward + cost.backward for cost in own)
        recompute = count * sum(_repeated(plan, costs, stage) for stage in stages)
        shards = count * sum(waits[stage].total for stage in stages)
        of_host = stage_host_waits(plan, costs)
        offload = count * sum(of_host[stage].total for stage in stages)
        handover = count * len(stages) * 2 * handover_time(plan)
        busy = pipeline.busy[rank]
        after = ending(plan)
        scale = by_scale(plan)
        return cls(
            products,
            passes=computed - products,
            tensor=busy - computed - recompute - shards - offload - handover,
            recompute=recompute,
            shards=shards,
            offload=offload,
            handover=handover,
            bubble=pipeline.makespan - busy,
            replicas=after.reductions,
            optimizer=after.optimizer,
            scale=scale.replicas,
            skew=scale.skew * (pipeline.makespan + after.total),
        )

    def rows(self) -> list[tuple[str, float]]:
        """Return the parts by name, those that take no time left out."""
        names = {
            "products and attention": self.products,
            "memory-bound passes": self.passes,
            "collectives in layers": self.tensor,
            "recomputation": self.recompute,
            "shards of replicas": self.shards,
            "offloaded activations": self.offload,
            "hand-over to neighbours": self.handover,
            "pipeline bubble": self.bubble,
            "reduction over replicas": self.replicas,
            "optimizer": self.optimizer,
            "growth with replicas": self.scale,
            "waits for the slowest": self.skew,
        }
        total = sum(names.values())
        return [(name, seconds) for name, seconds in names.items() if seconds > _LITTLE * total]


def _arithmetic(plan: Plan, unit: int, device: Device) -> float:
    """Return the seconds of a unit's products and attention for a micro-batch."""
    work = arithmetic(plan.units[unit], device, plan.dtype)
    return work.forward + work.backward


def _repeated(plan: Plan, costs: Sequence[UnitCost], stage: int) -> float:
    """Return the seconds of the forwards that a stage repeats for each micro-batch."""
    repeated = [costs[unit] for unit in plan.stages[stage].recompute]
    return times(repeated, plan.overlap).again


def table(plan: Plan) -> str:
    """Return the breakdown of a plan as a table."""
    rows = [("seconds of a step", "", "share")]
    for name, seconds in Breakdown.of(plan).rows():
        rows.append((name, time_text(seconds), f"{seconds / plan.predicted_time:.1%}"))
    return "\n".join(align(rows))


def binding(found: FoundPlan, limit: float) -> str:
    """Return a sentence on what keeps a plan from being faster. limit: bytes of a rank; 0: unknown."""
    limits = limits_of(found.plan.cluster, found.plan.grid, limit)
    pairs = zip(predicted_peaks(found.plan), limits, strict=True)
    most, limit = max(pairs, key=lambda pair: pair[0] / (pair[1] or 1))
    lost = dict(Breakdown.of(found.plan).rows())
    lost.pop("products and attention", None)
    lost.pop("memory-bound passes", None)
    share = ""
    if lost:
        name = max(lost, key=lambda each: lost[each])
        plural = _JOINS.split(name)[0].endswith("s")
        share = f"{name} take{'' if plural else 's'} the most beside computation"
        share += f" ({lost[name] / found.seconds:.1%})"
    full = limit and (most > _FULL * limit or found.choice.recompute not in ("none", "selective"))
    memory = f"memory binds: {bytes_text(most)} of {bytes_text(int(limit))}" if full else ""
    text = "; ".join(filter(None, [memory, share])) or "computation alone"
    return text[0].upper() + text[1:] + "."


def memory_line(plan: Plan, limit: float) -> str:
    """Return the memory of pipeline ranks: of all, or of the first, the largest and the last."""
    totals = [memory.total for memory in rank_memory(plan)]
    limits = limits_of(plan.cluster, plan.grid, limit)
    alike = len(set(limits)) == 1
    of = f" of {bytes_text(int(limits[0]))}" if limit and alike else ""
    own = [f" of {bytes_text(int(each))}" if limit and not alike else "" for each in limits]
    if len(totals) == 1:
        return f"memory of a rank: {bytes_text(totals[0])}{of}"
    chosen = list(range(len(totals)))
    if len(totals) > _RANKS:
        most = max(range(len(totals)), key=lambda each: totals[each] / (limits[each] or 1))
        chosen = sorted({0, 1, most, len(totals) - 2, len(totals) - 1})
    shown = ", ".join(f"rank {rank} {bytes_text(totals[rank])}{own[rank]}" for rank in chosen)
    return f"memory of {len(totals)} pipeline ranks: {shown}{of}"


def runners_up(result: Result, best: FoundPlan) -> str:
    """Return a table of the plans beside the best, and what they cost in comparison."""
    equal = result.equal()
    others = [each for each in (*equal, *result.found) if each.choice != best.choice]
    rows = []
    for each in list(dict.fromkeys(others))[:_SHOWN]:
        apart = f"{each.seconds / best.seconds - 1:+.1%}"
        rows.append((str(each.choice), time_text(each.seconds), apart))
    return "\n".join(align([("beside it", "a step", "")] + rows)) if rows else ""


def left_out(result: Result) -> str:
    """Return a sentence on what a search did not look at; "" if it looked at all."""
    if result.rest is None:
        return ""
    layouts = counted(result.rest.count, "layout")
    text = f"Stopped after {counted(result.made, 'plan')}: of {layouts} left none takes less than "
    text += time_text(result.rest.bound)
    if result.fastest is not None:
        text += f" ({result.rest.bound / result.fastest.seconds - 1:+.1%})"
    return f"{text}. Pin settings to search them."


def comparison(best: FoundPlan, other: FoundPlan, what: str) -> str:
    """Return what another plan costs, part by part."""
    before = dict(Breakdown.of(best.plan).rows())
    after = dict(Breakdown.of(other.plan).rows())
    rows = [(what, "best", "with it", "")]
    for name in dict.fromkeys([*before, *after]):
        old = before.get(name, 0.0)
        new = after.get(name, 0.0)
        rows.append((name, time_text(old), time_text(new), _apart(new - old, best.seconds)))
    total = f"{other.seconds / best.seconds - 1:+.1%}"
    rows.append(("a step", time_text(best.seconds), time_text(other.seconds), total))
    most = bytes_text(largest(best.plan)), bytes_text(largest(other.plan))
    rows.append(("largest rank", *most, ""))
    return "\n".join(align(rows))


def _apart(seconds: float, of: float) -> str:
    """Return a difference; "" if it is none that shows beside a step of ``of`` seconds."""
    if abs(seconds) < _NOTHING * of:
        return ""
    return ("+" if seconds > 0 else "-") + time_text(abs(seconds))


def rate(plan: Plan, seconds: float) -> float:
    """Return the tokens, or samples, per second of a rank."""
    return plan.global_batch_size * max(plan.sequence_length, 1) / seconds / plan.grid.size


def stages_on_nodes(plan: Plan) -> str:
    """Return a table of the stages and the nodes that they are on; "" where all nodes are alike."""
    if not plan.cluster.nodes:
        return ""
    hardware = hardware_of(plan.cluster, plan.grid)
    rows = [("stage", "pp rank", "units", "memory of a rank", "nodes")]
    for index, memory in enumerate(stage_memory(plan)):
        rank = plan.schedule.rank_of(index)
        units = plan.stage_units(index)
        names = units[0].name if len(units) == 1 else f"{units[0].name} .. {units[-1].name}"
        peak = bytes_text(memory.total)
        rows.append((str(index), str(rank), names, peak, str(hardware[rank])))
    return "\n".join([nodes_text(plan), *align(rows, (2, 4))])


def lacking(
    search: Search, ranks: int, batch: Sequence[int], pins: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return what would make room where nothing fits: other pins, more ranks, more memory."""
    lines = []
    if pins and (best := search.run(ranks, batch, {}).best) is not None:
        lines.append(f"Without what is pinned it fits: {best.choice}")
    for more in _TIMES:
        try:
            best = search.run(ranks * more, batch, pins).best
        except MerakError:  # the cluster has no more ranks
            break
        if best is not None:
            lines.append(f"{counted(ranks * more, 'rank')} suffice: {best.choice}")
            break
    needed = _least_memory(search, ranks, batch, pins)
    if needed is not None:
        memory = bytes_text(largest(needed.plan))
        lines.append(f"{memory} of memory per rank suffice: {needed.choice}")
    return tuple(lines) or ("Use a smaller model or shorter samples",)


def _least_memory(
    search: Search, ranks: int, batch: Sequence[int], pins: Mapping[str, Any]
) -> FoundPlan | None:
    """Return the plan that needs least memory, of those that recompute and shard all they can."""
    saving = {"mb": 1, "recompute": "full", "sharding": SHARDINGS[-1], "schedule": ONE_STAGE}
    unlimited = search.on(search.cluster, memory_gb=_ENDLESS)
    best: FoundPlan | None = None
    for layer in search.space(ranks, batch, pins).layers():
        divided: dict[str, Any] = {"tp": layer.tp, "cp": layer.cp, "ep": layer.ep, "etp": layer.etp}
        divided |= {"kind": layer.kind} if layer.cp > 1 else {}
        for pp in divisors(ranks // layer.ranks):
            found = unlimited.run(ranks, batch, {**divided, "pp": pp, **saving, **pins}).found
            for each in found:
                if best is None or largest(each.plan) < largest(best.plan):
                    best = each
    return best
