"""The dataflow of a rewritten graph: which unit computes each value, and which values take a
gradient.
"""

import operator
from collections.abc import Mapping

from torch import Tensor
from torch.fx import GraphModule, Node

from ...segment import Collective
from ..ir.aliases import changing, mutation_deps
from ..ir.gradients import passes_gradient
from ..ir.marks import (
    all_gather,
    copy_in,
    exchange,
    exchange_rows,
    reduce_scatter,
    reduce_sum,
    rotate,
    stack,
    turn_back,
)
from ..ir.nodes import operand
from .rewrite import Rewritten

REDUCTIONS = {
    reduce_sum: Collective.ALL_REDUCE,
    stack: Collective.STACK,
    reduce_scatter: Collective.REDUCE_SCATTER,
    all_gather: Collective.ALL_GATHER,
    exchange: Collective.EXCHANGE,
    exchange_rows: Collective.ROWS,
    rotate: Collective.ROTATE,
    turn_back: Collective.NONE,  # of its gradient alone
}


class Flow:
    """Facts about the nodes of a rewritten graph.

    unit:           node -> the unit that computes it, in graph order. A node without a unit is a
                    common value, a parameter or a constant. A reduced value has the unit of its
                    partial value, an item of a tuple that of the tuple, and a ``copy_in`` the first
                    unit that reads it.
    after:          node -> earlier nodes that write in place to what it reads.
    written:        nodes whose memory is written in place at some time.
    differentiable: node -> whether its value receives a gradient.
    documents:      results of ``ops.documents`` nodes that are known before the graph runs.
    outputs:        the nodes that the graph returns, resolved.
    """

    def __init__(self, rewritten: Rewritten, documents: Mapping[Node, Tensor] | None = None):
        self.graph = rewritten.graph
        self.constants = rewritten.constants
        self.trainable = rewritten.trainable
        graph = self.graph
        self.documents = dict(documents or {})
        self.order = {node: position for position, node in enumerate(graph.nodes)}
        self.unit: dict[Node, int] = {}
        for node in graph.nodes:
            unit = self._unit_of(node)
            if unit is not None:
                self.unit[node] = unit
        (output,) = graph.find_nodes(op="output")
        self.outputs = tuple(map(self.resolve, output.args[0]))
        self.after = mutation_deps(graph)
        changed = changing(graph)
        self.written = {node: None for node in graph.nodes if node in changed}
        self.differentiable: dict[Node, bool] = {}
        for node in graph.nodes:
            self.differentiable[node] = self._is_differentiable(node)

    def _unit_of(self, node: Node) -> int | None:
        if node.op != "call_function":
            return None
        if node.target is operator.getitem or node.target in REDUCTIONS:
            return self.unit.get(operand(node))
        if node.target is copy_in:
            return (
                min(map(_declared_unit, node.users), default=None)
                if node.args[0] in self.unit
                else None
            )
        unit = node.meta.get("unit")
        misplaced = [x.name for x in node.all_input_nodes if x in self.unit and unit is None]
        assert not misplaced, f"{node.name} is common, but reads {misplaced}"
        return unit

    def is_module(self, node: Node) -> bool:
        """Whether a node is the body of a higher-order operation, a GraphModule."""
        return node.op == "get_attr" and isinstance(
            self.constants.get(str(node.target)), GraphModule
        )

    def is_parameter(self, node: Node) -> bool:
        return node.op == "get_attr" and node.target not in self.constants

    def trains(self, weight: Node) -> bool:
        """Whether a weight, or what it is a copy of, receives a gradient."""
        return self.differentiable[self.resolve(weight)]

    def resolve(self, node: Node) -> Node:
        """Return what a ``copy_in`` of a parameter, constant or common value copies; any other node
        itself.
        """
        while node.target is copy_in and node not in self.unit:
            node = operand(node)
        return node

    def _is_differentiable(self, node: Node) -> bool:
        if self.is_parameter(node):
            return node.target in self.trainable
        if node not in self.unit or not passes_gradient(node):
            return False
        return any(self.differentiable[self.resolve(x)] for x in node.all_input_nodes)


def _declared_unit(node: Node) -> int:
    """The unit of a node that reads a copy."""
    while "unit" not in node.meta and node.target in (copy_in, operator.getitem, *REDUCTIONS):
        node = operand(node)
    return node.meta["unit"]
