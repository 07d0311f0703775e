"""Fusions of elementwise and row-wise operations: norms, activations, interleaved rotary embedding,
residual adds.
"""

import math
import operator
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ... import ops
from ..ir.inplace import call as new_node
from ..ir.kinds import kinds
from ..ir.marks import copy_in
from ..ir.nodes import constant, is_op, operand
from ..lowering.flow import REDUCTIONS
from .patterns import Call, Either, Match, Var, add, call, mul, narrowed, widened

aten = torch.ops.aten


def value(node: Node) -> Tensor:
    return node.meta["val"]


def put(
    graph: Graph,
    root: Node,
    target,
    *args,
    like: Tensor | tuple[Tensor, ...] | None = None,
    **kwargs,
) -> Node:
    """Add a call of a fused operation with the meta of ``root``, and the shape and dtype of
    ``root`` or of ``like``.
    """
    node = graph.call_function(target, args, kwargs)
    node.meta = {key: each for key, each in root.meta.items() if key != "tensor_meta"}
    node.meta["val"] = root.meta["val"] if like is None else like
    return node


def erase_unread(graph: Graph, node: Node) -> None:
    """Erase a node that nothing reads, and recursively what only it read."""
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for input in inputs:
        if not input.users and input.op == "call_function":
            erase_unread(graph, input)


def swaps_heads(node: Node) -> bool:
    """Whether a node is a view of [b, s, n, d] as [b, n, s, d], or the other way round."""
    if not is_op(node, "transpose") or value(node).dim() != 4:
        return False
    return sorted(constant(node, k) % 4 for k in (1, 2)) == [1, 2]


def put_rotary(
    graph: Graph, root: Node, x: Node, tables: Sequence[Node], interleaved: bool = False
) -> Node:
    """Add rotary embedding of x; of heads as they come from a product, before they are viewed head
    by head.
    """
    # Not ``interleaved=False``: readers of a graph tell adjacent features by the argument.
    options = (True,) if interleaved else ()
    if not swaps_heads(x):
        return put(graph, root, ops.rotary, x, *tables, *options)
    heads = operand(x)
    by_token = [_swapped(graph, table) for table in tables]
    like = value(heads).new_empty(value(heads).shape)
    turned = put(graph, root, ops.rotary_heads, heads, *by_token, *options, like=like)
    return new_node(graph, root, aten.transpose.int, turned, 1, 2)


def _swapped(graph: Graph, table: Node) -> Node:
    """Return a common table [b, 1, s, r] as [b, s, 1, r]; one node for all readers."""
    args = (table, 1, 2)
    for user in table.users:
        if user.target is aten.transpose.int and user.args == args:
            if user.meta.get("unit") is None:
                return user
    with graph.inserting_after(table):
        return new_node(graph, table, aten.transpose.int, *args)


# x / sqrt(mean(x^2) + eps), and then the weight, before or after a conversion back to the type of
# x.
_X = widened(Var("x"))
_SQUARE = Either((call("pow", _X, 2), mul(_X, _X), call("square", _X)))
_NORMED = mul(_X, call("rsqrt", add(call("mean", _SQUARE, [-1], True), Var("eps"))))
_RMS_NORM = mul(Var("weight"), narrowed(_NORMED))


def _rms_norm(graph: Graph, root: Node, match: Match) -> Node | None:
    x = match["x"]
    weight = match["weight"]
    per_feature = isinstance(weight, Node) and tuple(value(weight).shape) == tuple(
        value(x).shape[-1:]
    )
    if (
        not per_feature
        or value(x).dtype != value(root).dtype
        or not isinstance(match["eps"], float)
    ):
        return None
    return put(graph, root, ops.rms_norm, x, weight, match["eps"])


def _torch_rms_norm(graph: Graph, root: Node, match: Match) -> Node | None:
    if len(match["shape"]) != 1 or match["weight"] is None:
        return None
    dtype = value(root).dtype
    eps = match["eps"]
    if eps is None and dtype.itemsize < torch.float32.itemsize:
        return None  # the default epsilon depends on the dtype that torch computes in
    eps = torch.finfo(dtype).eps if eps is None else eps
    return put(graph, root, ops.rms_norm, match["x"], match["weight"], eps)


def _layer_norm(graph: Graph, root: Node, match: Match) -> Node | None:
    if len(match["shape"]) != 1 or match["weight"] is None or match["bias"] is None:
        return None
    return put(
        graph, root, ops.layer_norm, *(match[name] for name in ("x", "weight", "bias", "eps"))
    )


# GELU by tanh, written out: with x^3 (GPT-2), or with x (1 + 0.044715 x^2) (BLOOM and others).
_ROOT = math.sqrt(2 / math.pi)
_Y = Var("x")
_CUBIC = mul(add(_Y, mul(call("pow", _Y, 3), 0.044715)), Var("root"))
_FACTOR = add(Either((mul(mul(_Y, 0.044715), _Y), mul(call("pow", _Y, 2), 0.044715))), 1)
_INNER = Either((_CUBIC, mul(mul(_Y, Var("root")), _FACTOR)))
_GELU_TANH = mul(mul(_Y, 0.5), add(call("tanh", _INNER), 1))


def _gelu_tanh(graph: Graph, root: Node, match: Match) -> Node | None:
    """Compares the constant loosely: models round it to the precision that they were
    written for.
    """
    constant = match["root"]
    precision = torch.finfo(value(root).dtype).eps
    if not isinstance(constant, float) or not math.isclose(constant, _ROOT, rel_tol=precision):
        return None
    return put(graph, root, ops.gelu_tanh, match["x"])


# An activation of a biased value; where a linear layer adds the bias, it is taken out of that
# layer.
_ADDMM = call("addmm", Var("bias"), Var("rows"), Var("weight"), 1, 1)
_BIASED = Either(
    (
        call("linear", Var("rows"), Var("weight"), Var("bias")),
        call("view|reshape|_unsafe_view", _ADDMM, Var("shape")),
        add(Var("x"), Var("bias")),
    )
)


def _bias_gelu(name: str, activation: Call) -> tuple:
    def build(graph: Graph, root: Node, match: Match) -> Node | None:
        bias = match["bias"]
        features = value(root).shape[-1:]
        if (
            not isinstance(bias, Node)
            or value(bias).shape != features
            or value(bias).dtype != value(root).dtype
        ):
            return None
        if "rows" not in match.values:
            x = match["x"]
            fits = (
                isinstance(x, Node)
                and value(x).shape == value(root).shape
                and value(x).dtype == value(root).dtype
            )
            return put(graph, root, ops.bias_gelu, x, bias, name) if fits else None
        product = next(node for node in match.nodes if is_op(node, "linear", "addmm"))
        target = aten.linear.default if is_op(product, "linear") else aten.mm.default
        x = new_node(graph, product, target, match["rows"], match["weight"])
        if target is aten.mm.default:
            x = new_node(graph, product, aten.view.default, x, match["shape"])
        return put(graph, root, ops.bias_gelu, x, bias, name)

    return "bias gelu", activation, build, True  # its product stays one


_SPLIT = call("split|split_with_sizes", Var("x"), Var("size"), Var("dim"))
_HALVES = Either((call("chunk", Var("x"), 2, Var("dim")), _SPLIT))
_SWIGLU = mul(call("silu", call("getitem", _HALVES, 0)), call("getitem", _HALVES, 1))


def _swiglu(graph: Graph, root: Node, match: Match) -> Node | None:
    x = value(match["x"])
    if match["dim"] % x.dim() != x.dim() - 1 or 2 * value(root).shape[-1] != x.shape[-1]:
        return None
    return put(graph, root, ops.swiglu, match["x"])


def _gated(name: str, activation: Call) -> tuple:
    def build(graph: Graph, root: Node, match: Match) -> Node | None:
        gate = match["gate"]
        up = match["up"]
        if (
            not isinstance(up, Node)
            or value(gate).shape != value(up).shape
            or value(gate).dtype != value(up).dtype
        ):
            return None
        return put(graph, root, ops.gated, gate, up, name)

    return f"gated {name}", mul(activation, Var("up")), build


_DROPS = ("dropout", "dropout_of_parts")
_DROPPED = call("|".join(_DROPS), Either((add(Var("x"), Var("bias")), Var("x"))), Var("p"), True)


def _bias_dropout_add(graph: Graph, root: Node, match: Match) -> Node | None:
    x = match["x"]
    residual = match["residual"]
    bias = match.values.get("bias")
    if not isinstance(residual, Node) or value(residual).shape != value(x).shape:
        return None
    if bias is not None and (not isinstance(bias, Node) or value(bias).dim() != 1):
        return None
    if value(x).dtype != value(root).dtype or value(residual).dtype != value(root).dtype:
        return None
    dropout = next(node for node in match.nodes if is_op(node, *_DROPS))
    place = constant(dropout, 3) if dropout.target is ops.dropout_of_parts else None
    if place is not None and value(x).numel() // (place[0] * len(place[1])) % 2:
        return None
    return put(graph, root, ops.bias_dropout_add, x, bias, residual, match["p"], True, place)


# Interleaved rotary embedding: x cos + (-odd, even) sin, with tables that repeat each feature
# twice.
def _interleaved(x: Var | Call) -> Call:
    even, odd = (
        call("slice", x, Var("dim"), start, Var("end"), 2) for start in (Either((0, None)), 1)
    )
    turned = call("flatten", call("stack", [call("neg", odd), even], Var("new")), Var("from"))
    return add(mul(x, Var("cos")), mul(turned, Var("sin")))


_PART = call("slice", Var("x"), Var("dim"), Either((0, None)), Var("rotated"), 1)
_REST = call("slice", Var("x"), Var("dim"), Var("rotated"), Var("end of rest"), 1)


def _rotary_interleaved(graph: Graph, root: Node, match: Match) -> Node | None:
    x = match["x"]
    tables = (match["cos"], match["sin"])
    dims = value(x).dim()
    size = value(x).shape[-1]
    rotated = match.values.get("rotated", size)
    of_last = ("dim", "joined") if "joined" in match.values else ("dim",)
    if any(match[name] % dims != dims - 1 for name in of_last) or match["new"] % (dims + 1) != dims:
        return None
    if (
        match["from"] % (dims + 1) != dims - 1
        or match["end"] < rotated
        or match.values.get("end of rest", size) < size
    ):
        return None
    if value(x).dtype != value(root).dtype or not all(
        _repeats_pairs(table, dims, rotated) for table in tables
    ):
        return None
    return put_rotary(graph, root, x, [operand(table) for table in tables], interleaved=True)


def _repeats_pairs(table: Node, dims: int, rotated: int) -> bool:
    """Whether a table is a common value that repeats every feature twice, side by side."""
    if (
        not is_op(table, "repeat_interleave")
        or table.meta.get("unit") is not None
        or len(table.args) < 3
    ):
        return False
    return (
        value(table).dim() == dims
        and value(table).shape[-1] == rotated
        and table.args[1:] in ((2, dims - 1), (2, -1))
    )


# The norm of a sum. Earlier rules have replaced the norm by one of ``ops``.
def _norm_of_sum(
    norm,
    of_sum,
    parameters: Sequence[str],
    *,
    continued: Collection[int],
    written: Collection[Node],
) -> tuple:
    def build(graph: Graph, root: Node, match: Match) -> Node | None:
        total = match["sum"]
        if root.target is not norm or not is_op(total, "add") or not _is_plain_sum(total):
            return None
        if kinds(total) != kinds(root) or any(x in written for x in total.all_input_nodes):
            return None
        # others read the sum from here on
        if any(reader < root for reader in total.users):
            return None
        unit = root.meta["unit"]
        if total.meta.get("unit") != unit:
            passes = unit in continued and total.meta.get("unit") == unit - 1
            if not passes or not all(map(_is_computed, total.all_input_nodes)):
                return None
            total.meta["unit"] = unit  # what is added crosses in its place
        rest = [match[name] for name in parameters]
        like = (value(root), value(root))
        pair = put(graph, root, of_sum, *total.args[:2], *rest, like=like)
        normed = put(graph, root, operator.getitem, pair, 0)
        summed = put(graph, total, operator.getitem, pair, 1)
        total.replace_all_uses_with(summed, delete_user_cb=lambda user: user is not root)
        if not summed.users:
            graph.erase_node(summed)
        return normed

    return (
        f"add {norm.__name__.replace('_', ' ')}",
        call(norm.__name__, Var("sum"), *map(Var, parameters)),
        build,
    )


def norms_of_sums(continued: Collection[int], written: Collection[Node]) -> tuple[tuple, ...]:
    """Rows for norms of sums, also of a sum at the end of the unit before.

    continued: units that may begin with such a sum, see ``StagePlan``.
    written:   nodes whose memory is written in place.
    """
    kinds_of_norm = (
        (ops.layer_norm, ops.add_layer_norm, ("weight", "bias", "eps")),
        (ops.rms_norm, ops.add_rms_norm, ("weight", "eps")),
    )
    return tuple(
        _norm_of_sum(norm, of_sum, parameters, continued=continued, written=written)
        for norm, of_sum, parameters in kinds_of_norm
    )


def _is_computed(node: Node) -> bool:
    """Whether a unit computes a value, so that it may pass to the next one."""
    while node.target is operator.getitem or node.target in REDUCTIONS:
        node = operand(node)
    return node.target is not copy_in and node.meta.get("unit") is not None


def _is_plain_sum(node: Node) -> bool:
    """Whether a node adds two values of its own shape and dtype."""
    operands = node.args[:2]
    if len(node.args) > 2 or node.kwargs or not all(isinstance(each, Node) for each in operands):
        return False
    expected = (value(node).shape, value(node).dtype)
    return all((value(each).shape, value(each).dtype) == expected for each in node.all_input_nodes)


_NORM_ARGUMENTS = (Var("x"), Var("shape"), Var("weight"))

ROWS = (
    ("rms norm", call("to|_to_copy|type_as", _RMS_NORM), _rms_norm),
    ("rms norm", _RMS_NORM, _rms_norm),
    ("rms norm", call("rms_norm", *_NORM_ARGUMENTS, Var("eps")), _torch_rms_norm),
    ("layer norm", call("layer_norm", *_NORM_ARGUMENTS, Var("bias"), Var("eps")), _layer_norm),
    ("gelu tanh", _GELU_TANH, _gelu_tanh),
    ("swiglu", _SWIGLU, _swiglu),
    _gated("silu", call("silu", Var("gate"))),
    _gated("gelu_tanh", call("gelu", Var("gate"), "tanh")),
    _gated("gelu_tanh", Call(("gelu_tanh",), (Var("gate"),))),
    _gated("gelu", call("gelu", Var("gate"), "none")),
    _bias_gelu("gelu_tanh", call("gelu_tanh", _BIASED)),
    _bias_gelu("gelu_tanh", call("gelu", _BIASED, "tanh")),
    _bias_gelu("gelu", call("gelu", _BIASED, "none")),
    (
        "partial rotary",
        call("cat", [_interleaved(_PART), _REST], Var("joined")),
        _rotary_interleaved,
    ),
    ("rotary", _interleaved(Var("x")), _rotary_interleaved),
    ("bias dropout add", add(Var("residual"), _DROPPED), _bias_dropout_add),
)
