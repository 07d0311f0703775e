"""How the groups of a rank grid are placed on nodes: ranks are numbered node by node."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from megatron_merak.plan.parts import AXES, Grid


def placed_groups(
    grid: Grid, axis: str, ranks_per_node: int, places: Sequence[int] | None = None
) -> list[list[int]]:
    """Return one of the groups along an axis for each way in which they are placed on nodes,
    without full nodes.

    places: use only groups of these coordinates along the axis; None: all.
    """
    axes = sorted(axis.split("-"), key=grid.stride)
    stride = grid.stride(axes[0])
    extent = math.prod(getattr(grid, each) for each in axes)
    block = stride * extent
    if any(grid.stride(b) != grid.stride(a) * getattr(grid, a) for a, b in pairwise(axes)):
        return _placed_apart(grid, axis, ranks_per_node, places)
    inner = range(min(stride, ranks_per_node))
    outer = range(min(grid.size // block, ranks_per_node))
    firsts = sorted(
        {(block * above + below) % ranks_per_node for above in outer for below in inner}
    )
    return [
        [first + place * stride for place in (range(extent) if places is None else places)]
        for first in firsts
    ]


def _placed_apart(
    grid: Grid, axis: str, ranks_per_node: int, places: Sequence[int] | None
) -> list[list[int]]:
    """Return the same where the ranks of a group are not evenly spaced."""
    found = {}
    for group in grid.groups(axis):
        shift = group[0] // ranks_per_node * ranks_per_node
        ranks = [
            group[place] - shift for place in (range(len(group)) if places is None else places)
        ]
        found[tuple(ranks)] = ranks
    return list(found.values())


def placement(grid: Grid, ranks_per_node: int) -> str:
    """Return a line on the nodes of a grid and the placement of its groups; on one node, on its
    order, unless default.
    """
    order = "-".join(axis for axis in grid.order.split("-") if axis != "cp" or grid.cp > 1)
    nodes = -(-grid.size // ranks_per_node)
    if nodes == 1:
        return "" if grid.order == Grid().order else f"ranks are ordered {order}"
    groups = [
        f"{axis} {_spread(grid, axis, ranks_per_node)}" for axis in AXES if getattr(grid, axis) > 1
    ]
    return f"{nodes:,} nodes of {ranks_per_node}, ranks ordered {order}: {', '.join(groups)}"


def _spread(grid: Grid, axis: str, ranks_per_node: int) -> str:
    counts = [
        Counter(rank // ranks_per_node for rank in group)
        for group in placed_groups(grid, axis, ranks_per_node)
    ]
    nodes = max(map(len, counts))
    spreads = {ranks for count in counts for ranks in count.values()}
    if nodes == 1:
        return "inside a node"
    if len({len(count) for count in counts}) > 1 or len(spreads) > 1:
        return f"over up to {nodes} nodes"
    (each,) = spreads
    return f"{each} rank{'s' * (each > 1)} in each of {nodes} nodes"
