"""Fusions of linear layers: those that share an input, and those that recompute an activation
before them.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ... import ops
from ..ir.inplace import call as new_node
from ..ir.nodes import constant, is_op, operand, operands
from ..lowering.flow import REDUCTIONS
from .patterns import Either, Match, Var, call
from .pointwise import put, value

aten = torch.ops.aten

_GATED = call(
    "gated",
    call("linear", Var("x"), Var("gate"), None),
    call("linear", Var("x"), Var("up"), None),
    Var("activation"),
)


def _join_gate_and_up(graph: Graph, root: Node, match: Match) -> Node | None:
    weights = [match["gate"], match["up"]]
    if not all(map(_is_weight, weights)) or weights[0] is weights[1]:
        return None
    product = new_node(graph, root, ops.joined_linear, match["x"], weights)
    return put(graph, root, ops.gated_halves, product, match["activation"])


ROWS = (("gate and up as one", _GATED, _join_gate_and_up),)

# A linear layer after an activation recomputes its input in the backward instead of saving it.
_HALVES = Either((call("gated_halves", Var("x"), Var("activation")), call("swiglu", Var("x"))))
_GELU = Either(
    (
        call("bias_gelu", Var("x"), Var("inner"), Var("activation")),
        call("gelu_tanh", Var("x")),
        call("gelu", Var("x"), Var("approximate")),
    )
)


def _linears_of(inner: Either) -> Either:
    """Return a pattern for linear layers with input ``inner`` and a weight stored as [out, in] or
    [in, out]; partial products of the latter are summed as rows, before their bias.
    """
    rows = call("view|reshape|_unsafe_view", inner, Var("rows"))
    stored = call("addmm", Var("bias"), rows, Var("weight"), 1, 1)
    return Either(
        (
            call("linear", inner, Var("weight"), Var("bias")),
            call("view|reshape|_unsafe_view", stored, Var("shape")),
            call("mm", rows, Var("weight")),
        )
    )


def _recompute_gated(graph: Graph, root: Node, match: Match) -> Node | None:
    features = value(match["x"]).shape[-1] // 2
    activation = match.values.get("activation", "silu")
    return _fuse_recomputed(
        graph, root, match, ops.gated_linear, features=features, more=(activation,)
    )


def _recompute_gelu(graph: Graph, root: Node, match: Match) -> Node | None:
    features = value(match["x"]).shape[-1]
    activation = match.values.get("activation", "gelu_tanh")
    if match.values.get("approximate") == "none":
        activation = "gelu"
    more = (match.values.get("inner"), activation)
    return _fuse_recomputed(graph, root, match, ops.gelu_linear, features=features, more=more)


def _fuse_recomputed(
    graph: Graph,
    root: Node,
    match: Match,
    operation: Callable[..., Tensor],
    features: int,
    more: tuple[Any, ...],
) -> Node | None:
    """Fuse a linear layer with the activation before it.

    operation: of ``ops``; ``more`` are its arguments after the bias.
    features:  number that the activation has.
    """
    x = match["x"]
    weight = match["weight"]
    transposed = "rows" in match.values
    if not _is_weight(weight) or value(weight).shape[not transposed] != features:
        return None
    if "shape" in match.values and tuple(match["shape"][:-1]) != tuple(value(x).shape[:-1]):
        return None
    if is_op(root, "mm"):
        x = new_node(graph, x, aten.reshape.default, x, [-1, value(x).shape[-1]])
    return put(graph, root, operation, x, weight, match.values.get("bias"), *more, transposed)


RECOMPUTED = "recomputed activation"
RECOMPUTED_ROWS = (
    (RECOMPUTED, _linears_of(_HALVES), _recompute_gated),
    (RECOMPUTED, _linears_of(_GELU), _recompute_gelu),
)


def share_inputs(graph: Graph, written: set[Node]) -> int:
    """Fuse linear layers that read the same input in one unit, all sharded or all replicated;
    return how many groups.

    written: nodes whose memory is written in place.
    """
    groups: dict[tuple, list[Node]] = {}
    for node in graph.nodes:
        if is_op(node, "linear") and _can_share(node, written):
            groups.setdefault(
                (node.args[0], node.meta["unit"], node.meta.get("sharded", False)), []
            ).append(node)
    shared = [nodes for nodes in groups.values() if len(nodes) > 1]
    for nodes in shared:
        _share(graph, nodes)
    return len(shared)


def _share(graph: Graph, nodes: list[Node]) -> None:
    first = nodes[0]
    input = operand(first)
    weights = [operand(node, 1) for node in nodes]
    biases = [_bias(node) for node in nodes]
    order = {node: index for index, node in enumerate(graph.nodes)}
    for parameter in (*weights, *biases):
        if parameter is not None and order[parameter] > order[first]:
            first.prepend(parameter)
    with graph.inserting_before(first):
        linears = new_node(graph, first, ops.linears, input, weights, biases)
        outputs = [
            new_node(graph, node, operator.getitem, linears, index)
            for index, node in enumerate(nodes)
        ]
    for node, output in zip(nodes, outputs, strict=True):
        node.replace_all_uses_with(output)
        graph.erase_node(node)


def _can_share(node: Node, written: set[Node]) -> bool:
    """Whether a linear layer may join a group: it reads parameters directly and its result is not
    all-reduced.
    """
    input, weight = operands(node, 0, 1)
    bias = _bias(node)
    reduced = any(user.target in REDUCTIONS for user in node.users)
    if (
        node.meta.get("unit") is None
        or reduced
        or written & {node, input, weight, bias}
        or not node.meta.get("grad")
    ):
        return False
    return (
        input.meta.get("grad", False)
        and _is_weight(weight)
        and (bias is None or bias.op == "get_attr")
    )


def _bias(node: Node) -> Node | None:
    return constant(node, 2) if len(node.args) > 2 else None


def _is_weight(node: object) -> bool:
    return isinstance(node, Node) and node.op == "get_attr" and value(node).dim() == 2
