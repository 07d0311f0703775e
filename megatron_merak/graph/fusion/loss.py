"""Fusion of the output layer with cross entropy, which saves a copy of the logits and of their
gradient.
"""

from functools import partial

import torch
from torch.fx import Graph, Node

from ... import ops
from ..ir.inplace import call as new_node
from ..ir.nodes import is_op
from .patterns import Either, Match, Var, call, widened
from .pointwise import put, value

aten = torch.ops.aten
_MEAN = 1
_SUM = 2

_PRODUCT = call("linear", Var("x"), Var("weight"), None)
_UNPADDED = call("slice", _PRODUCT, Var("last"), 0, Var("classes"), 1)
_LOGITS = widened(Either((_PRODUCT, _UNPADDED)))
_ROW_BY_ROW = widened(call("view|reshape|flatten", _LOGITS, Var("rows")))
_LOSS = call(
    "cross_entropy_loss", _ROW_BY_ROW, Var("target"), None, Var("reduction"), Var("ignored"), 0.0
)

_STATS = call(
    "cross_entropy_stats",
    Either((_ROW_BY_ROW, _LOGITS)),
    Var("target"),
    Var("start"),
    Var("classes"),
    False,
)

_SHARD = widened(Var("logits"))
_STATS_OF_SHARD = call(
    "cross_entropy_stats",
    Either((widened(call("view|reshape|flatten", _SHARD, Var("rows"))), _SHARD)),
    Var("target"),
    Var("start"),
    Var("classes"),
    Var("smoothing"),
)


def _loss(graph: Graph, root: Node, match: Match, chunk: int) -> Node | None:
    """Fuse the sum or mean over rows whose target is not ignored. ``target`` must be a common
    value.
    """
    x, weight, target = (match[name] for name in ("x", "weight", "target"))
    if (
        match["reduction"] not in (_MEAN, _SUM)
        or target.meta.get("unit") is not None
        or value(target).dim() != 1
    ):
        return None
    if weight.op != "get_attr" or value(x).numel() != value(target).numel() * value(x).shape[-1]:
        return None
    with graph.inserting_after(target):
        ignored = new_node(graph, target, aten.eq.Scalar, target, match["ignored"])
    with graph.inserting_after(ignored):
        safe_target = new_node(graph, target, aten.masked_fill.Scalar, target, ignored, 0)
    rows = new_node(graph, root, aten.reshape.default, x, [-1, value(x).shape[-1]])
    like = value(x).new_empty(
        value(target).shape, dtype=torch.promote_types(value(x).dtype, torch.float32)
    )
    classes = match.values.get("classes")
    options = {"chunk": chunk} if chunk else {}
    options |= {} if classes is None else {"classes": classes}
    losses = put(
        graph, root, ops.linear_cross_entropy, rows, weight, safe_target, like=like, **options
    )
    counted = new_node(graph, root, aten.masked_fill.Scalar, losses, ignored, 0.0)
    loss = new_node(graph, root, aten.sum.default, counted)
    if match["reduction"] == _MEAN:
        with graph.inserting_after(safe_target):
            counts = new_node(graph, target, aten.logical_not.default, ignored)
        with graph.inserting_after(counts):
            count = new_node(graph, target, aten.sum.default, counts)
        loss = new_node(graph, root, aten.div.Tensor, loss, count)
    if value(loss).dtype != value(root).dtype:
        loss = new_node(graph, root, aten.to.dtype, loss, value(root).dtype)
    return loss


def _stats(graph: Graph, root: Node, match: Match, chunk: int) -> Node | None:
    """Fuse the vocabulary-parallel loss: statistics of one rank's shard of the classes."""
    x, weight, target = (match[name] for name in ("x", "weight", "target"))
    if weight.op != "get_attr" or value(x).numel() != value(target).numel() * value(x).shape[-1]:
        return None
    rest = (match["start"], match["classes"], chunk)
    return put(graph, root, ops.linear_cross_entropy_stats, x, weight, target, *rest)


def _owned(graph: Graph, root: Node, match: Match) -> Node | None:
    """Keep a shard of logits that nothing else reads in the type that the output layer has, and let
    its gradient overwrite it.
    """
    logits = match["logits"]
    if not is_op(logits, "linear") or len(logits.users) > 1 or len(root.args) > 5:
        return None
    rest = (match[name] for name in ("target", "start", "classes", "smoothing"))
    return put(graph, root, ops.cross_entropy_stats, logits, *rest, True)


def rows(chunk: int) -> tuple:
    """Return the fusion rules for the loss.

    chunk: rows whose logits are computed at a time; 0 for all, and then the vocabulary-parallel
           loss is fused with no output layer.
    """
    loss = ("output layer with loss", _LOSS, partial(_loss, chunk=chunk))
    if chunk:
        return loss, ("output layer with loss", _STATS, partial(_stats, chunk=chunk))
    return loss, ("loss in place of logits", _STATS_OF_SHARD, _owned)
