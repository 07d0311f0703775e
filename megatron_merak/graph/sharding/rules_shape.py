"""Rules of ops that move positions: views, permutations, pieces, joins, and indexing of other dimensions."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch.fx import Node

from ..ir.nodes import op_name, values
from .padding import alike, fillers, settle
from .placement import Cut, Decision, Split
from .propagate import Propagation
from .rules_value import argument

aten = torch.ops.aten


def view(p: Propagation, node: Node) -> Decision:
    """Find the smallest group of dimensions, in and out, that holds the divided one, and where its parts land."""
    x = node.args[0]
    split, before, after = p.subject(node), p.shape(x), p.shape(node)
    if prod(before) != prod(after) or values(x)[0].dtype != values(node)[0].dtype:
        raise p.unfit(node, "reads a divided value as another type")
    (first, last), (start, stop) = _group(before, after, split.dim)
    inside = [dim for dim in range(start, stop) if after[dim] != 1]
    if prod(before[first:last]) == before[split.dim] and len(inside) == 1:
        made = replace(split, dim=inside[0])
        if p.small(x) and after[made.dim - 1] == 1 != before[split.dim - 1]:
            raise p.unfit(node, "makes one head of the divided features")
        return _viewed(p, node, made)
    if split.padded or len(dict.fromkeys(split.blocks)) > 1:
        raise p.unfit(node, f"views {before} as {after}")
    outer = prod(before[first : split.dim]) * len(split.blocks)  # the parts: so many pieces, each divided evenly
    seen = 1
    for dim in range(start, stop):
        extent = after[dim]
        if seen * extent > outer or seen == outer and extent > 1:
            pieces, rest = divmod(outer, seen)
            if rest == 0 and extent % (pieces * p.tp) == 0:
                rows = _rows(split, before, first) if seen == 1 else None
                per = before[split.dim] * rows[1] // extent if rows else 0
                rows = (rows[0], per) if rows and per * extent == before[split.dim] * rows[1] else None
                return _viewed(p, node, replace(split, dim=dim, blocks=(extent // pieces,) * pieces, rows=rows))
            whole = len(split.blocks) == 1 and split.dim == first and before[first] % extent == 0
            if rest == 0 and pieces == 1 and whole:
                raise p.reblock(node, split, range(0, before[first] + 1, before[first] // extent))
            break
        seen *= extent
    raise p.unfit(node, f"views {before} as {after}")


def _rows(split: Split, before: Sequence[int], first: int) -> tuple[int, int] | None:
    return split.rows if prod(before[first : split.dim]) == 1 else None


def _viewed(p: Propagation, node: Node, split: Split) -> Decision:
    return Decision(split, args=(node.args[0], local(p, p.shape(node), split)), target=aten.reshape.default)


def local(p: Propagation, shape: Sequence[int], split: Split) -> list[int]:
    """The shape of a rank's part."""
    return [split.extent(p.tp) if dim == split.dim else extent for dim, extent in enumerate(shape)]


def _group(before: Sequence[int], after: Sequence[int], dim: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The dimensions [first, last) of ``before`` that hold ``dim`` and, of equal product, those of ``after``."""
    i = j = 0
    while True:
        first, start = i, j
        if i < len(before) and before[i] == 1 and i != dim:
            i += 1
            continue
        if j < len(after) and after[j] == 1 and (i >= len(before) or before[i] != 1):
            j += 1
            continue
        left, right = before[i], after[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        if first <= dim < i:
            return (first, i), (start, j)


def permute(p: Propagation, node: Node) -> Decision:
    x = node.args[0]
    order = list(range(len(p.shape(x))))
    if len(node.args) == 3:
        a, b = (dim % len(order) for dim in node.args[1:])
        order[a], order[b] = order[b], order[a]
    elif len(node.args) == 2:
        order = [dim % len(order) for dim in node.args[1]]
    elif op_name(node) in ("mT", "mH", "adjoint"):
        order[-2:] = order[:-3:-1]
    else:
        order.reverse()
    split = p.subject(node)
    return Decision(replace(split, dim=order.index(split.dim)))


def movedim(p: Propagation, node: Node) -> Decision:
    x, source, target = node.args
    rank = len(p.shape(x))
    source, target = ([v] if isinstance(v, int) else list(v) for v in (source, target))
    order = [dim for dim in range(rank) if dim not in [s % rank for s in source]]
    for place, dim in sorted(zip((t % rank for t in target), (s % rank for s in source), strict=True)):
        order.insert(place, dim)
    split = p.subject(node)
    return Decision(replace(split, dim=order.index(split.dim)))


def unsqueeze(p: Propagation, node: Node) -> Decision:
    split = p.subject(node)
    dim = node.args[1] % len(p.shape(node))
    return Decision(replace(split, dim=split.dim + (dim <= split.dim)))


def squeeze(p: Propagation, node: Node) -> Decision:
    x = node.args[0]
    split, shape = p.subject(node), p.shape(x)
    dims = node.args[1] if len(node.args) > 1 else range(len(shape))
    dims = [dim % len(shape) for dim in ([dims] if isinstance(dims, int) else dims)]
    gone = [dim for dim in dims if shape[dim] == 1]
    made = replace(split, dim=split.dim - sum(dim < split.dim for dim in gone))
    return _viewed(p, node, made)


def expand(p: Propagation, node: Node) -> Decision:
    x = node.args[0]
    split = p.subject(node)
    shape = p.shape(node)
    made = replace(split, dim=split.dim + len(shape) - len(p.shape(x)))
    return Decision(made, args=(x, local(p, shape, made)), target=aten.expand.default)


def like(p: Propagation, node: Node) -> Decision:
    """expand_as, view_as: a whole value stays whole, whatever becomes of the other."""
    x = node.args[0]
    target = aten.expand.default if op_name(node) == "expand_as" else aten.reshape.default
    if p.layout(x) is None:
        return Decision(None, args=(x, list(p.shape(node))), target=target, common=x in p.common)
    return expand(p, node) if target is aten.expand.default else view(p, node)


def repeat(p: Propagation, node: Node) -> Decision:
    x = node.args[0]
    split = p.subject(node)
    made = replace(split, dim=split.dim + len(node.args[1]) - len(p.shape(x)))
    times = node.args[1][made.dim]
    if times != 1 and split.padded:
        raise p.unfit(node, "repeats a padded dimension")
    return Decision(replace(made, blocks=split.blocks * times, rows=split.rows if times == 1 else None))


def repeat_interleave(p: Propagation, node: Node) -> Decision:
    x, times = node.args[:2]
    split, rank, dim = p.subject(node), len(p.shape(x)), argument(node, "dim")
    if not isinstance(times, int) or dim is None:
        raise p.unfit(node, "repeats by a tensor")
    if dim % rank != split.dim:
        return Decision(split)
    if split.padded:
        raise p.unfit(node, "repeats a padded dimension")
    made = replace(split, blocks=tuple(times * block for block in split.blocks), rows=None)
    return Decision(made, args=(x, times, dim), target=aten.repeat_interleave.self_int)


def _pieces(p: Propagation, node: Node, split: Split, bounds: Sequence[tuple[int, int]]) -> list[Split]:
    """Each piece when the divided dimension is cut at ``bounds``."""
    edges = [0]
    for block in split.blocks:
        edges.append(edges[-1] + block)
    if split.padded and any(bound != (0, edges[-1]) for bound in bounds):
        raise p.unfit(node, "takes pieces of a padded dimension")
    if all(a in edges and b in edges for a, b in bounds):
        return [split.piece(a, split.blocks[edges.index(a) : edges.index(b)]) for a, b in bounds]
    raise p.reblock(node, split, sorted({edge for bound in bounds for edge in bound}))


def split(p: Propagation, node: Node) -> Decision:
    """split, chunk, split_with_sizes, tensor_split."""
    x = node.args[0]
    layout, dim = p.subject(node), argument(node, "dim") % len(p.shape(x))
    sizes = [tuple(value.shape)[dim] for value in values(node)]
    if dim != layout.dim:
        return Decision((layout,) * len(sizes))
    edges = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    made = tuple(_pieces(p, node, layout, list(zip(edges, edges[1:], strict=False))))
    args = (x, [piece.extent(p.tp) for piece in made], dim)
    return Decision(made, args=args, target=aten.split_with_sizes.default)


def unbind(p: Propagation, node: Node) -> Decision:
    x = node.args[0]
    layout, dim = p.subject(node), argument(node, "dim") % len(p.shape(x))
    if dim == layout.dim:
        raise p.reblock(node, layout, range(p.shape(x)[dim] + 1))
    return Decision((replace(layout, dim=layout.dim - (dim < layout.dim)),) * len(values(node)))


def select(p: Propagation, node: Node) -> Decision:
    x = node.args[0]
    layout, dim = p.subject(node), node.args[1] % len(p.shape(x))
    if dim == layout.dim:
        raise p.reblock(node, layout, range(p.shape(x)[dim] + 1))
    return Decision(replace(layout, dim=layout.dim - (dim < layout.dim)))


def _bounds(node: Node, extent: int) -> tuple[int, int, int]:
    """Start, stop and step of a slice of a dimension, both ends inside it."""
    start, stop = argument(node, "start") or 0, argument(node, "end")
    stop = extent if stop is None else stop
    start, stop = (max(0, min(extent, edge + extent if edge < 0 else edge)) for edge in (start, stop))
    return start, stop, argument(node, "step")


def slice_(p: Propagation, node: Node) -> Decision:
    x = node.args[0]
    layout, rank = p.subject(node), len(p.shape(x))
    dim = argument(node, "dim") % rank
    extent = p.shape(x)[dim]
    start, stop, step = _bounds(node, extent)
    if dim != layout.dim or (start, stop, step) == (0, extent, 1):
        return Decision(layout, args=(x, dim, 0, layout.extent(p.tp)) if dim == layout.dim else None)
    if step > 1:
        if len(layout.blocks) > 1 or (extent // p.tp) % step or start >= step or stop != extent or layout.padded:
            raise p.unfit(node, "takes every so many entries of the divided dimension")
        made = replace(layout, blocks=(extent // step,), rows=None)
        return Decision(made, args=(x, dim, start, extent // p.tp, step))
    siblings = [u for u in x.users if u.target is node.target and argument(u, "dim") % rank == dim]
    others = [bound[:2] for u in siblings if (bound := _bounds(u, extent))[2] == 1 and bound[0] < bound[1]]
    made = _pieces(p, node, layout, [(start, stop), *others])[0]
    return Decision(made, args=(x, dim, start // p.tp, stop // p.tp))


def narrow(p: Propagation, node: Node) -> Decision:
    x, dim, start, length = node.args
    layout = p.subject(node)
    if dim % len(p.shape(x)) != layout.dim:
        return Decision(layout)
    if not isinstance(start, int):
        raise p.unfit(node, "starts where a tensor says")
    made = _pieces(p, node, layout, [(start, start + length)])[0]
    return Decision(made, args=(x, dim, start // p.tp, length // p.tp))


def join(p: Propagation, node: Node) -> Decision:
    """cat, stack: alike along other dimensions; joined along the divided one, the blocks line up."""
    parts = node.args[0]
    new = node.target is aten.stack.default
    dim = argument(node, "dim") % len(p.shape(node))
    divided = p.divided(parts)
    first = p.layout(divided[0])
    if not new and first.dim == dim:
        if any(p.layout(x) is None or p.layout(x).dim != dim or p.layout(x).padded for x in parts):
            raise p.unfit(node, "joins divided and whole values")
        blocks = tuple(block for x in parts for block in p.layout(x).blocks)
        return Decision(Split(dim, blocks, p.origins(divided)))
    if any(not first.same(p.layout(x)) for x in divided):
        raise p.unfit(node, "joins values that are divided differently")
    cuts: dict[Node, Cut] = {}
    for x in dict.fromkeys(parts):
        if p.layout(x) is None:
            if p.shape(x)[first.dim : first.dim + 1] != (sum(first.blocks),):
                raise p.unfit(node, "joins divided and whole values")
            p.bring(cuts, x, first.cut())
    place = first.dim + (new and dim <= first.dim)
    fills, filler = alike(p, node, cuts)
    return Decision(replace(first, dim=place, origins=p.origins(divided), filler=filler), cuts, fills=fills)


def index(p: Propagation, node: Node) -> Decision:
    """x[i, j]: the divided dimension must not be indexed, and the indices be whole."""
    x, indices = node.args[:2]
    layout = p.subject(node)
    used = [dim for dim, i in enumerate(indices) if i is not None]
    whole = all(p.layout(i) is None for i in indices if i is not None)
    if not whole or layout.dim in used:
        raise p.unfit(node, "indexes the divided dimension")
    if any(values(indices[dim])[0].dtype in (torch.bool, torch.uint8) for dim in used):
        raise p.unfit(node, "selects by a mask")
    rank = max(len(p.shape(indices[dim])) for dim in used)
    adjacent = used[-1] - used[0] + 1 == len(used)
    front = layout.dim > used[0] or not adjacent
    return Decision(replace(layout, dim=layout.dim - sum(dim < layout.dim for dim in used) + (rank if front else 0)))


def gather(p: Propagation, node: Node) -> Decision:
    """gather(x, dim, index): along a whole dimension, the index being cut like x."""
    x, dim, picked = node.args[:3]
    split = p.layout(x) or p.layout(picked)
    if dim % len(p.shape(x)) == split.dim or p.shape(x)[split.dim] != p.shape(picked)[split.dim]:
        raise p.unfit(node, "gathers along the divided dimension")
    if any(s and not s.same(split) for s in (p.layout(x), p.layout(picked))):
        raise p.unfit(node, "gathers from values that are divided differently")
    cuts: dict[Node, Cut] = {}
    for operand in (x, picked):
        if p.layout(operand) is None:
            p.bring(cuts, operand, split.cut())
    held = fillers(p, node, cuts)
    fills = {picked: 0} if held.get(picked, 0) != 0 else {}
    made = replace(split, origins=p.origins(p.divided([x, picked])), filler=held.get(x, 0))
    return Decision(made, cuts, fills=fills)


def index_select(p: Propagation, node: Node) -> Decision:
    x, dim = node.args[:2]
    layout = p.subject(node)
    if layout.dim == dim % len(p.shape(x)) or len(p.divided(node.all_input_nodes)) > 1:
        raise p.unfit(node, "selects along the divided dimension")
    return Decision(layout)


def same(p: Propagation, node: Node) -> Decision:
    """Ops along other dimensions that keep the divided one as it is (roll, flip, tril, pad at the end)."""
    layout = p.subject(node)
    if layout.dim in _touched(p, node):
        raise p.unfit(node, "works along the divided dimension")
    fills, (filler,) = settle(p, node, layout, {}, pointwise=False) if layout.padded else ({}, (0,))
    return Decision(replace(layout, filler=filler), fills=fills)


def _touched(p: Propagation, node: Node) -> list[int]:
    rank = len(p.shape(node.args[0]))
    name = str(node.target)
    if name.startswith("aten.tri"):
        return [rank - 2, rank - 1]
    if name.startswith(("aten.pad", "aten.constant_pad_nd")):
        given = node.args[1]
        return [rank - 1 - k // 2 for k in range(len(given)) if given[k]]
    dims = argument(node, "dims")
    return [dim % rank for dim in dims] or list(range(rank))


def view_as_complex(p: Propagation, node: Node) -> Decision:
    """A last dimension of 2 appears or disappears; it must not be the divided one."""
    layout = p.subject(node)
    if layout.dim >= min(len(p.shape(node.args[0])), len(p.shape(node))):
        raise p.unfit(node, "takes apart the divided dimension")
    return Decision(replace(layout, filler=0 if layout.filler == 0 else None))
