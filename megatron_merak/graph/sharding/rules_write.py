"""Rules of values that are made empty or constant and written piece by piece, and of solvers over batches."""

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ..ir.aliases import aliased
from ..ir.nodes import op_name, values
from .padding import alike, zeros
from .placement import Cut, Decision, Split
from .propagate import Propagation
from .rules_value import argument

aten = torch.ops.aten


def created(p: Propagation, node: Node) -> Decision:
    """new_zeros and the like: only the type of the divided value matters, so that the new one is whole."""
    fill = {"new_ones": 1, "new_full": argument(node, "fill_value")}.get(op_name(node), 0)

    def write(writer: Any, node: Node) -> Node:
        value = values(node)[0]
        kwargs = {"dtype": value.dtype, "device": value.device}
        return writer.call(aten.full.default, (list(value.shape), fill), like=node, sharded=False, kwargs=kwargs)

    return Decision(None, write=write, common=not _written(node))


def _written(node: Node) -> bool:
    """Whether a value, or a view of it, is written in place."""
    for user in node.users:
        shared, written = aliased(user)
        if node in written or node in shared and _written(user):
            return True
    return False


def scatter_piece(p: Propagation, node: Node) -> Decision:
    """slice_scatter, select_scatter: a piece along ``dim`` is replaced; what is divided is another dimension."""
    x, piece = node.args[:2]
    rank = len(p.shape(x))
    dim = argument(node, "dim") % rank
    gone = len(p.shape(piece)) < rank
    first = p.layout(x)
    if first is None:
        inner = p.layout(piece)
        first = replace(inner, dim=inner.dim + (gone and inner.dim >= dim))
    if first.dim == dim:
        raise p.unfit(node, "replaces a piece of the divided dimension")
    place = first.dim - (gone and first.dim > dim)
    cuts: dict[Node, Cut] = {}
    for operand, at in ((x, first.dim), (piece, place)):
        split = p.layout(operand)
        if split is None:
            p.bring(cuts, operand, Cut(at, first.blocks, first.padded))
        elif not split.same(replace(first, dim=at)):
            raise p.unfit(node, "combines values that are divided differently")
    fills, filler = alike(p, node, cuts)
    made = replace(first, origins=p.origins(p.divided([x, piece])), rows=None, filler=filler)
    return Decision(made, cuts, fills=fills)


def batched(p: Propagation, node: Node) -> Decision:
    """Solvers and decompositions of the last two dimensions: the divided one is a batch dimension of all operands."""
    operands = node.all_input_nodes
    divided = p.divided(operands)
    rank = len(p.shape(divided[0]))
    first = p.layout(divided[0])
    if first.dim >= rank - 2 or first.padded or any(len(p.shape(x)) != rank for x in operands):
        raise p.unfit(node, "needs whole matrices")
    if any(not first.same(p.layout(x)) for x in divided):
        raise p.unfit(node, "combines values that are divided differently")
    cuts: dict[Node, Cut] = {}
    for x in operands:
        if p.layout(x) is None and p.shape(x)[first.dim] != 1:
            p.bring(cuts, x, first.cut())
    made = replace(first, origins=p.origins(divided))
    return Decision(made if len(values(node)) == 1 else (made,) * len(values(node)), cuts)


def unfold(p: Propagation, node: Node) -> Decision:
    """Windows along another dimension; their entries become the last one."""
    layout: Split = p.subject(node)
    if argument(node, "dimension") % len(p.shape(node.args[0])) == layout.dim:
        raise p.unfit(node, "takes windows of the divided dimension")
    return Decision(layout)


def index_put(p: Propagation, node: Node) -> Decision:
    """x[indices] = value, the divided dimension being behind the indexed ones, which lead."""
    x, indices, value = node.args[:3]
    layout = p.layout(x)
    used = [dim for dim, i in enumerate(indices) if i is not None]
    whole = all(p.layout(i) is None for i in indices if i is not None)
    if layout is None:
        inner = p.layout(value)
        behind = 0 if inner is None else len(p.shape(value)) - inner.dim
        layout = inner and replace(inner, dim=len(p.shape(x)) - behind)
    if layout is None or not whole or used != list(range(len(used))) or layout.dim < len(used):
        raise p.unfit(node, "writes along the divided dimension")
    behind = len(p.shape(x)) - layout.dim
    cuts: dict[Node, Cut] = {}
    for operand in (x, value):
        shape = p.shape(operand)
        at = len(shape) - behind
        split = p.layout(operand)
        if split and not split.same(replace(layout, dim=at)):
            raise p.unfit(node, "combines values that are divided differently")
        if split is None and at >= 0 and shape[at] != 1:
            p.bring(cuts, operand, Cut(at, layout.blocks, layout.padded))
    made = replace(layout, origins=p.origins(p.divided([x, value])), rows=None, filler=0)
    whole = value not in cuts and p.layout(value) is None  # one value for all entries, padding too
    fills = zeros(p, node, cuts)
    return Decision(replace(made, filler=None) if whole else made, cuts, fills=fills)


def index_add(p: Propagation, node: Node) -> Decision:
    """index_add, index_copy, scatter along another dimension than the divided one, which all operands but a flat index
    share."""
    x, dim, index, source = node.args[:4]
    operands = [x, source] if len(p.shape(index)) == 1 and "index" in op_name(node) else [x, source, index]
    operands = [operand for operand in operands if isinstance(operand, Node)]
    divided = p.divided(operands)
    first = p.layout(divided[0]) if divided else None
    if first is None or first.dim == dim % len(p.shape(x)):
        raise p.unfit(node, "writes along the divided dimension")
    cuts: dict[Node, Cut] = {}
    for operand in operands:
        split = p.layout(operand)
        if p.shape(operand)[first.dim] != p.shape(x)[first.dim] or split and not split.same(first):
            raise p.unfit(node, "combines values that are divided differently")
        if split is None:
            p.bring(cuts, operand, first.cut())
    filler = 0 if isinstance(source, Node) else None
    made = replace(first, origins=p.origins(divided), rows=None, filler=filler)
    return Decision(made, cuts, fills=zeros(p, node, cuts))
