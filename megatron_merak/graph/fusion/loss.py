"""Output layer and cross entropy in one: the row of ``fuse`` that spares a copy of the logits and of their gradient."""

from functools import partial

import torch
from torch.fx import Graph, Node

from ... import ops
from ..ir.inplace import call as new_node
from .patterns import Any, Either, Found, call, widened
from .pointwise import put, value

aten = torch.ops.aten
_MEAN, _SUM = 1, 2

_LOGITS = widened(call("linear", Any("x"), Any("weight"), None))
_ROW_BY_ROW = widened(call("view|reshape|flatten", _LOGITS, Any("rows")))
_LOSS = call("cross_entropy_loss", _ROW_BY_ROW, Any("target"), None, Any("reduction"), Any("ignored"), 0.0)

_STATS = call("cross_entropy_stats", Either((_ROW_BY_ROW, _LOGITS)), Any("target"), Any("start"), Any("classes"), False)


def _loss(graph: Graph, root: Node, found: Found, chunk: int) -> Node | None:
    """Sum, or mean over the rows whose target counts; which ones do is known before any unit runs."""
    x, weight, target = (found[name] for name in ("x", "weight", "target"))
    if found["reduction"] not in (_MEAN, _SUM) or target.meta.get("unit") is not None or value(target).dim() != 1:
        return None
    if weight.op != "get_attr" or value(x).numel() != value(target).numel() * value(x).shape[-1]:
        return None
    with graph.inserting_after(target):
        ignored = new_node(graph, target, aten.eq.Scalar, target, found["ignored"])
    with graph.inserting_after(ignored):
        known = new_node(graph, target, aten.masked_fill.Scalar, target, ignored, 0)
    rows = new_node(graph, root, aten.reshape.default, x, [-1, value(x).shape[-1]])
    like = value(x).new_empty(value(target).shape, dtype=torch.promote_types(value(x).dtype, torch.float32))
    options = {"chunk": chunk} if chunk else {}
    each = put(graph, root, ops.linear_cross_entropy, rows, weight, known, like=like, **options)
    counted = new_node(graph, root, aten.masked_fill.Scalar, each, ignored, 0.0)
    made = new_node(graph, root, aten.sum.default, counted)
    if found["reduction"] == _MEAN:
        with graph.inserting_after(known):
            counts = new_node(graph, target, aten.logical_not.default, ignored)
        with graph.inserting_after(counts):
            count = new_node(graph, target, aten.sum.default, counts)
        made = new_node(graph, root, aten.div.Tensor, made, count)
    if value(made).dtype != value(root).dtype:
        made = new_node(graph, root, aten.to.dtype, made, value(root).dtype)
    return made


def _stats(graph: Graph, root: Node, found: Found, chunk: int) -> Node | None:
    """One rank's part of the classes."""
    x, weight, target = (found[name] for name in ("x", "weight", "target"))
    if weight.op != "get_attr" or value(x).numel() != value(target).numel() * value(x).shape[-1]:
        return None
    rest = (found["start"], found["classes"], chunk)
    return put(graph, root, ops.linear_cross_entropy_stats, x, weight, target, *rest)


def rows(chunk: int) -> tuple:
    """``chunk``: rows whose logits exist at a time; 0 for all, and then the statistics of a part are taken of them."""
    loss = ("output layer with loss", _LOSS, partial(_loss, chunk=chunk))
    return (loss, ("output layer with loss", _STATS, partial(_stats, chunk=chunk))) if chunk else (loss,)
