"""What ranks compute while they exchange rows of tokens: a shared expert, whose tokens need none of
these.

    before     rows are sent ------ shared expert ------ rows have arrived, experts compute

Products that an exchange does not need, and that do not need it, become segments of their own between
its launch and the wait for it, with what leads to them alone and what follows from them. A backward
runs the same segments in reverse, and so exchanges gradients behind them.

A value that such work reads and others read, too, is passed on once for each of its readers: its
gradient is then added up in the order that it has without all this, to the bit.
"""

import operator
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence

import torch
from torch.fx import Node

from .ir.aliases import aliased
from .ir.kinds import kinds, kinds_like
from .ir.marks import copy_in, exchange, exchange_rows, rotate, rows_of, turn_back
from .ir.nodes import is_random, operand
from .lowering.flow import REDUCTIONS, Flow
from .lowering.rewrite import Rewritten
from .more_flops import product_flops

aten = torch.ops.aten

# They stay where they are, as what they are made for does.
_SENT_ON = (exchange, exchange_rows, rotate, turn_back)


def put_behind_exchanges(rewritten: Rewritten) -> None:
    """Say of nodes of a fused graph behind which exchange of rows they are computed.

    ``behind`` in the meta of a node is the mark of that exchange. ``late`` are those that follow from
    such work and from a collective of its own: they are computed where they are read.
    """
    graph = rewritten.graph
    if all(rows_of(node) is None for node in graph.nodes):
        return
    flow = Flow(rewritten)
    units: dict[int, list[Node]] = {}
    for node, unit in flow.unit.items():
        units.setdefault(unit, []).append(node)
    found = []
    for nodes in units.values():
        together: dict[Hashable, list[Node]] = {}  # rows, and their weights
        for node in nodes:
            rows = rows_of(node)
            if rows is not None:
                together.setdefault(rows, []).append(node)
        for marks in together.values():
            work = _Work(flow, nodes, marks)
            for node in work.behind:
                node.meta["behind"] = marks[0]
            for node in work.late:
                node.meta["late"] = True
            found.append(work.behind)
    for behind in found:
        _pass_on_once_each(flow, behind)


class _Work:
    """What is computed behind one exchange.

    nodes: of a unit, in graph order.
    marks: of values that are exchanged together.

    Attributes:
    behind: between its launch and the wait for it, in graph order; empty if no product is.
    late:   follows from that and from a collective.
    """

    def __init__(self, flow: Flow, nodes: Sequence[Node], marks: Sequence[Node]):
        self.flow = flow
        self.nodes = nodes
        self.behind: dict[Node, None] = {}
        self.late: dict[Node, None] = {}
        free = self._free(marks)
        computed = [node for node in free if node.target not in REDUCTIONS]
        products = [node for node in computed if product_flops(node).forward]
        if products:
            self._divide(free, self._above(products, dict.fromkeys(computed)))
        if not any(node in self.behind for node in products):
            self.behind.clear()
            self.late.clear()

    def _reads(self, node: Node) -> tuple[Node, ...]:
        return (*node.all_input_nodes, *self.flow.after.get(node, ()))

    def _above(self, start: Iterable[Node], inside: Container[Node]) -> dict[Node, None]:
        """Return the nodes ``inside`` that ``start`` depends on, with these."""
        found = dict.fromkeys(start)
        for node in reversed(self.nodes):
            if node in found:
                found |= {x: None for x in self._reads(node) if x in inside}
        return found

    def _below(self, start: Iterable[Node]) -> dict[Node, None]:
        """Return what depends on nodes, with these."""
        found = dict.fromkeys(start)
        for node in self.nodes:
            if any(x in found for x in self._reads(node)):
                found[node] = None
        return found

    def _free(self, marks: Sequence[Node]) -> dict[Node, None]:
        """Return the nodes that may move behind marks, with all in this unit that follow from them and
        not from the marks.
        """
        unit = dict.fromkeys(self.nodes)
        below = self._below(marks)
        related = below | self._above(marks, unit)
        constant = self._constant()
        free: dict[Node, None] = {}
        for node in reversed(self.nodes):
            if node in related or node in constant or self._stays(node):
                continue
            if all(x in free or x in below for x in node.users if x in unit):
                free[node] = None
        ordered: dict[Node, None] = {}
        for node in reversed(free):
            # no tuple passes from segment to segment
            if node.target is not operator.getitem or operand(node) in ordered:
                ordered[node] = None
        return ordered

    def _constant(self) -> dict[Node, None]:
        """Return what depends on parameters alone, which is computed where it is read in any case."""
        found: dict[Node, None] = {}
        for node in self.nodes:
            if node.target is copy_in:
                continue
            if all(x in found or x.op == "get_attr" for x in node.all_input_nodes):
                found[node] = None
        return found

    def _stays(self, node: Node) -> bool:
        """Whether a node may not move: random numbers, and memory that is written in place, depend on
        the segment.
        """
        moved = node.meta.get("apart", False) or "behind" in node.meta or "late" in node.meta
        written = any(x in self.flow.written for x in (node, *node.all_input_nodes))
        writes = bool(aliased(node)[1])
        return moved or written or writes or node.target in _SENT_ON or is_random(node)

    def _divide(self, free: Mapping[Node, None], wanted: Container[Node]) -> None:
        """Find ``behind`` and ``late`` among nodes that may move.

        wanted: products, and what leads to them from the last collective on.
        """
        after: dict[Node, None] = {}  # collectives of what is behind
        for node in free:
            reads = self._reads(node)
            follows = any(x in self.behind or x in self.late for x in reads)
            if node.target in REDUCTIONS:
                if follows:
                    after[node] = None
            elif any(x in after or x in self.late for x in reads):
                self.late[node] = None
            elif node in wanted or follows:
                self.behind[node] = None


def _pass_on_once_each(flow: Flow, behind: Mapping[Node, None]) -> None:
    """Let nodes read values through an alias of their own where others of their unit read them."""
    for node in behind:
        for x in node.all_input_nodes:
            if x not in flow.unit or x in behind or kinds(x) != kinds(node):
                continue
            others = [user for user in x.users if user not in behind]
            if not flow.differentiable[x] or not any(_is_beside(flow, node, y) for y in others):
                continue
            with node.graph.inserting_before(node):
                own = node.graph.call_function(aten.alias.default, (x,))
            own.meta = {"val": x.meta["val"], "grad": True, **kinds_like(node)}
            own.meta["unit"] = flow.unit[node]
            node.replace_input_with(x, own)


def _is_beside(flow: Flow, node: Node, other: Node) -> bool:
    """Whether another node computes in the unit of a node."""
    return flow.unit.get(other) == flow.unit[node] and other.target not in REDUCTIONS
