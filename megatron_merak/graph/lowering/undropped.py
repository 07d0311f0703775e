"""Turns off dropout and noise in a rewritten graph, so that two ways to run a batch can be
compared.
"""

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from ... import ops
from ..ir.nodes import is_random, op_name, schema
from ..ir.operators import facts


def undropped(graph: Graph) -> None:
    """Set every dropout probability to 0 and replace ``rand_like`` by its mean, in place.

    Other random numbers stay.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_random(node):
            continue
        on_parts = node.target is ops.dropout_of_parts
        rate = ops.row(node.target).dropout
        if node.target is ops.causal_chunks and rate is not None:
            node.update_arg(rate, 0.0)
            continue
        if not on_parts and not isinstance(node.target, OpOverload):
            continue
        if on_parts or facts(node).drops:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif op_name(node) == "rand_like":
            node.target, node.args = torch.ops.aten.full_like.default, (node.args[0], 0.5)
        # an in-place variant, whose input other nodes may read after it
        elif "dropout" in op_name(node):
            _set_to_zero(node, "p")
        elif any(argument.name == "dropout_p" for argument in schema(node).arguments):
            _set_to_zero(node, "dropout_p")
    graph.lint()


def _set_to_zero(node: Node, name: str) -> None:
    index = [argument.name for argument in schema(node).arguments].index(name)
    if index < len(node.args):
        node.update_arg(index, 0.0)
    else:
        node.update_kwarg(name, 0.0)
