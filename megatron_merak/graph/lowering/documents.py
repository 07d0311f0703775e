"""The documents of packed rows, as far as a graph can tell them from the positions of a batch before it runs."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ... import ops
from ..ir.marks import copy_in

POSITIONS = "position_ids"


def known_documents(graph: Graph, constants: Mapping[str, Any], positions: Tensor) -> dict[Node, Tensor]:
    """What each search for documents in ``graph`` finds in a batch with these positions.

    Nothing of a mask that another entry of the batch takes part in: ranks that plan alike know the positions alone.
    """
    found = {}
    for node in graph.find_nodes(op="call_function", target=ops.documents):
        try:
            found[node] = _value(node, constants, positions, {})
        except _UnknownError:
            continue
    return found


class _UnknownError(Exception):
    """A value follows from more than positions and constants."""


def _value(node: Node, constants: Mapping[str, Any], positions: Tensor, made: dict[Node, Any]) -> Any:
    if node in made:
        return made[node]
    if node.op == "placeholder" and node.target == POSITIONS:
        value = positions
    elif node.op == "get_attr" and str(node.target) in constants:
        value = constants[str(node.target)]
    elif node.op != "call_function":
        raise _UnknownError
    elif node.target is copy_in:
        value = _value(node.args[0], constants, positions, made)
    else:
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: _value(each, constants, positions, made))
        value = node.target(*args, **kwargs)
    made[node] = value
    return value
