"""Every choice of a search, beside what the search says of it."""

from collections.abc import Iterator
from dataclasses import replace

from megatron_merak.errors import MerakError
from megatron_merak.plan import Plan
from megatron_merak.planner.memory import overflowing_ranks
from megatron_merak.planner.search import Choice, Search
from megatron_merak.planner.search.bound import Bounds, Case


def everything(one: Search, ranks: int, batch: int, pins: dict) -> Iterator[tuple[Choice, Plan]]:
    """The choices that have a plan, none of which may be faster than its bounds."""
    space = one.space(ranks, [batch], pins)
    bounds = Bounds(one.request, one.cluster, one.memory, one.model.frozen_bytes)
    for layer in space.layers():
        try:
            units = len(one.model.units(layer, 1, layer.ep > 1, False))
        except MerakError:
            continue
        for degrees in space.degrees(layer, units):
            for choice in space.choices(degrees, units):
                orders = space.orders(degrees)
                try:
                    work = one._of(degrees, choice.recompute == "selective")
                except MerakError:
                    continue
                case = Case(work, choice, degrees, orders)
                bound = max(bounds.of(case), bounds.closer(case, float("inf"))[0])
                # what ranks compute with depends on their order where nodes differ
                for order in orders if one.cluster.nodes else orders[:1]:
                    own = replace(choice, order=order)
                    try:
                        made = one.plan(own, degrees.dp, degrees.microbatches)
                    except MerakError:
                        continue
                    if overflowing_ranks(made, one.memory):
                        continue
                    assert bound <= made.predicted_time * 1.0001, own
                    yield own, made
