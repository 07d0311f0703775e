"""Which segment of its unit a node belongs to: how many collectives lie on the longest path to it."""

import operator
from collections.abc import Sequence

from torch.fx import Node

from ...errors import TraceError
from ..ir.aliases import aliased, storages, writers
from ..ir.marks import copy_in
from .flow import REDUCTIONS, Flow


def levels(flow: Flow, unit: int) -> dict[Node, int]:
    """Node -> level, for the nodes of a unit in graph order, without reductions, which are borders.

    Replicated nodes have even levels, sharded nodes odd ones. So a segment is replicated or sharded as a whole, a
    forward waits where a backward does, and both launch at the same places. A copy into sharded work counts as the
    first node of that work.
    """
    nodes = [node for node, place in flow.unit.items() if place == unit]
    level: dict[Node, int] = {}
    reached: dict[Node, int] = {}
    for node in nodes:
        above = (*node.all_input_nodes, *flow.after.get(node, ()))
        base = max((reached[x] for x in above if x in reached), default=0)
        if node.target in REDUCTIONS:
            reached[node] = base + 1
            continue
        reached[node] = level[node] = base + (base % 2 != is_sharded(node))
    _sink(flow, nodes, level)
    return level


def is_sharded(node: Node) -> bool:
    """Whether a node is computed on this rank's part; a piece of a tuple is if the tuple is."""
    if node.target is copy_in:
        return True
    if node.target is operator.getitem and "sharded" not in node.meta:
        return is_sharded(node.args[0])
    return bool(node.meta.get("sharded", False))


def _sink(flow: Flow, nodes: Sequence[Node], level: dict[Node, int]) -> None:
    """Compute from parameters alone (1 + weight) where it is used, not in the unit's first segment: it would cross."""
    free: dict[Node, bool] = {}
    for node in nodes:
        above = [x for x in node.all_input_nodes if x in flow.unit]
        free[node] = node in level and node.target is not copy_in and all(free.get(x, False) for x in above)
        free[node] &= node not in flow.after and not aliased(node)[1]
    present = sorted(dict.fromkeys(level.values()))
    for node in reversed(nodes):
        users = list(node.users)
        if not free[node] or not users or any(user not in level for user in users):
            continue
        limit = min(level[user] for user in users)
        level[node] = max(x for x in present if x <= limit and x % 2 == level[node] % 2)


def check_in_place(flow: Flow, segment: dict[Node, tuple[int, int]]) -> None:
    """What is written in place stays inside one segment up to its last write.

    Raises TraceError where a segment would write to what another one made or reads before: between segments only
    values travel, and their order in the graph is lost.
    """
    root = storages(flow.graph)
    for storage, writes in writers(flow.graph).items():
        home, last = segment.get(writes[-1]), flow.order[writes[-1]]
        for node in flow.unit if home is not None else ():
            if flow.order[node] > last or node.target in REDUCTIONS:
                continue
            if any(root[x] is storage for x in (node, *node.all_input_nodes)) and segment.get(node) != home:
                reason = "it is changed in place in another segment than where it is made or read"
                raise TraceError("value", storage.name, reason, "Write the model's operation out of place")
