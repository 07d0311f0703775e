"""The links between communicating ranks of a plan, given how the rank order places them on
nodes.
"""

import functools
from collections.abc import Iterable
from dataclasses import replace

from megatron_merak.cluster import Cluster, Link
from megatron_merak.plan import Grid, placed_groups


@functools.cache
def link_along(
    cluster: Cluster,
    grid: Grid,
    axis: str,
    coordinates: tuple[int, ...] | None = None,
    exchanges: bool = False,
) -> Link:
    """Return the slowest link of any group along an axis "tp", "cp", "dp" or "pp", or "cp-dp".

    coordinates: only ranks with these coordinates along the axis communicate; None for all.
    exchanges:   whether every rank sends another part to each other rank.
    """
    groups = placed_groups(grid, axis, cluster.ranks_per_node, coordinates)
    return worst(map(cluster.exchange_link if exchanges else cluster.link, groups))


def reached_along(
    cluster: Cluster,
    grid: Grid,
    axis: str,
    coordinates: tuple[int, ...] | None = None,
    summed: bool = False,
    exchanges: bool = False,
) -> Link:
    """Return what ``link_along`` returns, with the bandwidth that training reaches of it (see
    ``Practice``).

    summed:    whether it carries all-reduces, which switches of the network may add up; nothing
               else gets more than the whole of a network card.
    exchanges: see ``link_along``.
    """
    reached = _in_practice(cluster, axis in ("tp", "cp"), summed)
    return link_along(reached, grid, axis, coordinates, exchanges=exchanges)


def _in_practice(cluster: Cluster, hides: bool, summed: bool) -> Cluster:
    """Return a cluster with the bandwidths that training reaches.

    hides: whether computation may hide what its nodes' links carry.
    """
    practice = cluster.practice
    if practice is None:
        return cluster
    inside = practice.inside if hides else min(practice.inside, 1.0)
    between = practice.between if summed else min(practice.between, 1.0)
    return replace(
        cluster,
        inside=replace(cluster.inside, bandwidth=inside * cluster.inside.bandwidth),
        between=replace(cluster.between, bandwidth=between * cluster.between.bandwidth),
    )


def worst(links: Iterable[Link]) -> Link:
    """Return the slowest link."""
    return min(links, key=lambda link: (link.bandwidth, -link.latency))
