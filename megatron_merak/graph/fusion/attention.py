"""Rotary embedding and causal attention: the rows of ``fuse`` that work on heads."""

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ... import ops
from ..ir.inplace import call as new_node
from ..ir.nodes import is_op
from .patterns import Any, Either, Found, add, call, mul, narrowed
from .pointwise import put, value

aten = torch.ops.aten

# x cos + rotate_half(x) sin, where rotate_half(x) = (-second half of x, first half).
_FIRST = call("slice", Any("x"), Any("dim"), Either((0, None)), Any("half"), 1)
_SECOND = call("slice", Any("x"), Any("dim"), Any("half"), Any("end"), 1)
_TURNED = call("cat", [call("neg", _SECOND), _FIRST], Any("last"))
_ROTARY = add(mul(Any("x"), Any("cos")), mul(_TURNED, Any("sin")))

# The same from tables of half the width: (a cos - b sin, b cos + a sin) of the halves a and b.
_PAIR = call("chunk", Any("x"), 2, Any("dim"))
_A, _B = call("getitem", _PAIR, 0), call("getitem", _PAIR, 1)
_UPPER = call("sub", mul(_A, Any("cos")), mul(_B, Any("sin")), 1)
_BY_HALVES = call("cat", [_UPPER, add(mul(_B, Any("cos")), mul(_A, Any("sin")))], Any("last"))

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


def _rotary_by_halves(graph: Graph, root: Node, found: Found) -> Node | None:
    x, tables = found["x"], (found["cos"], found["sin"])
    last = value(x).dim() - 1
    if any(dim % (last + 1) != last for dim in (found["dim"], found["last"])) or value(x).dtype != value(root).dtype:
        return None
    for table in tables:
        common = isinstance(table, Node) and table.meta.get("unit") is None and value(table).dim() == last + 1
        if not common or 2 * value(table).shape[-1] != value(x).shape[-1]:
            return None
    return put(graph, root, ops.rotary, x, *tables)


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


# Attention of any other kind: of PyTorch, or written out.
_GENERAL = call(
    "scaled_dot_product_attention",
    *(Any("query"), _repeated("key"), _repeated("value")),
    *(Any("mask"), Any("dropout"), False, Any("scale")),
)
_SCORES = call("matmul", Any("query"), call("transpose", _repeated("key"), Any("dim"), Any("other dim")))
_SCALED = Either((mul(_SCORES, Any("factor")), call("div", _SCORES, Any("divisor")), _SCORES))
_SOFTMAX = call("softmax", Either((add(_SCALED, Any("mask")), _SCALED)), -1, Any("type"))
_WEIGHTS = Either((call("dropout", narrowed(_SOFTMAX), Any("dropout"), True), narrowed(_SOFTMAX)))
_WRITTEN_OUT = call("matmul", _WEIGHTS, _repeated("value"))


def _general_attention(graph: Graph, root: Node, found: Found) -> Node | None:
    query, key, values = (value(found[name]) for name in ("query", "key", "value"))
    mask = found.values.get("mask")
    if any(x.dim() != 4 or x.dtype != value(root).dtype for x in (query, key, values)):
        return None
    if key.shape[:3] != values.shape[:3] or query.shape[0] != key.shape[0] or query.shape[1] % key.shape[1]:
        return None
    if query.shape[3] != key.shape[3] or value(root).shape != (*query.shape[:3], values.shape[3]):
        return None
    if mask is not None and not _is_mask(mask, query, key):
        return None
    dropout = found.values.get("dropout", 0.0)
    operands = (found[name] for name in ("query", "key", "value"))
    apart = (_documents(graph, mask),) if dropout == 0 and _may_part(mask, query, key) else ()
    made = put(graph, root, ops.attention, *operands, mask, dropout, found.values["scale"], *apart)
    made.meta["random"] = dropout > 0
    return made


def _may_part(mask: Node | None, query: Tensor, key: Tensor) -> bool:
    """Whether a mask may keep the documents of packed rows apart: one per row, for all heads."""
    if mask is None or value(mask).dtype != torch.bool:
        return False
    return query.shape[2] == key.shape[2] and tuple(value(mask).shape[1:]) == (1, query.shape[2], query.shape[2])


def _documents(graph: Graph, mask: Node) -> Node:
    """Where a mask parts its rows, found once for all readers."""
    for user in mask.users:
        if user.target is ops.documents:
            return user
    with graph.inserting_after(mask):
        made = graph.call_function(ops.documents, (mask,))
    made.meta = {key: each for key, each in mask.meta.items() if key != "tensor_meta"}
    made.meta["val"] = value(mask).new_empty((value(mask).shape[0], 3), dtype=torch.int64)
    return made


def _is_mask(mask: Node, query: Tensor, key: Tensor) -> bool:
    """Common to all units, so without gradient, and of a shape and type that go with the scores."""
    if not isinstance(mask, Node) or mask.meta.get("unit") is not None or value(mask).dim() != 4:
        return False
    scores = (*query.shape[:3], key.shape[2])
    fits = all(extent in (1, n) for extent, n in zip(value(mask).shape, scores, strict=True))
    return fits and value(mask).shape[3] == scores[3] and value(mask).dtype in (torch.bool, query.dtype)


def _written_out_attention(graph: Graph, root: Node, found: Found) -> Node | None:
    if sorted(dim % 4 for dim in (found["dim"], found["other dim"])) != [2, 3]:
        return None
    if found["type"] is not None and found["type"].itemsize < value(root).dtype.itemsize:
        return None
    mask = found.values.get("mask")
    if isinstance(mask, Node) and value(mask).dtype == torch.bool:
        return None
    factor = found.values.get("factor", 1.0)
    divisor = found.values.get("divisor", 1.0)
    if not isinstance(factor, int | float) or not isinstance(divisor, int | float):
        return None
    return _general_attention(graph, root, Found({**found.values, "scale": factor / divisor}, found.nodes))


ROWS = (
    ("partial rotary", _PARTIAL, _partial_rotary),
    ("rotary", _ROTARY, _rotary),
    ("rotary", _BY_HALVES, _rotary_by_halves),
    ("causal attention", _JOINED, _joined_attention),
    ("causal attention", _ATTENTION, _attention),
    ("attention", _GENERAL, _general_attention),
    ("attention", _WRITTEN_OUT, _written_out_attention),
)
