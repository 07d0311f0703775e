"""A rewritten graph without its dropout and its noise, so that two ways to run a batch can be compared."""

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from ..ir.nodes import is_random, op_name

_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")


def undropped(graph: Graph) -> None:
    """Set every probability of dropout to 0, and what ``rand_like`` draws to its mean, in place; other random numbers
    stay."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or not is_random(node):
            continue
        if op_name(node) in _DROPOUTS:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif op_name(node) == "rand_like":
            node.target, node.args = torch.ops.aten.full_like.default, (node.args[0], 0.5)
        elif "dropout" in op_name(node):  # in place: something else may read what it writes
            _set(node, "p")
        elif any(argument.name == "dropout_p" for argument in node.target._schema.arguments):
            _set(node, "dropout_p")
    graph.lint()


def _set(node: Node, name: str) -> None:
    place = [argument.name for argument in node.target._schema.arguments].index(name)
    if place < len(node.args):
        node.update_arg(place, 0.0)
    else:
        node.update_kwarg(name, 0.0)
