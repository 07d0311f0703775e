"""Rules of operators that move positions: views, permutations, pieces, joins, and indexing of other
dimensions.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch.fx import Node

from ..ir.nodes import constant, op_name, operand, operands, values
from .known import Known
from .padding import equal_padding, padding_values, settle
from .placement import Decision, Layout, PaddingValue, ShardSpec
from .rules_value import argument

aten = torch.ops.aten


def view(p: Known, node: Node) -> Decision:
    """Find the smallest groups of input and output dimensions of equal product around the sharded
    dimension, and where its shards are in the output."""
    x = operand(node)
    layout = p.input_layout(node)
    before = p.shape(x)
    after = p.shape(node)
    if prod(before) != prod(after) or values(x)[0].dtype != values(node)[0].dtype:
        raise p.cannot_shard(node, "reads a sharded value as another type")
    (first, last), (start, stop) = _groups(before, after, layout.dim)
    long_dims = [dim for dim in range(start, stop) if after[dim] != 1]
    if prod(before[first:last]) == before[layout.dim] and len(long_dims) == 1:
        result = replace(layout, dim=long_dims[0])
        if p.is_small(x) and after[result.dim - 1] == 1 != before[layout.dim - 1]:
            raise p.cannot_shard(node, "makes one head of the sharded features")
        return _viewed(p, node, result)
    if layout.padded or len(dict.fromkeys(layout.blocks)) > 1:
        raise p.cannot_shard(node, f"views {before} as {after}")
    # The full tensor of these dimensions consists of this many equal pieces, each sharded evenly.
    count = prod(before[first : layout.dim]) * len(layout.blocks)
    product = 1
    for dim in range(start, stop):
        extent = after[dim]
        if product * extent > count or product == count and extent > 1:
            pieces, rest = divmod(count, product)
            if rest == 0 and extent % (pieces * p.tp) == 0:
                features = _features(layout, before, first, extent) if product == 1 else None
                blocks = (extent // pieces,) * pieces
                return _viewed(p, node, replace(layout, dim=dim, blocks=blocks, features=features))
            contiguous = (
                len(layout.blocks) == 1 and layout.dim == first and before[first] % extent == 0
            )
            if rest == 0 and pieces == 1 and contiguous:
                raise p.needs_blocks(
                    node, layout, range(0, before[first] + 1, before[first] // extent)
                )
            break
        product *= extent
    raise p.cannot_shard(node, f"views {before} as {after}")


def _features(
    layout: Layout, before: Sequence[int], first: int, extent: int
) -> tuple[int, int] | None:
    """Return ``Layout.features`` of the sharded dimension when it has ``extent`` entries after a
    view.
    """
    if not layout.features or prod(before[first : layout.dim]) != 1:
        return None
    start, per_entry = layout.features
    total = before[layout.dim] * per_entry
    return (start, total // extent) if total % extent == 0 else None


def _viewed(p: Known, node: Node, layout: Layout) -> Decision:
    return Decision(
        layout,
        args=(operand(node), local_shape(p, p.shape(node), layout)),
        target=aten.reshape.default,
    )


def local_shape(p: Known, shape: Sequence[int], layout: Layout) -> list[int]:
    """Return the shape of one rank's shard."""
    return [
        layout.extent(p.tp) if dim == layout.dim else extent for dim, extent in enumerate(shape)
    ]


def _groups(
    before: Sequence[int], after: Sequence[int], dim: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return dimensions [first, last) of ``before`` that include ``dim``, and those of ``after`` of
    equal product.
    """
    i = j = 0
    while True:
        first = i
        start = j
        if i < len(before) and before[i] == 1 and i != dim:
            i += 1
            continue
        if j < len(after) and after[j] == 1 and (i >= len(before) or before[i] != 1):
            j += 1
            continue
        left = before[i]
        right = after[j]
        i = i + 1
        j = j + 1
        while left != right:
            if left < right:
                left = left * before[i]
                i = i + 1
            else:
                right = right * after[j]
                j = j + 1
        if first <= dim < i:
            return (first, i), (start, j)


def permute(p: Known, node: Node) -> Decision:
    x = operand(node)
    order = list(range(len(p.shape(x))))
    if len(node.args) == 3:
        a, b = (constant(node, k) % len(order) for k in (1, 2))
        order[a], order[b] = order[b], order[a]
    elif len(node.args) == 2:
        order = [dim % len(order) for dim in constant(node, 1)]
    elif op_name(node) in ("mT", "mH", "adjoint"):
        order[-2:] = order[:-3:-1]
    else:
        order.reverse()
    layout = p.input_layout(node)
    return Decision(replace(layout, dim=order.index(layout.dim)))


def movedim(p: Known, node: Node) -> Decision:
    x = operand(node)
    rank = len(p.shape(x))
    source = _dims(constant(node, 1))
    target = _dims(constant(node, 2))
    order = [dim for dim in range(rank) if dim not in [s % rank for s in source]]
    for position, dim in sorted(
        zip((t % rank for t in target), (s % rank for s in source), strict=True)
    ):
        order.insert(position, dim)
    layout = p.input_layout(node)
    return Decision(replace(layout, dim=order.index(layout.dim)))


def _dims(dims: int | Sequence[int]) -> list[int]:
    return [dims] if isinstance(dims, int) else list(dims)


def unsqueeze(p: Known, node: Node) -> Decision:
    layout = p.input_layout(node)
    dim = constant(node, 1) % len(p.shape(node))
    return Decision(replace(layout, dim=layout.dim + (dim <= layout.dim)))


def squeeze(p: Known, node: Node) -> Decision:
    x = operand(node)
    layout = p.input_layout(node)
    shape = p.shape(x)
    given = constant(node, 1) if len(node.args) > 1 else range(len(shape))
    dims = [dim % len(shape) for dim in _dims(given)]
    removed = [dim for dim in dims if shape[dim] == 1]
    result = replace(layout, dim=layout.dim - sum(dim < layout.dim for dim in removed))
    return _viewed(p, node, result)


def expand(p: Known, node: Node) -> Decision:
    x = operand(node)
    layout = p.input_layout(node)
    shape = p.shape(node)
    result = replace(layout, dim=layout.dim + len(shape) - len(p.shape(x)))
    return Decision(result, args=(x, local_shape(p, shape, result)), target=aten.expand.default)


def like(p: Known, node: Node) -> Decision:
    """expand_as, view_as: a replicated value stays replicated, however the other is sharded."""
    x = operand(node)
    target = aten.expand.default if op_name(node) == "expand_as" else aten.reshape.default
    if p.layout(x) is None:
        return Decision(None, args=(x, list(p.shape(node))), target=target, common=x in p.common)
    return expand(p, node) if target is aten.expand.default else view(p, node)


def repeat(p: Known, node: Node) -> Decision:
    x = operand(node)
    layout = p.input_layout(node)
    repeats = constant(node, 1)
    result = replace(layout, dim=layout.dim + len(repeats) - len(p.shape(x)))
    times = repeats[result.dim]
    if times != 1 and layout.padded:
        raise p.cannot_shard(node, "repeats a padded dimension")
    return Decision(
        replace(
            result, blocks=layout.blocks * times, features=layout.features if times == 1 else None
        )
    )


def repeat_interleave(p: Known, node: Node) -> Decision:
    x = operand(node)
    times = constant(node, 1)
    layout = p.input_layout(node)
    rank = len(p.shape(x))
    dim = argument(node, "dim")
    if not isinstance(times, int) or dim is None:
        raise p.cannot_shard(node, "repeats by a tensor")
    if dim % rank != layout.dim:
        return Decision(layout)
    if layout.padded:
        raise p.cannot_shard(node, "repeats a padded dimension")
    result = replace(layout, blocks=tuple(times * block for block in layout.blocks), features=None)
    return Decision(result, args=(x, times, dim), target=aten.repeat_interleave.self_int)


def _pieces(
    p: Known, node: Node, layout: Layout, bounds: Sequence[tuple[int, int]]
) -> list[Layout]:
    """Return the layout of each piece (start, stop) of the sharded dimension."""
    edges = [0]
    for block in layout.blocks:
        edges.append(edges[-1] + block)
    if layout.padded and any(bound != (0, edges[-1]) for bound in bounds):
        raise p.cannot_shard(node, "takes pieces of a padded dimension")
    if all(a in edges and b in edges for a, b in bounds):
        return [layout.piece(a, layout.blocks[edges.index(a) : edges.index(b)]) for a, b in bounds]
    raise p.needs_blocks(node, layout, sorted({edge for bound in bounds for edge in bound}))


def split(p: Known, node: Node) -> Decision:
    """split, chunk, split_with_sizes, tensor_split."""
    x = operand(node)
    layout = p.input_layout(node)
    dim = argument(node, "dim") % len(p.shape(x))
    sizes = [tuple(value.shape)[dim] for value in values(node)]
    if dim != layout.dim:
        return Decision((layout,) * len(sizes))
    edges = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    result = tuple(_pieces(p, node, layout, list(zip(edges, edges[1:], strict=False))))
    args = (x, [piece.extent(p.tp) for piece in result], dim)
    return Decision(result, args=args, target=aten.split_with_sizes.default)


def unbind(p: Known, node: Node) -> Decision:
    x = operand(node)
    layout = p.input_layout(node)
    dim = argument(node, "dim") % len(p.shape(x))
    if dim == layout.dim:
        raise p.needs_blocks(node, layout, range(p.shape(x)[dim] + 1))
    return Decision((replace(layout, dim=layout.dim - (dim < layout.dim)),) * len(values(node)))


def select(p: Known, node: Node) -> Decision:
    x = operand(node)
    layout = p.input_layout(node)
    dim = constant(node, 1) % len(p.shape(x))
    if dim == layout.dim:
        raise p.needs_blocks(node, layout, range(p.shape(x)[dim] + 1))
    return Decision(replace(layout, dim=layout.dim - (dim < layout.dim)))


def _bounds(node: Node, extent: int) -> tuple[int, int, int]:
    """Return start, stop and step of a slice of a dimension of ``extent``, with both ends in [0,
    extent].
    """
    start = argument(node, "start") or 0
    stop = argument(node, "end")
    stop = extent if stop is None else stop
    start, stop = (
        max(0, min(extent, edge + extent if edge < 0 else edge)) for edge in (start, stop)
    )
    return start, stop, argument(node, "step")


def slice_(p: Known, node: Node) -> Decision:
    x = operand(node)
    layout = p.input_layout(node)
    rank = len(p.shape(x))
    dim = argument(node, "dim") % rank
    extent = p.shape(x)[dim]
    start, stop, step = _bounds(node, extent)
    if dim != layout.dim or (start, stop, step) == (0, extent, 1):
        return Decision(
            layout, args=(x, dim, 0, layout.extent(p.tp)) if dim == layout.dim else None
        )
    if step > 1:
        if (
            len(layout.blocks) > 1
            or (extent // p.tp) % step
            or start >= step
            or stop != extent
            or layout.padded
        ):
            raise p.cannot_shard(node, "takes every k-th entry of the sharded dimension")
        result = replace(layout, blocks=(extent // step,), features=None)
        return Decision(result, args=(x, dim, start, extent // p.tp, step))
    siblings = [u for u in x.users if u.target is node.target and argument(u, "dim") % rank == dim]
    others = [
        bound[:2] for u in siblings if (bound := _bounds(u, extent))[2] == 1 and bound[0] < bound[1]
    ]
    result = _pieces(p, node, layout, [(start, stop), *others])[0]
    return Decision(result, args=(x, dim, start // p.tp, stop // p.tp))


def narrow(p: Known, node: Node) -> Decision:
    x = operand(node)
    dim = constant(node, 1)
    start = constant(node, 2)
    length = constant(node, 3)
    layout = p.input_layout(node)
    if dim % len(p.shape(x)) != layout.dim:
        return Decision(layout)
    if not isinstance(start, int):
        raise p.cannot_shard(node, "starts where a tensor says")
    result = _pieces(p, node, layout, [(start, start + length)])[0]
    return Decision(result, args=(x, dim, start // p.tp, length // p.tp))


def join(p: Known, node: Node) -> Decision:
    """cat, stack. Along the sharded dimension the operands' blocks are concatenated; else all are
    sharded alike.
    """
    joined: Sequence[Node] = constant(node, 0)
    new = node.target is aten.stack.default
    dim = argument(node, "dim") % len(p.shape(node))
    sharded = p.sharded(joined)
    first = p.sharded_layout(sharded[0])
    if not new and first.dim == dim:
        layouts = [p.layout(x) for x in joined]
        pieces = [
            layout for layout in layouts if layout and layout.dim == dim and not layout.padded
        ]
        if len(pieces) < len(joined):
            raise p.cannot_shard(node, "joins sharded and replicated values")
        blocks = tuple(block for piece in pieces for block in piece.blocks)
        return Decision(Layout(dim, blocks, p.origins(sharded)))
    if any(not first.same_shards(p.sharded_layout(x)) for x in sharded):
        raise p.cannot_shard(node, "joins values that are sharded differently")
    to_shard: dict[Node, ShardSpec] = {}
    for x in dict.fromkeys(joined):
        if p.layout(x) is None:
            if p.shape(x)[first.dim : first.dim + 1] != (sum(first.blocks),):
                raise p.cannot_shard(node, "joins sharded and replicated values")
            p.shard_operand(to_shard, x, first.spec())
    fills, padding_value = equal_padding(p, node, to_shard)
    dim = first.dim + (new and dim <= first.dim)
    result = replace(first, dim=dim, origins=p.origins(sharded), padding_value=padding_value)
    return Decision(result, to_shard, fills=fills)


def index(p: Known, node: Node) -> Decision:
    """x[i, j]: the sharded dimension must not be indexed, and the indices must be replicated."""
    indices = constant(node, 1)
    layout = p.input_layout(node)
    used = [dim for dim, i in enumerate(indices) if i is not None]
    replicated = all(p.layout(i) is None for i in indices if i is not None)
    if not replicated or layout.dim in used:
        raise p.cannot_shard(node, "indexes the sharded dimension")
    if any(values(indices[dim])[0].dtype in (torch.bool, torch.uint8) for dim in used):
        raise p.cannot_shard(node, "selects by a mask")
    rank = max(len(p.shape(indices[dim])) for dim in used)
    adjacent = used[-1] - used[0] + 1 == len(used)
    front = layout.dim > used[0] or not adjacent
    return Decision(
        replace(
            layout, dim=layout.dim - sum(dim < layout.dim for dim in used) + (rank if front else 0)
        )
    )


def gather(p: Known, node: Node) -> Decision:
    """gather(x, dim, index) along another dimension than the sharded one; the index is sharded like
    x.
    """
    x, index = operands(node, 0, 2)
    dim = constant(node, 1)
    layout = p.layout(x) or p.sharded_layout(index)
    if dim % len(p.shape(x)) == layout.dim or p.shape(x)[layout.dim] != p.shape(index)[layout.dim]:
        raise p.cannot_shard(node, "gathers along the sharded dimension")
    if any(own and not own.same_shards(layout) for own in (p.layout(x), p.layout(index))):
        raise p.cannot_shard(node, "gathers from values that are sharded differently")
    to_shard: dict[Node, ShardSpec] = {}
    for value in (x, index):
        if p.layout(value) is None:
            p.shard_operand(to_shard, value, layout.spec())
    padding = padding_values(p, node, to_shard)
    fills: dict[Node, PaddingValue] = {index: 0} if padding.get(index, 0) != 0 else {}
    result = replace(
        layout, origins=p.origins(p.sharded([x, index])), padding_value=padding.get(x, 0)
    )
    return Decision(result, to_shard, fills=fills)


def index_select(p: Known, node: Node) -> Decision:
    x = operand(node)
    dim = constant(node, 1)
    layout = p.input_layout(node)
    if layout.dim == dim % len(p.shape(x)) or len(p.sharded(node.all_input_nodes)) > 1:
        raise p.cannot_shard(node, "selects along the sharded dimension")
    return Decision(layout)


def other_dims(p: Known, node: Node) -> Decision:
    """Operators along other dimensions that keep the sharded one as it is (roll, flip, tril, pad at
    the end).
    """
    layout = p.input_layout(node)
    if layout.dim in _dims_worked_on(p, node):
        raise p.cannot_shard(node, "works along the sharded dimension")
    fills, (padding_value,) = (
        settle(p, node, layout, {}, pointwise=False) if layout.padded else ({}, (0,))
    )
    return Decision(replace(layout, padding_value=padding_value), fills=fills)


def _dims_worked_on(p: Known, node: Node) -> list[int]:
    rank = len(p.shape(operand(node)))
    name = str(node.target)
    if name.startswith("aten.tri"):
        return [rank - 2, rank - 1]
    if name.startswith(("aten.pad", "aten.constant_pad_nd")):
        widths = constant(node, 1)
        return [rank - 1 - k // 2 for k in range(len(widths)) if widths[k]]
    dims = argument(node, "dims")
    return [dim % rank for dim in dims] or list(range(rank))


def view_as_complex(p: Known, node: Node) -> Decision:
    """A last dimension of 2 appears or disappears; it must not be the sharded one."""
    layout = p.input_layout(node)
    if layout.dim >= min(len(p.shape(operand(node))), len(p.shape(node))):
        raise p.cannot_shard(node, "takes apart the sharded dimension")
    return Decision(replace(layout, padding_value=0 if layout.padding_value == 0 else None))
