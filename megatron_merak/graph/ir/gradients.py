"""Which operations pass a gradient back: one definition for capture, sharding and lowering."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .aliases import mutation_deps
from .operators import facts


def passes_gradient(node: Node) -> bool:
    """Whether a gradient of a node's result flows back to its differentiable inputs."""
    if facts(node).stops_gradient:
        return False
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and not node.args[0]:
        return False
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()


def reached(graph: Graph, results: Iterable[Node]) -> dict[Node, None]:
    """Return all nodes that a gradient of some results reaches."""
    after = mutation_deps(graph)
    nodes: dict[Node, None] = {}
    pending = list(results)
    while pending:
        node = pending.pop()
        if node in nodes:
            continue
        nodes[node] = None
        if node.op == "call_function" and passes_gradient(node):
            # What is written in place into memory that a node reads has its gradient, too.
            pending += [*node.all_input_nodes, *after.get(node, ())]
    return nodes
