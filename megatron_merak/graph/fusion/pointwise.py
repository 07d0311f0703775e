"""Norms, activations, and what follows a layer: the rows of ``fuse`` that work feature by feature or row by row."""

import math
import operator

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ... import ops
from ..ir.inplace import call as new_node
from ..ir.nodes import is_op
from .patterns import Any, Call, Either, Found, add, call, mul, narrowed, widened

aten = torch.ops.aten


def value(node: Node) -> Tensor:
    return node.meta["val"]


def put(graph: Graph, root: Node, target, *args, like: Tensor | tuple[Tensor, ...] | None = None, **kwargs) -> Node:
    """A fused operation in the place of ``root``, with its value's shape and type (or with those of ``like``)."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {key: each for key, each in root.meta.items() if key != "tensor_meta"}
    node.meta["val"] = root.meta["val"] if like is None else like
    return node


# x / sqrt(mean(x^2) + eps), and then the weight, before or after a conversion back to the type of x.
_X = widened(Any("x"))
_SQUARE = Either((call("pow", _X, 2), mul(_X, _X), call("square", _X)))
_NORMED = mul(_X, call("rsqrt", add(call("mean", _SQUARE, [-1], True), Any("eps"))))
_RMS_NORM = mul(Any("weight"), narrowed(_NORMED))


def _rms_norm(graph: Graph, root: Node, found: Found) -> Node | None:
    x, weight = found["x"], found["weight"]
    per_feature = isinstance(weight, Node) and tuple(value(weight).shape) == tuple(value(x).shape[-1:])
    if not per_feature or value(x).dtype != value(root).dtype or not isinstance(found["eps"], float):
        return None
    return put(graph, root, ops.rms_norm, x, weight, found["eps"])


def _own_rms_norm(graph: Graph, root: Node, found: Found) -> Node | None:
    if len(found["shape"]) != 1 or found["weight"] is None:
        return None
    dtype, eps = value(root).dtype, found["eps"]
    if eps is None and dtype.itemsize < torch.float32.itemsize:
        return None  # which type's epsilon torch means there is its own affair
    eps = torch.finfo(dtype).eps if eps is None else eps
    return put(graph, root, ops.rms_norm, found["x"], found["weight"], eps)


def _layer_norm(graph: Graph, root: Node, found: Found) -> Node | None:
    if len(found["shape"]) != 1 or found["weight"] is None or found["bias"] is None:
        return None
    return put(graph, root, ops.layer_norm, *(found[name] for name in ("x", "weight", "bias", "eps")))


# GELU by tanh, written out: with x^3 (GPT-2), or with x (1 + 0.044715 x^2) (BLOOM and others).
_ROOT = math.sqrt(2 / math.pi)
_Y = Any("x")
_CUBIC = mul(add(_Y, mul(call("pow", _Y, 3), 0.044715)), Any("root"))
_FACTOR = add(Either((mul(mul(_Y, 0.044715), _Y), mul(call("pow", _Y, 2), 0.044715))), 1)
_INNER = Either((_CUBIC, mul(mul(_Y, Any("root")), _FACTOR)))
_GELU_TANH = mul(mul(_Y, 0.5), add(call("tanh", _INNER), 1))


def _gelu_tanh(graph: Graph, root: Node, found: Found) -> Node | None:
    """Models round the constant to the precision that they were written for."""
    written, precision = found["root"], torch.finfo(value(root).dtype).eps
    if not isinstance(written, float) or not math.isclose(written, _ROOT, rel_tol=precision):
        return None
    return put(graph, root, ops.gelu_tanh, found["x"])


# An activation that adds its input's bias: it is taken out of the product that makes the input.
_ADDMM = call("addmm", Any("bias"), Any("rows"), Any("weight"), 1, 1)
_BIASED = Either(
    (
        call("linear", Any("rows"), Any("weight"), Any("bias")),
        call("view|reshape|_unsafe_view", _ADDMM, Any("shape")),
        add(Any("x"), Any("bias")),
    )
)


def _bias_gelu(name: str, activation: Call) -> tuple:
    def build(graph: Graph, root: Node, found: Found) -> Node | None:
        bias, features = found["bias"], value(root).shape[-1:]
        if not isinstance(bias, Node) or value(bias).shape != features or value(bias).dtype != value(root).dtype:
            return None
        if "rows" not in found.values:
            x = found["x"]
            fits = isinstance(x, Node) and value(x).shape == value(root).shape and value(x).dtype == value(root).dtype
            return put(graph, root, ops.bias_gelu, x, bias, name) if fits else None
        product = next(node for node in found.nodes if is_op(node, "linear", "addmm"))
        target = aten.linear.default if is_op(product, "linear") else aten.mm.default
        x = new_node(graph, product, target, found["rows"], found["weight"])
        if target is aten.mm.default:
            x = new_node(graph, product, aten.view.default, x, found["shape"])
        return put(graph, root, ops.bias_gelu, x, bias, name)

    return "bias gelu", activation, build


_SPLIT = call("split|split_with_sizes", Any("x"), Any("size"), Any("dim"))
_HALVES = Either((call("chunk", Any("x"), 2, Any("dim")), _SPLIT))
_SWIGLU = mul(call("silu", call("getitem", _HALVES, 0)), call("getitem", _HALVES, 1))


def _swiglu(graph: Graph, root: Node, found: Found) -> Node | None:
    x = value(found["x"])
    if found["dim"] % x.dim() != x.dim() - 1 or 2 * value(root).shape[-1] != x.shape[-1]:
        return None
    return put(graph, root, ops.swiglu, found["x"])


def _gated(name: str, activation: Call) -> tuple:
    def build(graph: Graph, root: Node, found: Found) -> Node | None:
        gate, up = found["gate"], found["up"]
        if not isinstance(up, Node) or value(gate).shape != value(up).shape or value(gate).dtype != value(up).dtype:
            return None
        return put(graph, root, ops.gated, gate, up, name)

    return f"gated {name}", mul(activation, Any("up")), build


_DROPPED = call("dropout", Either((add(Any("x"), Any("bias")), Any("x"))), Any("p"), True)


def _bias_dropout_add(graph: Graph, root: Node, found: Found) -> Node | None:
    x, residual, bias = found["x"], found["residual"], found.values.get("bias")
    if not isinstance(residual, Node) or value(residual).shape != value(x).shape:
        return None
    if bias is not None and (not isinstance(bias, Node) or value(bias).dim() != 1):
        return None
    if value(x).dtype != value(root).dtype or value(residual).dtype != value(root).dtype:
        return None
    made = put(graph, root, ops.bias_dropout_add, x, bias, residual, found["p"], True)
    made.meta["random"] = found["p"] > 0
    return made


# Rotary embedding of pairs side by side: x cos + (-odd, even) sin, tables repeated pair by pair.
def _interleaved(x: Any | Call) -> Call:
    even, odd = (call("slice", x, Any("dim"), start, Any("end"), 2) for start in (Either((0, None)), 1))
    turned = call("flatten", call("stack", [call("neg", odd), even], Any("new")), Any("from"))
    return add(mul(x, Any("cos")), mul(turned, Any("sin")))


_PART = call("slice", Any("x"), Any("dim"), Either((0, None)), Any("rotated"), 1)
_REST = call("slice", Any("x"), Any("dim"), Any("rotated"), Any("end of rest"), 1)


def _rotary_interleaved(graph: Graph, root: Node, found: Found) -> Node | None:
    x, tables = found["x"], (found["cos"], found["sin"])
    dims, size = value(x).dim(), value(x).shape[-1]
    rotated = found.values.get("rotated", size)
    of_last = ("dim", "joined") if "joined" in found.values else ("dim",)
    if any(found[name] % dims != dims - 1 for name in of_last) or found["new"] % (dims + 1) != dims:
        return None
    if found["from"] % (dims + 1) != dims - 1 or found["end"] < rotated or found.values.get("end of rest", size) < size:
        return None
    if value(x).dtype != value(root).dtype or not all(_repeats_pairs(table, dims, rotated) for table in tables):
        return None
    return put(graph, root, ops.rotary, x, *(table.args[0] for table in tables), True)


def _repeats_pairs(table: Node, dims: int, rotated: int) -> bool:
    """Whether a table that is common to all units has every feature twice, side by side."""
    if not is_op(table, "repeat_interleave") or table.meta.get("unit") is not None or len(table.args) < 3:
        return False
    return (
        value(table).dim() == dims and value(table).shape[-1] == rotated and table.args[1:] in ((2, dims - 1), (2, -1))
    )


# The norm of a sum that nothing else reads; the norm is one of ours by then.
_SUM = add(Any("x"), Any("residual"))


def _norm_of_sum(norm, of_sum, *others: str) -> tuple:
    def build(graph: Graph, root: Node, found: Found) -> Node | None:
        operands = [found["x"], found["residual"]]
        if root.target is not norm or not all(isinstance(each, Node) for each in operands):
            return None
        wanted = value(root).shape, value(root).dtype
        if any((value(each).shape, value(each).dtype) != wanted for each in operands):
            return None
        pair = put(graph, root, of_sum, *operands, *(found[name] for name in others), like=(value(root), value(root)))
        return put(graph, root, operator.getitem, pair, 0)

    return f"add {norm.__name__.replace('_', ' ')}", call(norm.__name__, _SUM, *map(Any, others)), build


_NORM_ARGUMENTS = (Any("x"), Any("shape"), Any("weight"))

ROWS = (
    ("rms norm", call("to|_to_copy|type_as", _RMS_NORM), _rms_norm),
    ("rms norm", _RMS_NORM, _rms_norm),
    ("rms norm", call("rms_norm", *_NORM_ARGUMENTS, Any("eps")), _own_rms_norm),
    ("layer norm", call("layer_norm", *_NORM_ARGUMENTS, Any("bias"), Any("eps")), _layer_norm),
    ("gelu tanh", _GELU_TANH, _gelu_tanh),
    ("swiglu", _SWIGLU, _swiglu),
    _gated("silu", call("silu", Any("gate"))),
    _gated("gelu_tanh", call("gelu", Any("gate"), "tanh")),
    _gated("gelu_tanh", Call(("gelu_tanh",), (Any("gate"),))),
    _gated("gelu", call("gelu", Any("gate"), "none")),
    _bias_gelu("gelu_tanh", call("gelu_tanh", _BIASED)),
    _bias_gelu("gelu_tanh", call("gelu", _BIASED, "tanh")),
    _bias_gelu("gelu", call("gelu", _BIASED, "none")),
    ("partial rotary", call("cat", [_interleaved(_PART), _REST], Any("joined")), _rotary_interleaved),
    ("rotary", _interleaved(Any("x")), _rotary_interleaved),
    ("bias dropout add", add(Any("residual"), _DROPPED), _bias_dropout_add),
    _norm_of_sum(ops.layer_norm, ops.add_layer_norm, "weight", "bias", "eps"),
    _norm_of_sum(ops.rms_norm, ops.add_rms_norm, "weight", "eps"),
)
