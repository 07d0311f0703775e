"""Every choice of a search, beside what the search says of it."""

from collections.abc import Iterator

from megatron_merak.errors import MerakError
from megatron_merak.plan import Plan
from megatron_merak.planner.automatic import largest
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
                    made = one.plan(choice, degrees.dp, degrees.microbatches)
                except MerakError:
                    continue
                bound = bounds.of(Case(work, choice, degrees, orders))
                closer, _ = bounds.closer(Case(work, choice, degrees, orders), float("inf"))
                if one.memory and largest(made) > one.memory:
                    continue
                assert max(bound, closer) <= made.predicted_time * 1.0001, choice
                yield choice, made
