"""Fusions of routed rows: gathered by expert, weighted in their activation, multiplied with the
weight of their expert, added up by token.

An index's backward adds rows up one after the other; those of ``ops.rows`` gather them.
"""

import operator

import torch
from torch.fx import Graph, Node

from ... import ops
from ..ir.inplace import call as new_node
from ..ir.nodes import called, is_op, operand
from ..ir.operators import facts
from ..sharding.experts import GROUPED
from .patterns import Match, Var, call, mul, narrowed, widened
from .pointwise import put, value


def _inverse_order(graph: Graph, root: Node, match: Match) -> Node | None:
    order = match["order"]
    return put(graph, root, ops.inverse_order, order) if _is_order(order) else None


def _permuted(graph: Graph, root: Node, match: Match) -> Node | None:
    x = match["x"]
    order = match["order"]
    if not _is_order(order) or len(value(x)) != len(value(order)):
        return None
    inverse = _inverse(graph, order)
    return put(graph, root, ops.permuted, x, order=order, inverse=inverse)


_TOKENS = call("floor_divide", Var("order"), Var("k"))
_BY_EXPERT = call("index", Var("x"), [_TOKENS])


def _rows_by_expert(graph: Graph, root: Node, match: Match) -> Node | None:
    x = match["x"]
    order = match["order"]
    k = match["k"]
    if not _is_order(order) or not isinstance(k, int):
        return None
    if len(value(order)) != k * len(value(x)):
        return None
    inverse = _inverse(graph, order)
    return put(graph, root, ops.rows_by_expert, x, order=order, inverse=inverse, k=k)


_OWN = call("index", widened(Var("rows")), [Var("inverse")])
_SUMS = narrowed(
    call("sum", call("view|reshape|_unsafe_view", _OWN, Var("shape")), [Var("dim")], False)
)


def _sums_of_rows(graph: Graph, root: Node, match: Match) -> Node | None:
    rows = match["rows"]
    shape = match["shape"]
    if len(value(rows).shape) != 2 or len(shape) != 3 or match["dim"] not in (1, -2):
        return None
    inverse = match["inverse"]
    if not isinstance(inverse, Node) or inverse.target is not ops.inverse_order:
        return None
    total = value(root)
    if len(value(inverse)) != len(value(rows)):
        return None
    k = len(value(rows)) // len(total)
    if k * len(total) != len(value(rows)) or total.shape[1:] != value(rows).shape[1:]:
        return None
    return put(
        graph,
        root,
        ops.sums_of_rows,
        rows,
        order=operand(inverse),
        inverse=inverse,
        k=k,
        dtype=total.dtype,
    )


def _is_order(node: object) -> bool:
    """Whether a value is the order of a sort of one dimension."""
    if not isinstance(node, Node) or node.target is not operator.getitem or node.args[1] != 1:
        return False
    return is_op(operand(node), "sort") and value(node).dim() == 1


def _inverse(graph: Graph, order: Node) -> Node:
    """Return where each row is in an order: what the graph has of it, right behind the order."""
    for user in list(order.users):
        if user.target is ops.inverse_order:
            order.append(user)
            return user
    with graph.inserting_after(order):
        return new_node(graph, order, ops.inverse_order, order)


_WEIGHTED = narrowed(mul(call("swiglu", Var("x")), Var("weights")))


def _weighted_swiglu(graph: Graph, root: Node, match: Match) -> Node | None:
    x = match["x"]
    weights = match["weights"]
    if not isinstance(weights, Node) or value(root).dtype != value(x).dtype:
        return None
    if value(x).dim() != 2 or value(weights).shape != (len(value(x)), 1):
        return None
    return put(graph, root, ops.weighted_swiglu, x, weights)


_GROUPED = call("|".join(GROUPED), Var("rows"), Var("weight"), Var("ends"))


def _grouped_linear(graph: Graph, root: Node, match: Match) -> Node | None:
    if len(value(root).shape) != 2 or any(x is not None for x in root.args[3:]):
        return None
    weight = match["weight"]
    source = _transposed(weight)
    operands = (match["rows"], weight if source is None else source, match["ends"])
    return put(graph, root, ops.grouped_linear, *operands, source is None)


def _transposed(weight: object) -> Node | None:
    """Return the value whose last two dimensions a value has in the other order."""
    if not isinstance(weight, Node) or not facts(weight).transposes:
        return None
    source = operand(weight)
    # not by the strides of its own value: of a shard, these may be those of the whole
    stored = torch.empty(value(source).shape, device="meta")
    seen = called(weight)(stored, *weight.args[1:], **weight.kwargs)
    same = (stored.mT.shape, stored.mT.stride()) == (seen.shape, seen.stride())
    return source if same else None


ROWS = (
    ("inverse of an order", call("argsort", Var("order"), -1, False), _inverse_order),
    ("rows in order", call("index", Var("x"), [Var("order")]), _permuted),
    ("rows by expert", _BY_EXPERT, _rows_by_expert),
    ("sums of rows", _SUMS, _sums_of_rows),
    ("weighted swiglu", _WEIGHTED, _weighted_swiglu),
    ("rows with the weights of experts", _GROUPED, _grouped_linear),
)
