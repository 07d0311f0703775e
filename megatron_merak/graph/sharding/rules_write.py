"""Rules of tensors that are created and then written piece by piece, and of solvers over
batches.
"""

from dataclasses import replace

import torch
from torch.fx import Node

from ..ir.aliases import aliased
from ..ir.nodes import constant, op_name, operand, operands, values
from .known import Known
from .padding import equal_padding, zeros
from .placement import Decision, ShardSpec
from .rules_value import argument
from .writer import Writer

aten = torch.ops.aten


def new_tensor(p: Known, node: Node) -> Decision:
    """new_zeros and the like: the result is replicated, as only the dtype of the sharded operand
    matters.
    """
    fill = {"new_ones": 1, "new_full": argument(node, "fill_value")}.get(op_name(node), 0)

    def write(writer: Writer, node: Node) -> Node:
        value = values(node)[0]
        kwargs = {"dtype": value.dtype, "device": value.device}
        return writer.call(
            aten.full.default, (list(value.shape), fill), like=node, sharded=False, kwargs=kwargs
        )

    return Decision(None, write=write, common=not _is_written(node))


def _is_written(node: Node) -> bool:
    """Whether a value, or a view of it, is written in place."""
    for user in node.users:
        shared, written = aliased(user)
        if node in written or node in shared and _is_written(user):
            return True
    return False


def scatter_piece(p: Known, node: Node) -> Decision:
    """slice_scatter, select_scatter: a piece along ``dim`` is replaced; another dimension is
    sharded.
    """
    x, piece = operands(node, 0, 1)
    rank = len(p.shape(x))
    dim = argument(node, "dim") % rank
    selected = len(p.shape(piece)) < rank  # select_scatter: the piece lacks ``dim``
    first = p.layout(x)
    if first is None:
        inner = p.sharded_layout(piece)
        first = replace(inner, dim=inner.dim + (selected and inner.dim >= dim))
    if first.dim == dim:
        raise p.cannot_shard(node, "replaces a piece of the sharded dimension")
    piece_dim = first.dim - (selected and first.dim > dim)
    to_shard: dict[Node, ShardSpec] = {}
    for value, value_dim in ((x, first.dim), (piece, piece_dim)):
        layout = p.layout(value)
        if layout is None:
            p.shard_operand(to_shard, value, ShardSpec(value_dim, first.blocks, first.padded))
        elif not layout.same_shards(replace(first, dim=value_dim)):
            raise p.cannot_shard(node, "combines values that are sharded differently")
    fills, padding_value = equal_padding(p, node, to_shard)
    result = replace(
        first, origins=p.origins(p.sharded([x, piece])), features=None, padding_value=padding_value
    )
    return Decision(result, to_shard, fills=fills)


def batched(p: Known, node: Node) -> Decision:
    """Solvers and decompositions of the last two dimensions: the sharded one is a batch dimension
    of all operands.
    """
    inputs = node.all_input_nodes
    sharded = p.sharded(inputs)
    rank = len(p.shape(sharded[0]))
    first = p.sharded_layout(sharded[0])
    if first.dim >= rank - 2 or first.padded or any(len(p.shape(x)) != rank for x in inputs):
        raise p.cannot_shard(node, "needs unsharded matrices")
    if any(not first.same_shards(p.sharded_layout(x)) for x in sharded):
        raise p.cannot_shard(node, "combines values that are sharded differently")
    to_shard: dict[Node, ShardSpec] = {}
    for x in inputs:
        if p.layout(x) is None and p.shape(x)[first.dim] != 1:
            p.shard_operand(to_shard, x, first.spec())
    result = replace(first, origins=p.origins(sharded))
    return Decision(result if len(values(node)) == 1 else (result,) * len(values(node)), to_shard)


def unfold(p: Known, node: Node) -> Decision:
    """Windows along another dimension; their entries become the last one."""
    layout = p.input_layout(node)
    if argument(node, "dimension") % len(p.shape(operand(node))) == layout.dim:
        raise p.cannot_shard(node, "takes windows of the sharded dimension")
    return Decision(layout)


def index_put(p: Known, node: Node) -> Decision:
    """x[indices] = value, where the indexed dimensions are the first ones, and the sharded one
    comes after them.
    """
    x, value = operands(node, 0, 2)
    indices = constant(node, 1)
    layout = p.layout(x)
    used = [dim for dim, i in enumerate(indices) if i is not None]
    replicated = all(p.layout(i) is None for i in indices if i is not None)
    if layout is None:
        inner = p.layout(value)
        from_end = 0 if inner is None else len(p.shape(value)) - inner.dim
        layout = inner and replace(inner, dim=len(p.shape(x)) - from_end)
    if layout is None or not replicated or used != list(range(len(used))) or layout.dim < len(used):
        raise p.cannot_shard(node, "writes along the sharded dimension")
    from_end = len(p.shape(x)) - layout.dim
    to_shard: dict[Node, ShardSpec] = {}
    for written in (x, value):
        shape = p.shape(written)
        dim = len(shape) - from_end
        own = p.layout(written)
        if own and not own.same_shards(replace(layout, dim=dim)):
            raise p.cannot_shard(node, "combines values that are sharded differently")
        if own is None and dim >= 0 and shape[dim] != 1:
            p.shard_operand(to_shard, written, ShardSpec(dim, layout.blocks, layout.padded))
    result = replace(
        layout, origins=p.origins(p.sharded([x, value])), features=None, padding_value=0
    )
    # it is written into the padding, too
    broadcast = value not in to_shard and p.layout(value) is None
    fills = zeros(p, node, to_shard)
    return Decision(
        replace(result, padding_value=None) if broadcast else result, to_shard, fills=fills
    )


def index_add(p: Known, node: Node) -> Decision:
    """index_add, index_copy, scatter along another dimension than the sharded one, which all
    operands but a 1-D index have."""
    x, index = operands(node, 0, 2)
    dim = constant(node, 1)
    source = constant(node, 3)
    whole_rows = len(p.shape(index)) == 1 and "index" in op_name(node)
    given = [x, source] if whole_rows else [x, source, index]
    combined = [value for value in given if isinstance(value, Node)]
    sharded = p.sharded(combined)
    first = p.layout(sharded[0]) if sharded else None
    if first is None or first.dim == dim % len(p.shape(x)):
        raise p.cannot_shard(node, "writes along the sharded dimension")
    to_shard: dict[Node, ShardSpec] = {}
    for value in combined:
        layout = p.layout(value)
        if (
            p.shape(value)[first.dim] != p.shape(x)[first.dim]
            or layout
            and not layout.same_shards(first)
        ):
            raise p.cannot_shard(node, "combines values that are sharded differently")
        if layout is None:
            p.shard_operand(to_shard, value, first.spec())
    padding_value = 0 if isinstance(source, Node) else None
    result = replace(first, origins=p.origins(sharded), features=None, padding_value=padding_value)
    return Decision(result, to_shard, fills=zeros(p, node, to_shard))
