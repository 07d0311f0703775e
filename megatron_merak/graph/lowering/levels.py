"""Assigns the nodes of a unit to segments, by the number of collectives on the longest path to each
node.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence

from torch.fx import Node

from ...errors import TraceError
from ..ir.aliases import aliased, storages, writers
from ..ir.kinds import NodeKind, kinds
from ..ir.marks import copy_in, rows_of
from ..ir.nodes import operand
from .flow import REDUCTIONS, Flow


def segment_levels(flow: Flow, unit: int, hides: bool = True) -> dict[Node, int]:
    """Return the level of each node of a unit. Reductions are left out: they separate segments.

    Nodes of one level form a segment for each of their kinds, which run in the order of these: no
    node reads one of its level whose kinds come later. Nodes that compute with shards of features
    have odd levels, the others even ones, so that forward and backward launch and wait for
    collectives at the same borders. One that is ``apart`` is not of the segment of what it reads, so that
    what that launches is under way before. A ``copy_in`` belongs to the sharded work that reads it.

    hides: whether nodes are ``behind`` an exchange, in segments between those that launch it and
           that read what arrives, see ``graph.behind``.
    """
    nodes = [node for node, node_unit in flow.unit.items() if node_unit == unit]
    waits = _waits(nodes) if hides else {}
    level: dict[Node, int] = {}
    reached: dict[Node, int] = {}
    for node in _ordered(flow, nodes, waits):
        above = (*node.all_input_nodes, *flow.after.get(node, ()))
        others = waits.get(node, ())
        base = max((reached[x] for x in (*above, *others) if x in reached), default=0)
        if node.target in REDUCTIONS:
            reached[node] = base + 1
            continue
        own = base + (base % 2 != (NodeKind.SHARDS in kinds(node)))
        apart = (*others, *above) if node.meta.get("apart", False) else others
        if any(level.get(x) == own for x in apart):
            own += 2
        if any(level.get(x) == own and kinds(x) > kinds(node) for x in above):
            own += 2
        reached[node] = own
        level[node] = own
    _delay(flow, nodes, level, hides)
    return level


def _waits(nodes: Sequence[Node]) -> dict[Node, tuple[Node, ...]]:
    """Return what nodes of a unit come after without reading it: those behind an exchange after what
    launches it, and what reads the exchanged rows after those.
    """
    behind: dict[Node, list[Node]] = {}
    waits: dict[Node, tuple[Node, ...]] = {}
    for node in nodes:
        mark = node.meta.get("behind")
        if mark is not None:
            behind.setdefault(mark, []).append(node)
            waits[node] = (operand(mark),)
    for mark, hidden in behind.items():
        together = [node for node in nodes if rows_of(node) == rows_of(mark)]
        for reader in dict.fromkeys(user for node in together for user in node.users):
            waits[reader] = (*waits.get(reader, ()), *hidden)
    return waits


def _ordered(
    flow: Flow, nodes: Sequence[Node], waits: Mapping[Node, Sequence[Node]]
) -> Iterator[Node]:
    """Yield the nodes of a unit in graph order, but each after all that it waits for."""
    left = dict.fromkeys(nodes)
    while left:
        for node in list(left):
            above = (*node.all_input_nodes, *flow.after.get(node, ()), *waits.get(node, ()))
            if not any(x in left for x in above):
                del left[node]
                yield node


def _delay(flow: Flow, nodes: Sequence[Node], level: dict[Node, int], hides: bool) -> None:
    """Move what depends on parameters alone, such as ``1 + weight``, to the segment that uses it, and
    what is ``late``.

    In the first segment of the unit its value would have to be passed from segment to segment.
    """
    free: dict[Node, bool] = {}
    for node in nodes:
        above = [x for x in node.all_input_nodes if x in flow.unit]
        free[node] = (
            node in level and node.target is not copy_in and all(free.get(x, False) for x in above)
        )
        free[node] &= node not in flow.after and not aliased(node)[1]
    present = sorted(dict.fromkeys(level.values()))
    for node in reversed(nodes):
        users = list(node.users)
        late = hides and node.meta.get("late", False)
        stays = hides and "behind" in node.meta
        if stays or not (free[node] or late):
            continue
        if users and all(user in level for user in users):
            last = min((level[user], kinds(user)) for user in users)
            level[node] = max(
                x for x in present if (x, kinds(node)) <= last and x % 2 == level[node] % 2
            )
        # no tuple passes from segment to segment
        for user in users:
            if user.target is operator.getitem:
                level[user] = level[node]


def check_in_place(
    flow: Flow, segment_of: Mapping[Node, tuple[int, int, tuple[NodeKind, ...]]]
) -> None:
    """Check that memory written in place is used by one segment only, up to its last write.

    segment_of: node -> (unit, level, kinds).

    Raises TraceError if a segment writes to what another one computes, or reads before that write:
    segments exchange values only and do not keep the graph's order.
    """
    root = storages(flow.graph)
    for storage, writes in writers(flow.graph).items():
        home = segment_of.get(writes[-1])
        last = flow.order[writes[-1]]
        for node in flow.unit if home is not None else ():
            if flow.order[node] > last or node.target in REDUCTIONS:
                continue
            if (
                any(root[x] is storage for x in (node, *node.all_input_nodes))
                and segment_of.get(node) != home
            ):
                reason = (
                    "it is changed in place in another segment than one that computes or reads it"
                )
                raise TraceError(
                    "value", storage.name, reason, "Write the model's operation out of place"
                )
