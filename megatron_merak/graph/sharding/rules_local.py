"""Rules of what the program of one tensor-parallel rank calls beside operators, for its values that
are divided further, along another dimension than the one that tensor-parallel ranks share.

A collective between those ranks works entry by entry: each of them has the same part.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch.fx import Node

from ... import ops
from ..ir.marks import copy_in, reduce_sum, stack
from ..ir.nodes import constant, operand
from . import across, local
from .known import Known, Rule
from .placement import Decision, Layout, ShardSpec
from .rules_value import pointwise

MEAN = 1
SUM = 2


def _as_it_is(p: Known, node: Node) -> Decision:
    return Decision(p.input_layout(node))


def _stacked(p: Known, node: Node) -> Decision:
    layout = p.input_layout(node)
    return Decision(replace(layout, dim=layout.dim + 1))


def _unstacked(p: Known, node: Node) -> Decision:
    layout = p.input_layout(node)
    if layout.dim == 0:
        raise p.cannot_shard(node, "combines what all ranks have")
    return Decision(replace(layout, dim=layout.dim - 1))


def _along(p: Known, node: Node) -> Decision:
    """Of a function that works along the dimension that is its second argument."""
    layout = p.input_layout(node)
    if constant(node, 1) % len(p.shape(operand(node))) == layout.dim:
        raise p.cannot_shard(node, "works along the sharded dimension")
    return Decision(layout)


def _log_sum_exp(p: Known, node: Node) -> Decision:
    layout = p.input_layout(node)
    rank = len(p.shape(operand(node)))
    dims = [dim % rank for dim in constant(node, 1)]
    if layout.dim in dims:
        raise p.cannot_shard(node, "reduces the sharded dimension")
    if constant(node, 2):
        return Decision(layout)
    return Decision(replace(layout, dim=layout.dim - sum(dim < layout.dim for dim in dims)))


def _class_statistics(p: Known, node: Node) -> Decision:
    """Of rows of classes and their targets: something of each row."""
    return Decision(*_rows_and_targets(p, node, classes=-1))


def _own_classes(p: Known, node: Node) -> Decision:
    """Of logits [n, classes, ...] and targets [n, ...]."""
    rank = len(p.shape(operand(node)))
    layout, to_shard = _rows_and_targets(p, node, classes=min(rank - 1, 1))
    classes = min(rank - 1, 1)
    return Decision(replace(layout, dim=layout.dim - (layout.dim > classes)), to_shard)


def _rows_and_targets(p: Known, node: Node, classes: int) -> tuple[Layout, dict[Node, ShardSpec]]:
    """Return how the rows of the first operand are sharded, and that its targets must be, too."""
    layout = p.input_layout(node)
    classes %= len(p.shape(operand(node)))
    if layout.dim == classes:
        raise p.cannot_shard(node, "has classes that are sharded twice")
    own = replace(layout, dim=layout.dim - (layout.dim > classes))
    return layout, _like_rows(p, node, operand(node, 1), own)


def _like_rows(p: Known, node: Node, targets: Node, wanted: Layout) -> dict[Node, ShardSpec]:
    """Return what makes targets sharded as ``wanted``."""
    own = p.layout(targets)
    if own is not None and not own.same_shards(wanted):
        raise p.cannot_shard(node, "has targets that are sharded differently")
    to_shard: dict[Node, ShardSpec] = {}
    if own is None:
        p.shard_operand(to_shard, targets, wanted.spec())
    return to_shard


def _loss(stacked: bool, reduction_at: int) -> Rule:
    """Return the rule of losses of rows, or their sum, from something of each row and its target.

    stacked:      whether the first operand is of all ranks, [tp, ...].
    reduction_at: place of the argument that says whether losses are added up.
    """

    def rule(p: Known, node: Node) -> Decision:
        layout = p.input_layout(node)
        own = replace(layout, dim=layout.dim - stacked)
        if layout.dim < stacked or own.dim >= len(p.shape(operand(node, 1))):
            raise p.cannot_shard(node, "combines what all ranks have")
        reduction = constant(node, reduction_at)
        if reduction == MEAN:
            raise p.cannot_shard(node, "divides by the number of all rows")
        to_shard = _like_rows(p, node, operand(node, 1), own)
        if reduction == SUM:
            return Decision(None, to_shard, reduce=True)
        return Decision(own, to_shard)

    return rule


LOCAL_RULES: Mapping[object, Rule] = {
    copy_in: _as_it_is,
    reduce_sum: _as_it_is,
    stack: _stacked,
    local.take: _along,
    local.take_ends: _along,
    local.by_rank: _along,
    local.by_position: _along,
    local.fill: _along,
    local.take_heads: _along,
    local.embed_in_zeros: _along,
    local.loss_of_stats: _loss(stacked=True, reduction_at=3),
    ops.embedding_part: _as_it_is,
    ops.cross_entropy_stats: _class_statistics,
    across.log_sum_exp: _log_sum_exp,
    across.combined_log_sum_exp: _unstacked,
    across.log_softmax_shard: pointwise,
    across.softmax_shard: pointwise,
    across.gather_own_classes: _own_classes,
    across.nll_of_log_probs: _loss(stacked=False, reduction_at=2),
}
