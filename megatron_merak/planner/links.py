"""What joins ranks of a plan that send to one another, as the rank order puts them into nodes."""

import functools
from collections.abc import Iterable

from megatron_merak.cluster import Cluster, Link
from megatron_merak.plan import Grid, placed_groups


@functools.cache
def link_along(cluster: Cluster, grid: Grid, axis: str, places: tuple[int, ...] | None = None) -> Link:
    """The link of a group along "tp", "dp" or "pp", of the group that is placed worst. places: of its ranks with these
    coordinates along the axis alone; None for all."""
    return worst(map(cluster.link, placed_groups(grid, axis, cluster.ranks_per_node, places)))


def worst(links: Iterable[Link]) -> Link:
    """The slowest of some links."""
    return min(links, key=lambda link: (link.bandwidth, -link.latency))
