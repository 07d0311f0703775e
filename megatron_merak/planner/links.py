"""The links between communicating ranks of a plan, given how the rank order places them on nodes."""

import functools
from collections.abc import Iterable

from megatron_merak.cluster import Cluster, Link
from megatron_merak.plan import Grid, placed_groups


@functools.cache
def link_along(cluster: Cluster, grid: Grid, axis: str, coordinates: tuple[int, ...] | None = None) -> Link:
    """Return the slowest link of any group along an axis "tp", "dp" or "pp".

    coordinates: only ranks with these coordinates along the axis communicate; None for all.
    """
    return worst(map(cluster.link, placed_groups(grid, axis, cluster.ranks_per_node, coordinates)))


def worst(links: Iterable[Link]) -> Link:
    """Return the slowest link."""
    return min(links, key=lambda link: (link.bandwidth, -link.latency))
