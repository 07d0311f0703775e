"""Rotary embedding and causal attention: the rows of ``fuse`` that work on heads."""

import torch
from torch.fx import Graph, Node

from .. import ops
from .fuse_pointwise import put, value
from .inplace import call as new_node
from .nodes import is_op
from .patterns import Any, Either, Found, add, call, mul

aten = torch.ops.aten

# x cos + rotate_half(x) sin, where rotate_half(x) = (-second half of x, first half).
_FIRST = call("slice", Any("x"), Any("dim"), Either((0, None)), Any("half"), 1)
_SECOND = call("slice", Any("x"), Any("dim"), Any("half"), Any("end"), 1)
_TURNED = call("cat", [call("neg", _SECOND), _FIRST], Any("last"))
_ROTARY = add(mul(Any("x"), Any("cos")), mul(_TURNED, Any("sin")))

# Only the first features of each head are turned; the others are put back behind them.
_WHOLE = Any("whole")
_PART = call("slice", _WHOLE, Any("dim"), Either((0, None)), Any("rotated"), 1)
_REST = call("slice", _WHOLE, Any("dim"), Any("rotated"), Any("end of rest"), 1)


def _within(pattern, name: str, inner):
    """``pattern`` with ``inner`` for every ``Any(name)``."""
    if pattern == Any(name):
        return inner
    if isinstance(pattern, Either):
        return Either(tuple(_within(each, name, inner) for each in pattern.patterns))
    if isinstance(pattern, list):
        return [_within(each, name, inner) for each in pattern]
    if hasattr(pattern, "args"):
        args = tuple(_within(each, name, inner) for each in pattern.args)
        return type(pattern)(pattern.names, args, pattern.commutes)
    return pattern


_PARTIAL = call("cat", [_within(_ROTARY, "x", _PART), _REST], Any("joined"))


def _rotary(graph: Graph, root: Node, found: Found) -> Node | None:
    x = found["x"]
    size, last = value(x).shape[-1], value(x).dim() - 1
    dims = (found["dim"], found["last"])
    if any(dim % (last + 1) != last for dim in dims) or 2 * found["half"] != size or found["end"] < size:
        return None
    return _turn(graph, root, found, x, size)


def _partial_rotary(graph: Graph, root: Node, found: Found) -> Node | None:
    x, rotated = found["whole"], found["rotated"]
    last = value(x).dim() - 1
    dims = (found["dim"], found["last"], found["joined"])
    if any(dim % (last + 1) != last for dim in dims) or 2 * found["half"] != rotated:
        return None
    if found["end"] < rotated or found["end of rest"] < value(x).shape[-1]:
        return None
    return _turn(graph, root, found, x, rotated)


def _turn(graph: Graph, root: Node, found: Found, x: Node, rotated: int) -> Node | None:
    tables = (found["cos"], found["sin"])
    for table in tables:
        fits = isinstance(table, Node) and table.meta.get("unit") is None and value(table).dim() == value(x).dim()
        if not fits or value(table).shape[-1] != rotated or not _repeats(table):
            return None
    if value(x).dtype != value(root).dtype:
        return None
    return put(graph, root, ops.rotary, x, *(_first_half(graph, table) for table in tables))


def _repeats(table: Node) -> bool:
    """Whether the second half of the last dimension is sure to equal the first: made as cat((angles, angles))."""
    while table.op == "call_function":
        last = value(table).dim() - 1
        if is_op(table, "cat"):
            parts, dim = table.args[0], table.args[1] if len(table.args) > 1 else 0
            return len(parts) == 2 and parts[0] is parts[1] and dim % (last + 1) == last
        if is_op(table, "unsqueeze", "slice", "select", "squeeze"):
            before = value(table.args[0]).dim()
            dim = table.args[1] if len(table.args) > 1 else 0
            dim %= before + is_op(table, "unsqueeze")
            if dim == (before if is_op(table, "unsqueeze") else before - 1):
                return False
        elif is_op(table, "mul", "div", "add"):
            if isinstance(table.args[1], Node):
                return False
        elif not is_op(table, "cos", "sin", "to", "_to_copy", "type_as", "expand", "detach", "contiguous", "clone"):
            return False
        table = table.args[0]
    return False


def _first_half(graph: Graph, table: Node) -> Node:
    """The first half of a table's last dimension, made once for all readers."""
    last, half = value(table).dim() - 1, value(table).shape[-1] // 2
    wanted = (table, last, 0, half)
    for user in table.users:
        if user.target is aten.slice.Tensor and user.args == wanted and user.meta.get("unit") is None:
            return user
    with graph.inserting_after(table):
        return new_node(graph, table, aten.slice.Tensor, *wanted)


def _repeated(name: str):
    """Key or value heads, each shared by several query heads: repeated in the graph or not."""
    spread = call("expand", call("unsqueeze", Any(name), 2), Any(f"{name} spread"))
    return Either((call("reshape|view|_unsafe_view", spread, Any(f"{name} heads")), Any(name)))


_ATTENTION = call(
    "scaled_dot_product_attention",
    *(Any("query"), _repeated("key"), _repeated("value")),
    *(None, Any("dropout"), True, Any("scale")),
)
_TRANSPOSED = call("transpose", _ATTENTION, 1, 2)
_JOINED = call(
    "reshape|view|_unsafe_view|flatten", Either((call("contiguous|clone", _TRANSPOSED), _TRANSPOSED)), Any("to")
)


def _attention(graph: Graph, root: Node, found: Found) -> Node | None:
    """[b, n, s, d] as the model has it -> [b, s, n d] -> back, which is views only."""
    joined = _joined_attention(graph, root, found)
    if joined is None:
        return None
    batch, heads, length, dim = value(root).shape
    split = new_node(graph, root, aten.view.default, joined, [batch, length, heads, dim])
    return new_node(graph, root, aten.transpose.int, split, 1, 2)


def _joined_attention(graph: Graph, root: Node, found: Found) -> Node | None:
    query, key, values = (value(found[name]) for name in ("query", "key", "value"))
    if query.dim() != 4 or key.dim() != 4 or query.shape[2:] != key.shape[2:] or key.shape != values.shape:
        return None
    batch, heads, length, dim = query.shape
    if heads % key.shape[1] or value(root).numel() != query.numel() or key.shape[0] != batch:
        return None
    if value(root).dim() != 4 and tuple(value(root).shape) != (batch, length, heads * dim):
        return None
    operands = [_by_position(graph, root, found[name]) for name in ("query", "key", "value")]
    like = query.new_empty((batch, length, heads * dim))
    made = put(graph, root, ops.causal_attention, *operands, found["dropout"], found["scale"], like=like)
    made.meta["random"] = found["dropout"] > 0
    return made


def _by_position(graph: Graph, root: Node, heads: Node) -> Node:
    """[b, n, s, d] -> [b, s, n, d]."""
    if is_op(heads, "transpose") and sorted(dim % 4 for dim in heads.args[1:]) == [1, 2]:
        return heads.args[0]
    return new_node(graph, root, aten.transpose.int, heads, 1, 2)


ROWS = (
    ("partial rotary", _PARTIAL, _partial_rotary),
    ("rotary", _ROTARY, _rotary),
    ("causal attention", _JOINED, _joined_attention),
    ("causal attention", _ATTENTION, _attention),
)
