"""Rules of the vocabulary: the embedding, and the cross entropy over divided classes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ... import ops
from . import local
from .placement import Cut, Decision
from .propagate import VOCABULARY_ROWS, Propagation
from .rules_value import argument

aten = torch.ops.aten
VOCABULARY = "vocabulary parallel: the rows of the table are divided"


def embedding(p: Propagation, node: Node) -> Decision | None:
    """The rows of a large table are divided; every rank looks up its own, and the rows are added up."""
    weight, index = argument(node, "weight"), argument(node, "indices")
    if p.layout(index) is not None:
        raise p.unfit(node, "looks up divided indices")
    rows = p.shape(weight)[0]
    split = p.layout(weight)
    if argument(node, "scale_grad_by_freq") or argument(node, "sparse"):
        return None
    if split is None:
        padded = p.padding(rows)
        if weight not in p.params:
            return None
        if rows < VOCABULARY_ROWS:
            p.note(p.params[weight], f"a table of {rows} rows is not worth a sum over the ranks")
            return None
        if not p.demand(weight, Cut(0, (rows,), padded or 0), VOCABULARY):
            return None
    elif split.dim == 1:
        p.explain(weight, "column parallel: the features of the table are divided")
        return Decision(replace(split, dim=len(p.shape(node)) - 1))
    elif len(split.blocks) > 1:
        raise p.unfit(node, "looks up rows that are divided")
    p.explain(weight, VOCABULARY)
    layout = p.layout(weight)
    return Decision(None, reduce=True, write=_write_embedding(layout.extent(p.tp)))


def _write_embedding(rows: int) -> Callable[[Any, Node], Node]:
    def write(writer: Any, node: Node) -> Node:
        weight, index = argument(node, "weight"), argument(node, "indices")
        padding = argument(node, "padding_idx")
        args = (writer.get(weight), writer.get(index), writer.rank * rows, padding if padding >= 0 else None)
        return writer.sum(writer.call(local.embedding_part, args, like=node))

    return write


def cross_entropy(p: Propagation, node: Node) -> Decision:
    """Over divided classes: the ranks exchange a few statistics of each row."""
    logits, target = argument(node, "self"), argument(node, "target")
    split = p.layout(logits)
    rank = len(p.shape(logits))
    if split is None or split.dim != (1 if rank > 1 else 0) or len(split.blocks) > 1:
        raise p.unfit(node, "takes classes in several pieces, or other dimensions in parts")
    if argument(node, "weight") is not None or p.layout(target) is not None or len(p.shape(target)) != rank - 1:
        raise p.unfit(node, "weights the classes, or has targets that are not class numbers")
    fills = {logits: 0} if split.padded and split.filler is None else {}
    write = _write_cross_entropy(split.extent(p.tp), sum(split.blocks) if split.padded else 0)
    return Decision(None, fills=fills, write=write)


def _write_cross_entropy(classes: int, valid: int) -> Callable[[Any, Node], Node]:
    def write(writer: Any, node: Node) -> Node:
        logits, target = writer.operand(argument(node, "self")), writer.get(argument(node, "target"))
        start = writer.rank * classes
        if len(logits.meta["val"].shape) > 2:
            logits = writer.call(aten.movedim.int, (logits, 1, -1))
        held = min(max(valid - start, 0), classes) if valid else classes
        smoothing = argument(node, "label_smoothing")
        stats = writer.call(ops.cross_entropy_stats, (logits, target, start, held, smoothing > 0))
        args = (writer.stack(stats), target, argument(node, "ignore_index"), argument(node, "reduction"), smoothing)
        return writer.call(local.loss_of_stats, (*args, node.meta["val"].dtype), like=node, sharded=False)

    return write
