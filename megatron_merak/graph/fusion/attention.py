"""Fusions of rotary embedding and attention."""

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ... import ops
from ..ir.inplace import call as new_node
from ..ir.nodes import constant, is_op, operand
from ..sharding import local
from .patterns import Either, Match, Var, add, call, mul, narrowed
from .pointwise import put, put_rotary, swaps_heads, value

aten = torch.ops.aten

# x cos + rotate_half(x) sin, where rotate_half(x) = (-second half of x, first half).
_FIRST = call("slice", Var("x"), Var("dim"), Either((0, None)), Var("half"), 1)
_SECOND = call("slice", Var("x"), Var("dim"), Var("half"), Var("end"), 1)
_ROTATED_HALVES = call("cat", [call("neg", _SECOND), _FIRST], Var("last"))
_ROTARY = add(mul(Var("x"), Var("cos")), mul(_ROTATED_HALVES, Var("sin")))

# The same with tables of half the width: (a cos - b sin, b cos + a sin) of the halves a and b.
_PAIR = call("chunk", Var("x"), 2, Var("dim"))
_A = call("getitem", _PAIR, 0)
_B = call("getitem", _PAIR, 1)
_UPPER = call("sub", mul(_A, Var("cos")), mul(_B, Var("sin")), 1)
_BY_HALVES = call("cat", [_UPPER, add(mul(_B, Var("cos")), mul(_A, Var("sin")))], Var("last"))

# Partial rotary embedding: only the first features of each head are rotated.
_HEAD = Var("head")
_PART = call("slice", _HEAD, Var("dim"), Either((0, None)), Var("rotated"), 1)
_REST = call("slice", _HEAD, Var("dim"), Var("rotated"), Var("end of rest"), 1)


def _substitute(pattern, name: str, inner):
    """Return ``pattern`` with ``inner`` in place of every ``Var(name)``."""
    if pattern == Var(name):
        return inner
    if isinstance(pattern, Either):
        return Either(tuple(_substitute(each, name, inner) for each in pattern.patterns))
    if isinstance(pattern, list):
        return [_substitute(each, name, inner) for each in pattern]
    if hasattr(pattern, "args"):
        args = tuple(_substitute(each, name, inner) for each in pattern.args)
        return type(pattern)(pattern.names, args, pattern.commutes)
    return pattern


_PARTIAL = call("cat", [_substitute(_ROTARY, "x", _PART), _REST], Var("joined"))


def _rotary(graph: Graph, root: Node, match: Match) -> Node | None:
    x = match["x"]
    size = value(x).shape[-1]
    last = value(x).dim() - 1
    dims = (match["dim"], match["last"])
    if (
        any(dim % (last + 1) != last for dim in dims)
        or 2 * match["half"] != size
        or match["end"] < size
    ):
        return None
    return _fuse_rotary(graph, root, match, x, rotated=size)


def _partial_rotary(graph: Graph, root: Node, match: Match) -> Node | None:
    x = match["head"]
    rotated = match["rotated"]
    last = value(x).dim() - 1
    dims = (match["dim"], match["last"], match["joined"])
    if any(dim % (last + 1) != last for dim in dims) or 2 * match["half"] != rotated:
        return None
    if match["end"] < rotated or match["end of rest"] < value(x).shape[-1]:
        return None
    return _fuse_rotary(graph, root, match, x, rotated=rotated)


def _rotary_by_halves(graph: Graph, root: Node, match: Match) -> Node | None:
    x = match["x"]
    tables = (match["cos"], match["sin"])
    last = value(x).dim() - 1
    if (
        any(dim % (last + 1) != last for dim in (match["dim"], match["last"]))
        or value(x).dtype != value(root).dtype
    ):
        return None
    for table in tables:
        common = (
            isinstance(table, Node)
            and table.meta.get("unit") is None
            and value(table).dim() == last + 1
        )
        if not common or 2 * value(table).shape[-1] != value(x).shape[-1]:
            return None
    return put_rotary(graph, root, x, tables)


def _fuse_rotary(graph: Graph, root: Node, match: Match, x: Node, rotated: int) -> Node | None:
    tables = (match["cos"], match["sin"])
    for table in tables:
        fits = (
            isinstance(table, Node)
            and table.meta.get("unit") is None
            and value(table).dim() == value(x).dim()
        )
        if not fits or value(table).shape[-1] != rotated or not _repeats(table):
            return None
    if value(x).dtype != value(root).dtype:
        return None
    return put_rotary(graph, root, x, [_first_half(graph, table) for table in tables])


def _repeats(table: Node) -> bool:
    """Whether the two halves of the last dimension are surely equal, because they come from
    cat((angles, angles)).
    """
    while table.op == "call_function":
        last = value(table).dim() - 1
        if is_op(table, "cat"):
            parts = constant(table, 0)
            dim = constant(table, 1) if len(table.args) > 1 else 0
            return len(parts) == 2 and parts[0] is parts[1] and bool(dim % (last + 1) == last)
        if is_op(table, "unsqueeze", "slice", "select", "squeeze"):
            before = value(operand(table)).dim()
            dim = constant(table, 1) if len(table.args) > 1 else 0
            dim %= before + is_op(table, "unsqueeze")
            if dim == (before if is_op(table, "unsqueeze") else before - 1):
                return False
        elif table.target in (local.take, local.take_ends):  # of some positions
            if constant(table, 1) == last:
                return False
        elif is_op(table, "mul", "div", "add"):
            if isinstance(table.args[1], Node):
                return False
        elif not is_op(
            table,
            "cos",
            "sin",
            "to",
            "_to_copy",
            "type_as",
            "expand",
            "detach",
            "contiguous",
            "clone",
        ):
            return False
        table = operand(table)
    return False


def _first_half(graph: Graph, table: Node) -> Node:
    """Return the first half of a table along the last dimension; one node for all readers."""
    last = value(table).dim() - 1
    half = value(table).shape[-1] // 2
    args = (table, last, 0, half)
    for user in table.users:
        if user.target is aten.slice.Tensor and user.args == args and user.meta.get("unit") is None:
            return user
    with graph.inserting_after(table):
        return new_node(graph, table, aten.slice.Tensor, *args)


def _repeated(name: str):
    """Return a pattern for key or value heads, which may be repeated for grouped-query
    attention.
    """
    spread = call("expand", call("unsqueeze", Var(name), 2), Var(f"{name} spread"))
    return Either((call("reshape|view|_unsafe_view", spread, Var(f"{name} heads")), Var(name)))


_ATTENTION = call(
    "scaled_dot_product_attention",
    Var("query"),
    _repeated("key"),
    _repeated("value"),
    None,
    Var("dropout"),
    True,
    Var("scale"),
)
_TRANSPOSED = call("transpose", _ATTENTION, 1, 2)
_JOINED = call(
    "reshape|view|_unsafe_view|flatten",
    Either((call("contiguous|clone", _TRANSPOSED), _TRANSPOSED)),
    Var("to"),
)


def _attention(graph: Graph, root: Node, match: Match) -> Node | None:
    """Fuse attention, which returns [b, s, n d], and view its result as [b, n, s, d]."""
    joined = _joined_attention(graph, root, match)
    if joined is None:
        return None
    batch, heads, length, dim = value(root).shape
    split = new_node(graph, root, aten.view.default, joined, [batch, length, heads, dim])
    return new_node(graph, root, aten.transpose.int, split, 1, 2)


def _joined_attention(graph: Graph, root: Node, match: Match) -> Node | None:
    query, key, values = (value(match[name]) for name in ("query", "key", "value"))
    if (
        query.dim() != 4
        or key.dim() != 4
        or query.shape[2:] != key.shape[2:]
        or key.shape != values.shape
    ):
        return None
    batch, heads, length, dim = query.shape
    if heads % key.shape[1] or value(root).numel() != query.numel() or key.shape[0] != batch:
        return None
    if value(root).dim() != 4 and tuple(value(root).shape) != (batch, length, heads * dim):
        return None
    operands = [_to_bsnd(graph, root, match[name]) for name in ("query", "key", "value")]
    like = query.new_empty((batch, length, heads * dim))
    return put(
        graph, root, ops.causal_attention, *operands, match["dropout"], match["scale"], like=like
    )


def _to_bsnd(graph: Graph, root: Node, heads: Node) -> Node:
    """[b, n, s, d] -> [b, s, n, d]."""
    if swaps_heads(heads):
        return operand(heads)
    return new_node(graph, root, aten.transpose.int, heads, 1, 2)


# Attention of any other kind: scaled_dot_product_attention, or written out as matmuls and softmax.
_GENERAL = call(
    "scaled_dot_product_attention",
    Var("query"),
    _repeated("key"),
    _repeated("value"),
    Var("mask"),
    Var("dropout"),
    False,
    Var("scale"),
)
_SCORES = call(
    "matmul", Var("query"), call("transpose", _repeated("key"), Var("dim"), Var("other dim"))
)
_SCALED = Either((mul(_SCORES, Var("factor")), call("div", _SCORES, Var("divisor")), _SCORES))
_SOFTMAX = call("softmax", Either((add(_SCALED, Var("mask")), _SCALED)), -1, Var("type"))
_WEIGHTS = Either((call("dropout", narrowed(_SOFTMAX), Var("dropout"), True), narrowed(_SOFTMAX)))
_WRITTEN_OUT = call("matmul", _WEIGHTS, _repeated("value"))


def _general_attention(graph: Graph, root: Node, match: Match) -> Node | None:
    query, key, values = (value(match[name]) for name in ("query", "key", "value"))
    mask = match.values.get("mask")
    if any(x.dim() != 4 or x.dtype != value(root).dtype for x in (query, key, values)):
        return None
    if (
        key.shape[:3] != values.shape[:3]
        or query.shape[0] != key.shape[0]
        or query.shape[1] % key.shape[1]
    ):
        return None
    if query.shape[3] != key.shape[3] or value(root).shape != (*query.shape[:3], values.shape[3]):
        return None
    if mask is not None and not _is_mask(mask, query, key):
        return None
    dropout = match.values.get("dropout", 0.0)
    operands = (match[name] for name in ("query", "key", "value"))
    documents: tuple[Node, ...] = ()
    if mask is not None and dropout == 0 and _may_separate_documents(mask, query, key):
        documents = (_documents(graph, mask),)
    return put(
        graph, root, ops.attention, *operands, mask, dropout, match.values["scale"], *documents
    )


def _may_separate_documents(mask: Node | None, query: Tensor, key: Tensor) -> bool:
    """Whether a mask may separate the documents of packed rows: boolean, [b, 1, s, s]."""
    if mask is None or value(mask).dtype != torch.bool:
        return False
    return query.shape[2] == key.shape[2] and tuple(value(mask).shape[1:]) == (
        1,
        query.shape[2],
        query.shape[2],
    )


def _documents(graph: Graph, mask: Node) -> Node:
    """Return the node that finds the documents of a mask; one node for all readers."""
    for user in mask.users:
        if user.target is ops.documents:
            return user
    with graph.inserting_after(mask):
        documents = graph.call_function(ops.documents, (mask,))
    documents.meta = {key: each for key, each in mask.meta.items() if key != "tensor_meta"}
    documents.meta["val"] = value(mask).new_empty((value(mask).shape[0], 3), dtype=torch.int64)
    return documents


def _is_mask(mask: Node, query: Tensor, key: Tensor) -> bool:
    """Whether ``mask`` is a common value, thus without gradient, of a shape and dtype that fit the
    scores.
    """
    if not isinstance(mask, Node) or mask.meta.get("unit") is not None or value(mask).dim() != 4:
        return False
    scores = (*query.shape[:3], key.shape[2])
    fits = all(extent in (1, n) for extent, n in zip(value(mask).shape, scores, strict=True))
    return (
        fits
        and value(mask).shape[3] == scores[3]
        and value(mask).dtype in (torch.bool, query.dtype)
    )


def _written_out_attention(graph: Graph, root: Node, match: Match) -> Node | None:
    if sorted(dim % 4 for dim in (match["dim"], match["other dim"])) != [2, 3]:
        return None
    if match["type"] is not None and match["type"].itemsize < value(root).dtype.itemsize:
        return None
    mask = match.values.get("mask")
    if isinstance(mask, Node) and value(mask).dtype == torch.bool:
        return None
    factor = match.values.get("factor", 1.0)
    divisor = match.values.get("divisor", 1.0)
    if not isinstance(factor, int | float) or not isinstance(divisor, int | float):
        return None
    return _general_attention(
        graph, root, Match({**match.values, "scale": factor / divisor}, match.nodes)
    )


ROWS = (
    ("partial rotary", _PARTIAL, _partial_rotary),
    ("rotary", _ROTARY, _rotary),
    ("rotary", _BY_HALVES, _rotary_by_halves),
    ("causal attention", _JOINED, _joined_attention),
    ("causal attention", _ATTENTION, _attention),
    ("attention", _GENERAL, _general_attention),
    ("attention", _WRITTEN_OUT, _written_out_attention),
)
