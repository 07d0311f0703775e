"""Finds the documents of packed rows from the position ids of a batch, before the graph runs."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ... import ops
from ..ir.marks import copy_in
from ..ir.nodes import called, operand

POSITIONS = "position_ids"


def known_documents(
    graph: Graph, constants: Mapping[str, Any], positions: Tensor
) -> dict[Node, Tensor]:
    """Return the result of each ``ops.documents`` node of ``graph`` for a batch with these position
    ids.

    Nodes whose mask depends on any other entry of the batch are left out: all ranks must plan
    alike, and the positions are all that every rank knows.

    constants: values of the graph's get_attr nodes that are not parameters.
    positions: ``position_ids`` of the batch.
    """
    bounds = {}
    for node in graph.find_nodes(op="call_function", target=ops.documents):
        try:
            bounds[node] = _evaluate(node, constants, positions, {})
        except _NotConstantError:
            continue
    return bounds


class _NotConstantError(Exception):
    """A value depends on more than positions and constants."""


def _evaluate(
    node: Node, constants: Mapping[str, Any], positions: Tensor, values: dict[Node, Any]
) -> Any:
    if node in values:
        return values[node]
    if node.op == "placeholder" and node.target == POSITIONS:
        value = positions
    elif node.op == "get_attr" and str(node.target) in constants:
        value = constants[str(node.target)]
    elif node.op != "call_function":
        raise _NotConstantError
    elif node.target is copy_in:
        value = _evaluate(operand(node), constants, positions, values)
    else:
        args, kwargs = map_arg(
            (node.args, node.kwargs), lambda each: _evaluate(each, constants, positions, values)
        )
        value = called(node)(*args, **kwargs)
    values[node] = value
    return value
