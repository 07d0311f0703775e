"""The searched schedule of a plan: what the search is told of its stages, and the plans that come of it."""

from dataclasses import replace

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.pipeline_parallel.search.problem import Limits
from megatron_merak.pipeline_parallel.search.search import search
from megatron_merak.plan import Plan
from megatron_merak.planner.memory import rank_memory
from megatron_merak.planner.predict import stage_costs
from megatron_merak.planner.saved import footprint


def searched(made: Plan, limit: float) -> list[Plan]:
    """``made``, which has one stage per rank, with schedules found for its stages, each within ``limit`` bytes per rank
    (0: there is none) if ``made`` is."""
    if made.overlap == "pair":
        return []
    held = [memory.total for memory in rank_memory(made)]
    cap = limit if limit and max(held) <= limit else 0
    found = []
    # Apart from the backward, weight gradients hide no collectives: that costs of its own, where there are any.
    for split in (False, True):
        like = build_schedule("zb-h1" if split else "1f1b", made.grid.pp, made.num_microbatches)
        costs = stage_costs(replace(made, schedule=like))
        for early in (False, True):
            limits, may = _limits(made, cap, early)
            try:
                schedule = search(
                    costs, made.num_microbatches, limits=limits, recompute=may, split_weights=split
                ).schedule
            except ScheduleError:  # no micro-batch runs under these limits
                continue
            plan = replace(made, schedule=schedule)
            if not cap or max(memory.total for memory in rank_memory(plan)) <= cap:
                found.append(plan)
            if not any(costs.recompute):
                break
    return found


def _limits(made: Plan, cap: float, early: bool) -> tuple[Limits | None, tuple[bool, ...]]:
    """Of each stage, the room for what micro-batches keep, and whether it may recompute ahead of backwards: then a
    backward, too, is taken to hold all tapes at once."""
    prints = [footprint(made.units, stage) for stage in made.stages]
    may = tuple(early and one.taped > one.kept for one in prints)
    if not cap:
        return None, may
    memory = rank_memory(made)
    room = tuple(cap - one.total + one.activations for one in memory)
    kept = tuple(one.kept for one in prints)
    taped = tuple((one.taped if ahead else one.backward) - one.kept for one, ahead in zip(prints, may, strict=True))
    return Limits(room, kept, taped, tuple(one.held for one in prints)), may
