"""Values that are computed from one parameter and nothing else, such as its transpose: sharded with
the parameter.
"""

from collections.abc import Container, Mapping

from torch.fx import Node

from ..ir.nodes import op_name
from .placement import NodeLayout


def source(node: Node) -> Node | None:
    """Return the one value that a node is computed from, not counting integer indices into it; None
    otherwise.
    """
    inputs = node.all_input_nodes
    if (
        node.op != "call_function"
        or not inputs
        or len(inputs) > 1
        and op_name(node) not in ("index", "index_select")
    ):
        return None
    return inputs[0]


def chain_to_parameter(
    node: Node, parameters: Container[Node], layouts: Mapping[Node, NodeLayout]
) -> list[Node]:
    """Return the nodes from ``node`` to the one parameter that it is computed from; [] if there is
    none.
    """
    chain = [node]
    while chain[-1] not in parameters:
        before = source(chain[-1])
        if before is None or isinstance(layouts[chain[-1]], tuple):
            return []
        chain.append(before)
    return chain


def unread_functions(parameter: Node, layouts: Mapping[Node, NodeLayout]) -> list[Node] | None:
    """Return the nodes derived from ``parameter`` that have layouts, in graph order.

    None if a node with a layout has read the parameter, or one of these, together with other
    values.
    """
    functions: list[Node] = []
    todo = [parameter]
    while todo:
        node = todo.pop()
        for user in node.users:
            if user not in layouts or user in functions:
                continue
            if source(user) is not node:
                return None
            functions.append(user)
            todo.append(user)
    return sorted(functions)
