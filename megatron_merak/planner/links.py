"""What joins ranks of a plan that send to one another, as the rank order puts them into nodes."""

import functools
from collections.abc import Iterable

from megatron_merak.cluster import Cluster, Link
from megatron_merak.plan import Grid


@functools.cache
def link_along(cluster: Cluster, grid: Grid, axis: str, places: Iterable[int] | None = None) -> Link:
    """The link of a group along "tp", "dp" or "pp", of the group that is placed worst. places: of those coordinates
    along the axis alone, hashable; None for all."""
    stride, places = grid.stride(axis), range(getattr(grid, axis)) if places is None else places
    links = [cluster.link([first + place * stride for place in places]) for first in _firsts(cluster, grid, axis)]
    return min(links, key=lambda link: (link.bandwidth, -link.latency))


def _firsts(cluster: Cluster, grid: Grid, axis: str) -> list[int]:
    """The first ranks of groups along an axis, less whole nodes: one for each way of lying in nodes."""
    node, stride = cluster.ranks_per_node, grid.stride(axis)
    block = stride * getattr(grid, axis)
    inner, outer = range(min(stride, node)), range(min(grid.size // block, node))
    return sorted({(block * above + below) % node for above in outer for below in inner})
