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
from ..ir.nodes import is_op, operand
from .adapters import can_share, fit_together, is_weight, join, layer_of
from .fp8 import Fp8Weights, in_fp8
from .patterns import Either, Match, Var, call
from .pointwise import put, value

aten = torch.ops.aten

_GATED = call(
    "gated",
    call("linear|adapted_linear", Var("x")),
    call("linear|adapted_linear", Var("x")),
    Var("activation"),
)


def _join_gate_and_up(graph: Graph, root: Node, match: Match) -> Node | None:
    layers = [layer for place in (0, 1) if (layer := layer_of(operand(root, place))) is not None]
    weights = [layer.weight for layer in layers]
    if len(layers) < 2 or not all(map(is_weight, weights)) or weights[0] is weights[1]:
        return None
    if any(layer.bias is not None for layer in layers) or not fit_together(layers):
        return None
    product = join(graph, root, layers)
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
    if not is_weight(weight) or value(weight).shape[not transposed] != features:
        return None
    if "shape" in match.values and tuple(match["shape"][:-1]) != tuple(value(x).shape[:-1]):
        return None
    if is_op(root, "mm"):
        x = new_node(graph, x, aten.reshape.default, x, [-1, value(x).shape[-1]])
    return put(graph, root, operation, x, weight, match.values.get("bias"), *more, transposed)


def _of_experts(inner: Any) -> Any:
    return call("grouped_linear", inner, Var("weight"), Var("ends"), Var("transposed"))


def _recompute_grouped(graph: Graph, root: Node, match: Match) -> Node | None:
    weight = match["weight"]
    transposed = match["transposed"]
    if weight.op != "get_attr":
        return None
    weighted = match.values.get("weights")
    activation = match.values.get("activation", "silu")
    operands = (match["x"], weight, match["ends"], weighted, activation, transposed)
    return put(graph, root, ops.gated_grouped_linear, *operands)


RECOMPUTED = "recomputed activation"
_WEIGHTED = call("weighted_swiglu", Var("x"), Var("weights"))
RECOMPUTED_ROWS = (
    (RECOMPUTED, _linears_of(_HALVES), _recompute_gated),
    (RECOMPUTED, _linears_of(_GELU), _recompute_gelu),
    (RECOMPUTED, _of_experts(Either((_WEIGHTED, *_HALVES.patterns))), _recompute_grouped),
)


def share_inputs(graph: Graph, written: set[Node], fp8: Fp8Weights | None = None) -> int:
    """Fuse linear layers that read the same input in one unit, all sharded or all replicated;
    return how many groups.

    written: nodes whose memory is written in place.
    fp8:     the linear layers that compute in fp8, each together with others of these.
    """
    groups: dict[tuple, list[Node]] = {}
    for node in graph.nodes:
        if can_share(node, written):
            home = (node.meta["unit"], node.meta.get("sharded", False), in_fp8(node, fp8))
            groups.setdefault((node.args[0], *home), []).append(node)
    shared = [nodes for nodes in groups.values() if len(nodes) > 1]
    shared = [nodes for nodes in shared if not any(map(_reads_hidden, nodes))]
    for nodes in shared:
        _share(graph, nodes)
    return len(shared)


def _share(graph: Graph, nodes: list[Node]) -> None:
    first = nodes[0]
    layers = [layer for node in nodes if (layer := layer_of(node)) is not None]
    order = {node: index for index, node in enumerate(graph.nodes)}
    for parameter in (parameter for layer in layers for parameter in layer.parameters):
        if order[parameter] > order[first]:
            first.prepend(parameter)
    views = all(map(_is_kept, nodes))
    with graph.inserting_before(first):
        linears = join(graph, first, layers, views)
        outputs = [
            new_node(graph, node, operator.getitem, linears, index)
            for index, node in enumerate(nodes)
        ]
    for node, output in zip(nodes, outputs, strict=True):
        node.replace_all_uses_with(output)
        graph.erase_node(node)


def _reads_hidden(node: Node) -> bool:
    """Whether an adapter of a layer reads what is computed after other layers of its input."""
    layer = layer_of(node)
    return layer is not None and layer.hidden is not None


_VIEWS = ("view", "reshape", "_unsafe_view", "transpose")
_KEEPING = (ops.rms_norm, ops.layer_norm, ops.causal_attention, ops.attention)


def _is_kept(node: Node) -> bool:
    """Whether the backward of what reads a value, or a view of it, keeps it."""
    if node.target in _KEEPING:
        rate = ops.row(node.target).dropout
        # on a CPU attention with dropout keeps copies of its own
        return rate is None or bool(node.args[rate] == 0.0)
    views = (user for user in node.users if user.target in _KEEPING or is_op(user, *_VIEWS))
    return any(map(_is_kept, views))
