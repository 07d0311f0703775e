"""How values flow through a rewritten graph: where each is made, and whether a gradient comes back for it."""

import operator
from collections.abc import Mapping

from torch import Tensor
from torch.fx import GraphModule, Node

from ...segment import Collective
from ..ir.aliases import changing, mutation_deps
from ..ir.gradients import passes_gradient
from ..ir.marks import copy_in, reduce_sum, stack
from .rewrite import Rewritten

REDUCTIONS = {reduce_sum: Collective.ALL_REDUCE, stack: Collective.STACK}


class Flow:
    """Facts about the nodes of a rewritten graph.

    unit: node -> the unit that makes its value, in graph order; a node without one is common, a parameter or a
    constant. A reduced value is made where its partial value is, a piece of a tuple where the tuple is, a copy where it
    is first read. after: node -> earlier nodes that write in place to what it reads. written: nodes whose memory is
    written in place later. differentiable: node -> whether a gradient comes back for its value.
    documents: what searches for the documents of packed rows find, where that is known.
    """

    def __init__(self, rewritten: Rewritten, documents: Mapping[Node, Tensor] | None = None):
        self.graph, self.constants, self.trainable = rewritten.graph, rewritten.constants, rewritten.trainable
        graph, self.documents = self.graph, dict(documents or {})
        self.order = {node: place for place, node in enumerate(graph.nodes)}
        self.unit: dict[Node, int] = {}
        for node in graph.nodes:
            unit = self._unit_of(node)
            if unit is not None:
                self.unit[node] = unit
        self.after = mutation_deps(graph)
        changes = changing(graph)
        self.written = {node: None for node in graph.nodes if node in changes}
        self.differentiable: dict[Node, bool] = {}
        for node in graph.nodes:
            self.differentiable[node] = self._takes_gradient(node)

    def _unit_of(self, node: Node) -> int | None:
        if node.op != "call_function":
            return None
        if node.target is operator.getitem or node.target in REDUCTIONS:
            return self.unit.get(node.args[0])
        if node.target is copy_in:
            return min(map(_declared, node.users), default=None) if node.args[0] in self.unit else None
        unit = node.meta.get("unit")
        misplaced = [x.name for x in node.all_input_nodes if x in self.unit and unit is None]
        assert not misplaced, f"{node.name} is common, but reads {misplaced}"
        return unit

    def is_module(self, node: Node) -> bool:
        """Whether it is the body of an opaque operation."""
        return node.op == "get_attr" and isinstance(self.constants.get(str(node.target)), GraphModule)

    def is_parameter(self, node: Node) -> bool:
        return node.op == "get_attr" and node.target not in self.constants

    def behind(self, node: Node) -> Node:
        """A copy of a parameter, of a constant or of a common value is the thing itself."""
        while node.target is copy_in and node not in self.unit:
            node = node.args[0]
        return node

    def _takes_gradient(self, node: Node) -> bool:
        if self.is_parameter(node):
            return node.target in self.trainable
        if node not in self.unit or not passes_gradient(node):
            return False
        return any(self.differentiable[self.behind(x)] for x in node.all_input_nodes)


def _declared(node: Node) -> int:
    """The unit of a node that reads a copy."""
    while "unit" not in node.meta and node.target in (copy_in, operator.getitem, *REDUCTIONS):
        node = node.args[0]
    return node.meta["unit"]
