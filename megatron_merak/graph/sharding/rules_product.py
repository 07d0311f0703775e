"""Rules of products: linear layers in all their forms, batched products, grouped experts,
attention, convolutions.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ...planner.tables import family
from ..ir.nodes import is_op, op_name, operands, schema, values
from .experts import DIVIDED
from .known import Known
from .padding import zeros
from .placement import Decision, Layout, ShardSpec
from .rules_value import argument
from .writer import Writer

aten = torch.ops.aten

COLUMN = "column parallel: its output features are sharded"
ROW = "row parallel: its input features are sharded"
_ALIGNMENT = 16  # bytes, of the rows of torch's grouped product


@dataclass(frozen=True)
class MatrixProduct:
    """a @ b (+ added).

    contracted: dimension of ``b`` that is summed over; of ``a`` it is the last.
    out:        the other matrix dimension of ``b``: its output features.
    bare:       the operator without ``added``.
    """

    node: Node
    a: Node
    b: Node
    contracted: int
    out: int
    added: Node | None = None
    bare: Callable[..., Any] | None = None


def linear(p: Known, node: Node) -> Decision | None:
    x = argument(node, "input")
    weight = argument(node, "weight")
    bias = argument(node, "bias")
    if len(p.shape(weight)) != 2:
        return None
    return product(
        p, MatrixProduct(node, x, weight, contracted=1, out=0, added=bias, bare=aten.linear.default)
    )


def matmul(p: Known, node: Node) -> Decision | None:
    a, b = operands(node, 0, 1)
    rank = len(p.shape(b))
    if len(p.shape(a)) < 2 or rank < 2:
        return None
    return product(p, MatrixProduct(node, a, b, contracted=rank - 2, out=rank - 1))


def addmm(p: Known, node: Node) -> Decision | None:
    added, a, b = operands(node, 0, 1, 2)
    rank = len(p.shape(b))
    bare = aten.mm.default if rank == 2 else aten.bmm.default
    return product(
        p, MatrixProduct(node, a, b, contracted=rank - 2, out=rank - 1, added=added, bare=bare)
    )


def grouped(p: Known, node: Node) -> Decision | None:
    """Rows of a [tokens, i] times their expert's weight, b [experts, i, o]; each expert's weight is
    sharded.
    """
    a, b = operands(node, 0, 1)
    layout = p.layout(a)
    weight = p.layout(b)
    if _divides_experts(p, b):
        if layout is not None:
            raise p.cannot_shard(node, "multiplies whole rows with whole experts", [a])
        p.explain_pin(b, DIVIDED)
        return Decision(None)  # rows are exchanged, see lowering/experts.py
    if layout and layout.dim != 1 or weight and weight.dim == 0 or len(p.shape(a)) != 2:
        return None
    along_rows = layout is not None or weight is not None and weight.dim == 1
    extent = p.shape(a)[1] if along_rows else p.shape(b)[2]
    if op_name(node) == "_grouped_mm" and extent // p.tp * _itemsize(node) % _ALIGNMENT:
        return None
    return product(p, MatrixProduct(node, a, b, 1, 2))


def _itemsize(node: Node) -> int:
    return values(node)[0].dtype.itemsize


def _divides_experts(p: Known, weight: Node) -> bool:
    """Whether a rank has the weights of some experts; they are sharded so now if it is asked for."""
    if not p.assumptions.experts:
        return False
    layout = p.layout(weight)
    if layout is not None:
        return layout.dim == 0
    experts = p.shape(weight)[0]
    return experts % p.tp == 0 and p.shard_parameter(weight, ShardSpec(0, (experts,)), DIVIDED)


def product(p: Known, m: MatrixProduct) -> Decision | None:
    """Return the decision for any product: column parallel, row parallel, or sharded along a batch
    dimension.
    """
    a = p.layout(m.a)
    b = p.layout(m.b)
    if m.added is not None and p.layout(m.added) is not None and a is None and b is None:
        return None
    if a is None and b is None:
        return _row(p, m) if p.row_requested(m.b) else _column(p, m)
    along_matrix = [
        x for x, layout in ((m.a, a), (m.b, b)) if layout and layout.dim >= len(p.shape(x)) - 2
    ]
    if a and b and len(along_matrix) == 1:
        raise p.cannot_shard(m.node, "multiplies values that are sharded differently", along_matrix)
    if a and a.dim == len(p.shape(m.a)) - 1 or b and b.dim == m.contracted:
        return _row(p, m)
    rank = len(p.shape(m.node))
    if b and b.dim == m.out:
        if a:
            return None
        p.explain_pin(m.b, COLUMN)
        if (name := p.parameter_of(m.b)) in p.assumptions.pins:
            p.record_column(str(name), p.shape(m.b)[m.out], m.node)
        return _sharded_result(p, m, Layout(rank - 1, b.blocks, b.origins, b.padded))
    dims = [layout.dim + rank - len(p.shape(x)) for x, layout in ((m.a, a), (m.b, b)) if layout]
    if a and b and (dims[0] != dims[1] or not a.same_shards(replace(b, dim=a.dim))):
        raise p.cannot_shard(m.node, "multiplies values that are sharded differently")
    p.explain_pin(m.a, COLUMN)
    layout = a or b
    assert layout is not None
    return _sharded_result(
        p, m, Layout(dims[0], layout.blocks, p.origins(p.sharded([m.a, m.b])), layout.padded)
    )


def _column(p: Known, m: MatrixProduct) -> Decision | None:
    """Column parallel: shard the weight's output features; the input is replicated, the output
    sharded.
    """
    # weight @ x: its rows are the output features
    left = p.parameter_of(m.b) is None and len(p.shape(m.a)) == 2
    weight, dim = (m.a, 0) if left else (m.b, m.out)
    name = p.parameter_of(weight)
    if name is None or left and m.added is not None:
        return None
    if _leads_to_sum(m.node):
        p.note_replicated(
            name, "it is the first factor of an adapter, of which the second is sharded"
        )
        return None
    extent = p.shape(weight)[dim]
    padded = p.padded_extent(extent)
    if padded is None:
        p.note_replicated(name, f"its {extent} output features are not divisible by {p.tp}")
        return None
    blocks = p.assumptions.blocks.get((p.assumptions.role(name), extent), (extent,))
    padded = padded if len(blocks) == 1 else 0
    if not p.shard_parameter(weight, ShardSpec(dim, blocks, padded), COLUMN):
        return None
    p.record_column(name, extent, m.node)
    return _sharded_result(
        p, m, Layout(len(p.shape(m.node)) - 1 - left, blocks, (name,), padded, features=(0, 1))
    )


def _leads_to_sum(node: Node) -> bool:
    """Whether a product is the first of an adapter: one that widens it comes next, whose result is
    added to that of a layer.

    Sharded, it would make the second one row parallel, so that the layer could not be sharded.
    """
    widened = False
    last = node
    while len(last.users) == 1:
        (user,) = last.users
        if is_op(user, "linear") and user.args[0] is last and not widened:
            narrow, wide = (values(each)[0].shape[-1] for each in (last, user))
            widened = narrow < wide
            if not widened:
                return False
        elif is_op(user, "add") and widened:
            return any(is_op(x, "linear") for x in user.all_input_nodes if x is not last)
        elif not is_op(user, "mul", "to", "_to_copy"):
            return False
        last = user
    return False


def _sharded_result(p: Known, m: MatrixProduct, layout: Layout) -> Decision:
    """Return the decision for a result that is sharded by ``layout``, as ``added`` and batch
    operands then are.
    """
    rank = len(p.shape(m.node))
    to_shard: dict[Node, ShardSpec] = {}
    for x in (m.a, m.b, m.added):
        if x is None:
            continue
        shape = p.shape(x)
        dim = layout.dim - (rank - len(shape))
        if own := p.layout(x):
            if x is m.added and not own.same_shards(replace(layout, dim=dim)):
                raise p.cannot_shard(
                    m.node, f"adds {p.parameter_of(x) or 'a value'}, which is sharded differently"
                )
            continue
        batch = dim < len(shape) - 2 or x is m.added
        if (
            batch
            and dim >= 0
            and shape[dim] != 1
            and not (x is m.b and m.node.target is aten.linear.default)
        ):
            p.shard_operand(to_shard, x, ShardSpec(dim, layout.blocks, layout.padded))
    return Decision(layout, to_shard, fills=zeros(p, m.node, to_shard))


def _row(p: Known, m: MatrixProduct) -> Decision | None:
    """Row parallel: shard both operands along the contracted dimension; ``added`` is added after
    the all-reduce.
    """
    a = p.layout(m.a)
    b = p.layout(m.b)
    last = len(p.shape(m.a)) - 1
    if (
        a
        and a.dim != last
        or b
        and b.dim != m.contracted
        or a
        and b
        and (a.blocks, a.padded) != (b.blocks, b.padded)
    ):
        raise p.cannot_shard(m.node, "multiplies values that are sharded differently")
    weight = p.parameter_of(m.b)
    if weight is None and not (b and p.parameter_of(m.a)):
        raise p.cannot_shard(m.node, "contracts the sharded dimension")
    if (
        m.node.kwargs
        and m.added is not None
        and any(key in m.node.kwargs for key in ("alpha", "beta"))
    ):
        raise p.cannot_shard(m.node, "scales what it adds")
    if (
        p.refuse_costly
        and a
        and a.renormalized
        and p.shape(m.b)[m.out] > p.shape(m.b)[m.contracted]
    ):
        raise p.cannot_shard(m.node, "expands a value that was normalised over the ranks")
    to_shard: dict[Node, ShardSpec] = {}
    if a is None and b is None:
        extent = p.shape(m.a)[last]
        if extent % p.tp:
            p.note_replicated(
                str(weight), f"its {extent} input features are not divisible by {p.tp}"
            )
            return None
        if not p.shard_parameter(m.b, ShardSpec(m.contracted, (extent,)), f"{ROW}, as asked for"):
            return None
        to_shard[m.a] = ShardSpec(last, (extent,))
    elif b is not None and a is None:
        p.explain_pin(m.b, ROW)
        p.shard_operand(
            to_shard, m.a, ShardSpec(last, b.blocks, b.padded), "row parallel: its input is sharded"
        )
    elif a is not None:
        source = ", ".join(family(origin) for origin in a.origins[:3])
        why = f"row parallel: its input comes sharded from {source}"
        if b is None:
            p.shard_operand(to_shard, m.b, ShardSpec(m.contracted, a.blocks, a.padded), why)
        else:
            p.explain_pin(m.b, why)
    if m.added is not None and p.layout(m.added) is not None:
        raise p.cannot_shard(
            m.node,
            f"adds {p.parameter_of(m.added) or 'a value'}, which is sharded, to a replicated one",
        )
    write = _write_row(m, m.added) if m.added is not None else None
    return Decision(None, to_shard, fills=zeros(p, m.node, to_shard), reduce=True, write=write)


def _write_row(m: MatrixProduct, added: Node) -> Callable[[Writer, Node], Node]:
    def write(writer: Writer, node: Node) -> Node:
        partial = writer.call(m.bare, (writer.operand(m.a), writer.operand(m.b)), like=node)
        return writer.call(
            aten.add.Tensor, (writer.sum(partial), writer.get(added)), like=node, sharded=False
        )

    return write


def attention(p: Known, node: Node) -> Decision:
    """Query, key and value are sharded along the heads; each rank takes the key-value heads of its
    query heads.
    """
    query, key, value = operands(node, 0, 1, 2)
    rank = len(p.shape(query))
    mask = argument(node, "attn_mask")
    sharded = p.sharded([query, key, value])
    if not sharded:
        raise p.cannot_shard(node, "takes a sharded mask")
    layouts = {x: p.sharded_layout(x) for x in sharded}
    dim = min(layout.dim for layout in layouts.values())
    if elsewhere := [x for x in sharded if layouts[x].dim != dim or dim >= rank - 2]:
        raise p.cannot_shard(node, "needs positions and features of its heads unsharded", elsewhere)
    heads = {x: p.shape(x)[dim] for x in (query, key, value)}
    blocks = {x: layout.blocks for x, layout in layouts.items()}
    uniform = len(dict.fromkeys(heads.values())) == 1
    if any(layout.padded for layout in layouts.values()) or heads[query] % p.tp:
        raise p.cannot_shard(
            node, f"has {heads[query]} heads, which {p.tp} ranks do not share evenly"
        )
    query_blocks = blocks[sharded[0]] if uniform else (heads[query],)
    if any(blocks[x] != (query_blocks if uniform else (heads[x],)) for x in sharded):
        raise p.cannot_shard(node, "reads heads that are sharded differently")
    to_shard: dict[Node, ShardSpec] = {}
    for x in (query, key, value):
        if p.layout(x) is not None:
            continue
        repeats = heads[query] // heads[x]
        if uniform or heads[x] % p.tp == 0:
            p.shard_operand(to_shard, x, ShardSpec(dim, query_blocks if uniform else (heads[x],)))
        else:
            to_shard[x] = ShardSpec(dim, (heads[query],), repeats=repeats)
    if isinstance(mask, Node):
        shape = p.shape(mask)
        mask_dim = dim - (rank - len(shape))
        own = p.layout(mask)
        if own is not None:
            if not own.same_shards(Layout(mask_dim, query_blocks)):
                raise p.cannot_shard(node, "takes a mask that is sharded differently")
        elif mask_dim >= 0 and shape[mask_dim] != 1:
            p.shard_operand(to_shard, mask, ShardSpec(mask_dim, query_blocks))
    return Decision(Layout(dim, query_blocks, p.origins(sharded)), to_shard)


def depthwise(p: Known, node: Node) -> Decision:
    """A convolution with one group per channel: input [b, c, ...], weight [c, 1, ...], sharded
    along the channels.
    """
    x = argument(node, "input")
    weight = argument(node, "weight")
    bias = argument(node, "bias")
    layout = p.layout(x)
    groups = argument(node, "groups")
    channels = p.shape(weight)[0]
    if layout is None or layout.dim != len(p.shape(x)) - len(p.shape(weight)) + 1 or layout.padded:
        raise p.cannot_shard(node, "convolves along the sharded dimension")
    if groups != p.shape(x)[layout.dim] or channels != groups:
        raise p.cannot_shard(node, "mixes the sharded channels")
    to_shard: dict[Node, ShardSpec] = {}
    for value in (weight, bias):
        if value is None:
            continue
        own = p.layout(value)
        if own is None:
            p.shard_operand(to_shard, value, ShardSpec(0, layout.blocks))
        elif not own.same_shards(Layout(0, layout.blocks)):
            raise p.cannot_shard(node, "has a weight that is sharded differently")
    names = [parameter.name for parameter in schema(node).arguments]
    args = list(node.args) + [
        argument(node, name) for name in names[len(node.args) : names.index("groups") + 1]
    ]
    args[names.index("groups")] = layout.extent(p.tp)
    return Decision(layout, to_shard, args=tuple(args))
