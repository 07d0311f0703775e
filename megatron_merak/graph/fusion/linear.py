"""Linear layers that read the same input: a gate and what it gates as one product, others as one operation."""

import operator

from torch.fx import Graph, Node

from ... import ops
from ..ir.inplace import call as new_node
from ..ir.nodes import is_op
from ..lowering.flow import REDUCTIONS
from .patterns import Any, Either, Found, call
from .pointwise import put, value

_GATED = call(
    "gated",
    call("linear", Any("x"), Any("gate"), None),
    call("linear", Any("x"), Any("up"), None),
    Any("activation"),
)


def _joined(graph: Graph, root: Node, found: Found) -> Node | None:
    weights = [found["gate"], found["up"]]
    if not all(map(_is_weight, weights)) or weights[0] is weights[1]:
        return None
    product = new_node(graph, root, ops.joined_linear, found["x"], weights)
    return put(graph, root, ops.gated_halves, product, found["activation"])


ROWS = (("gate and up as one", _GATED, _joined),)

# A linear layer behind an activation: it computes its input again instead of keeping it.
_HALVES = Either((call("gated_halves", Any("x"), Any("activation")), call("swiglu", Any("x"))))
_GELU = Either((call("bias_gelu", Any("x"), Any("inner"), Any("activation")), call("gelu_tanh", Any("x"))))


def _layers(inner: Either) -> Either:
    """Layers of ``inner`` whose weights are stored as [o, f], or as [f, o]."""
    rows = call("view|reshape|_unsafe_view", inner, Any("rows"))
    stored = call("addmm", Any("bias"), rows, Any("weight"), 1, 1)
    return Either(
        (
            call("linear", inner, Any("weight"), Any("bias")),
            call("view|reshape|_unsafe_view", stored, Any("shape")),
        )
    )


def _of_gate(graph: Graph, root: Node, found: Found) -> Node | None:
    return _recomputed(graph, root, found, ops.gated_linear, found.values.get("activation", "silu"))


def _of_gelu(graph: Graph, root: Node, found: Found) -> Node | None:
    inner = found.values.get("inner"), found.values.get("activation", "gelu_tanh")
    return _recomputed(graph, root, found, ops.gelu_linear, *inner)


def _recomputed(graph: Graph, root: Node, found: Found, operation, *more) -> Node | None:
    transposed, width = "shape" in found.values, value(found["x"]).shape[-1] // (1 + (operation is ops.gated_linear))
    if not _is_weight(found["weight"]) or value(found["weight"]).shape[not transposed] != width:
        return None
    if transposed and tuple(found["shape"][:-1]) != tuple(value(found["x"]).shape[:-1]):
        return None
    return put(graph, root, operation, found["x"], found["weight"], found["bias"], *more, transposed)


RECOMPUTED = "recomputed activation"
RECOMPUTED_ROWS = ((RECOMPUTED, _layers(_HALVES), _of_gate), (RECOMPUTED, _layers(_GELU), _of_gelu))


def share_inputs(graph: Graph, barred: set[Node]) -> int:
    """Make linear layers of one input, in one unit and on one side of the collectives, one operation; returns how many
    groups there were. ``barred``: nodes that share memory with what is written in place."""
    groups: dict[tuple, list[Node]] = {}
    for node in graph.nodes:
        if is_op(node, "linear") and _fits(node, barred):
            groups.setdefault((node.args[0], node.meta["unit"], node.meta.get("sharded", False)), []).append(node)
    found = [nodes for nodes in groups.values() if len(nodes) > 1]
    for nodes in found:
        _share(graph, nodes)
    return len(found)


def _share(graph: Graph, nodes: list[Node]) -> None:
    first, input = nodes[0], nodes[0].args[0]
    weights, biases = [node.args[1] for node in nodes], [_bias(node) for node in nodes]
    known = {node: place for place, node in enumerate(graph.nodes)}
    for parameter in (*weights, *biases):
        if parameter is not None and known[parameter] > known[first]:
            first.prepend(parameter)
    with graph.inserting_before(first):
        made = new_node(graph, first, ops.linears, input, weights, biases)
        pieces = [new_node(graph, node, operator.getitem, made, place) for place, node in enumerate(nodes)]
    for node, piece in zip(nodes, pieces, strict=True):
        node.replace_all_uses_with(piece)
        graph.erase_node(node)


def _fits(node: Node, barred: set[Node]) -> bool:
    """Whether it may be one of a group: its parameters are as they are stored, its result goes through no reduction."""
    input, weight, bias = node.args[0], node.args[1], _bias(node)
    alone = any(user.target in REDUCTIONS for user in node.users)
    if node.meta.get("unit") is None or alone or barred & {node, input, weight, bias} or not node.meta.get("grad"):
        return False
    return input.meta.get("grad", False) and _is_weight(weight) and (bias is None or bias.op == "get_attr")


def _bias(node: Node) -> Node | None:
    return node.args[2] if len(node.args) > 2 else None


def _is_weight(node: object) -> bool:
    return isinstance(node, Node) and node.op == "get_attr" and value(node).dim() == 2
