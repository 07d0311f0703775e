"""Rules of the vocabulary: the embedding, and the cross entropy over sharded classes."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.fx import Node

from ... import ops
from . import local
from .known import VOCABULARY_ROWS, Known
from .placement import Decision, ShardSpec
from .rules_value import argument
from .writer import Writer

aten = torch.ops.aten
_MEAN = 1
_SUM = 2
VOCABULARY = "vocabulary parallel: the rows of the table are sharded"


def embedding(p: Known, node: Node) -> Decision | None:
    """Shard the rows of a large table: every rank looks up its own, and the results are
    all-reduced.
    """
    weight = argument(node, "weight")
    index = argument(node, "indices")
    if p.layout(index) is not None:
        raise p.cannot_shard(node, "looks up sharded indices")
    rows = p.shape(weight)[0]
    layout = p.layout(weight)
    if argument(node, "scale_grad_by_freq") or argument(node, "sparse"):
        return None
    if layout is None:
        padded = p.padded_extent(rows)
        if weight not in p.parameter_names:
            return None
        if rows < VOCABULARY_ROWS:
            p.note_replicated(
                p.parameter_names[weight], f"a table of {rows} rows is not worth an all-reduce"
            )
            return None
        if not p.shard_parameter(weight, ShardSpec(0, (rows,), padded or 0), VOCABULARY):
            return None
    elif layout.dim == 1:
        p.explain_pin(weight, "column parallel: the features of the table are sharded")
        return Decision(replace(layout, dim=len(p.shape(node)) - 1))
    elif len(layout.blocks) > 1:
        raise p.cannot_shard(node, "looks up rows that are sharded")
    p.explain_pin(weight, VOCABULARY)
    layout = p.sharded_layout(weight)
    return Decision(None, reduce=True, write=_write_embedding(layout.extent(p.tp)))


def _write_embedding(rows: int) -> Callable[[Writer, Node], Node]:
    def write(writer: Writer, node: Node) -> Node:
        weight = argument(node, "weight")
        index = argument(node, "indices")
        padding = argument(node, "padding_idx")
        args = (writer.get(index), writer.get(weight), writer.rank * rows)
        options = {"padding": padding} if padding >= 0 else {}
        return writer.sum(writer.call(ops.embedding_part, args, like=node, kwargs=options))

    return write


def cross_entropy(p: Known, node: Node) -> Decision:
    """For sharded classes: the ranks exchange a few statistics of each row."""
    logits = argument(node, "self")
    target = argument(node, "target")
    layout = p.layout(logits)
    rank = len(p.shape(logits))
    if layout is not None and layout.dim == 0 and rank == 2:
        return _rows(p, node, logits, target)
    if layout is None or layout.dim != (1 if rank > 1 else 0) or len(layout.blocks) > 1:
        raise p.cannot_shard(node, "has classes in several blocks, or another dimension sharded")
    if (
        argument(node, "weight") is not None
        or p.layout(target) is not None
        or len(p.shape(target)) != rank - 1
    ):
        raise p.cannot_shard(node, "weights the classes, or has targets that are not class numbers")
    fills = {logits: 0} if layout.padded and layout.padding_value is None else {}
    write = _write_cross_entropy(layout.extent(p.tp), sum(layout.blocks) if layout.padded else 0)
    return Decision(None, fills=fills, write=write)


def _rows(p: Known, node: Node, logits: Node, target: Node) -> Decision:
    """For sharded rows: each rank has the losses of its own, or their sum."""
    layout = p.sharded_layout(logits)
    own = p.layout(target)
    if argument(node, "reduction") == _MEAN:
        raise p.cannot_shard(node, "divides by the number of all rows")
    if own is not None and not own.same_shards(layout) or p.shape(target) != p.shape(logits)[:1]:
        raise p.cannot_shard(node, "has targets that are sharded differently")
    to_shard: dict[Node, ShardSpec] = {}
    if own is None:
        p.shard_operand(to_shard, target, layout.spec())
    if argument(node, "reduction") == _SUM:
        return Decision(None, to_shard, reduce=True)
    return Decision(layout, to_shard)


def _write_cross_entropy(classes: int, valid: int) -> Callable[[Writer, Node], Node]:
    def write(writer: Writer, node: Node) -> Node:
        logits = writer.operand(argument(node, "self"))
        target = writer.get(argument(node, "target"))
        start = writer.rank * classes
        if len(logits.meta["val"].shape) > 2:
            logits = writer.call(aten.movedim.int, (logits, 1, -1))
        own = min(max(valid - start, 0), classes) if valid else classes
        smoothing = argument(node, "label_smoothing")
        stats = writer.call(ops.cross_entropy_stats, (logits, target, start, own, smoothing > 0))
        args = (
            writer.stack(stats),
            target,
            argument(node, "ignore_index"),
            argument(node, "reduction"),
            smoothing,
        )
        return writer.call(
            local.loss_of_stats, (*args, node.meta["val"].dtype), like=node, sharded=False
        )

    return write
