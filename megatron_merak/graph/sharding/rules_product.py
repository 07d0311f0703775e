"""Rules of products: linear layers in all their forms, batched products, grouped experts, attention, convolutions."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from .padding import zeros
from .placement import Cut, Decision, Split
from .propagate import Propagation
from .roles import family
from .rules_value import argument

aten = torch.ops.aten

COLUMN = "column parallel: its output features are divided"
ROW = "row parallel: its input features are divided"


@dataclass(frozen=True)
class Product:
    """a @ b (+ added): a is contracted over its last dimension, b over ``contracted``; ``out`` is b's other one.

    ``bare`` is the op without ``added``.
    """

    node: Node
    a: Node
    b: Node
    contracted: int
    out: int
    added: Node | None = None
    bare: Callable[..., Any] | None = None


def linear(p: Propagation, node: Node) -> Decision | None:
    x, weight, bias = argument(node, "input"), argument(node, "weight"), argument(node, "bias")
    if len(p.shape(weight)) != 2:
        return None
    return product(p, Product(node, x, weight, 1, 0, bias, aten.linear.default))


def matmul(p: Propagation, node: Node) -> Decision | None:
    a, b = node.args[:2]
    rank = len(p.shape(b))
    if len(p.shape(a)) < 2 or rank < 2:
        return None
    return product(p, Product(node, a, b, rank - 2, rank - 1))


def addmm(p: Propagation, node: Node) -> Decision | None:
    added, a, b = node.args[:3]
    rank = len(p.shape(b))
    bare = aten.mm.default if rank == 2 else aten.bmm.default
    return product(p, Product(node, a, b, rank - 2, rank - 1, added, bare))


def grouped(p: Propagation, node: Node) -> Decision | None:
    """Rows of a [tokens, i] times their expert's weight, b [experts, i, o]; experts are not divided, weights are."""
    a, b = node.args[:2]
    split, weight = p.layout(a), p.layout(b)
    if split and split.dim != 1 or weight and weight.dim == 0 or len(p.shape(a)) != 2:
        return None
    return product(p, Product(node, a, b, 1, 2))


def product(p: Propagation, m: Product) -> Decision | None:
    a, b = p.layout(m.a), p.layout(m.b)
    if m.added is not None and p.layout(m.added) is not None and a is None and b is None:
        return None
    if a is None and b is None:
        return _row(p, m) if p.chosen_row(m.b) else _column(p, m)
    inner = [x for x, s in ((m.a, a), (m.b, b)) if s and s.dim >= len(p.shape(x)) - 2]
    if a and b and len(inner) == 1:
        raise p.unfit(m.node, "multiplies values that are divided differently", inner)
    if a and a.dim == len(p.shape(m.a)) - 1 or b and b.dim == m.contracted:
        return _row(p, m)
    rank = len(p.shape(m.node))
    if b and b.dim == m.out:
        if a:
            return None
        p.explain(m.b, COLUMN)
        if (name := p.weight(m.b)) in p.choices.pins:
            p.column(str(name), p.shape(m.b)[m.out], m.node)
        return _divided(p, m, Split(rank - 1, b.blocks, b.origins, b.padded))
    places = [s.dim + rank - len(p.shape(x)) for x, s in ((m.a, a), (m.b, b)) if s]
    split = a or b
    if len(places) == 2 and (places[0] != places[1] or not a.same(Split(a.dim, b.blocks, (), b.padded))):
        raise p.unfit(m.node, "multiplies values that are divided differently")
    p.explain(m.a, COLUMN)
    return _divided(p, m, Split(places[0], split.blocks, p.origins(p.divided([m.a, m.b])), split.padded))


def _column(p: Propagation, m: Product) -> Decision | None:
    """Divide the weight's output features: the input enters whole, the output is divided."""
    left = p.weight(m.b) is None and len(p.shape(m.a)) == 2  # weight @ x: its rows are the output features
    weight, dim = (m.a, 0) if left else (m.b, m.out)
    name = p.weight(weight)
    if name is None or left and m.added is not None:
        return None
    extent = p.shape(weight)[dim]
    padded = p.padding(extent)
    if padded is None:
        p.note(name, f"its {extent} output features do not divide by {p.tp}")
        return None
    blocks = p.choices.blocks.get((p.choices.role(name), extent), (extent,))
    padded = padded if len(blocks) == 1 else 0
    if not p.demand(weight, Cut(dim, blocks, padded), COLUMN):
        return None
    p.column(name, extent, m.node)
    return _divided(p, m, Split(len(p.shape(m.node)) - 1 - left, blocks, (name,), padded, rows=(0, 1)))


def _divided(p: Propagation, m: Product, split: Split) -> Decision:
    """The result is divided by ``split``: what is added to it and its batch operands are divided alike."""
    rank = len(p.shape(m.node))
    cuts: dict[Node, Cut] = {}
    for x in (m.a, m.b, m.added):
        if x is None:
            continue
        shape = p.shape(x)
        dim = split.dim - (rank - len(shape))
        if layout := p.layout(x):
            if x is m.added and not layout.same(replace(split, dim=dim)):
                raise p.unfit(m.node, f"adds {p.weight(x) or 'a value'}, which is divided differently")
            continue
        batch = dim < len(shape) - 2 or x is m.added
        if batch and dim >= 0 and shape[dim] != 1 and not (x is m.b and m.node.target is aten.linear.default):
            p.bring(cuts, x, Cut(dim, split.blocks, split.padded))
    return Decision(split, cuts, fills=zeros(p, m.node, cuts))


def _row(p: Propagation, m: Product) -> Decision | None:
    """Both operands are divided along what is contracted: a partial sum; what is added is added after the sum."""
    a, b = p.layout(m.a), p.layout(m.b)
    last = len(p.shape(m.a)) - 1
    if a and a.dim != last or b and b.dim != m.contracted or a and b and (a.blocks, a.padded) != (b.blocks, b.padded):
        raise p.unfit(m.node, "multiplies values that are divided differently")
    weight = p.weight(m.b)
    if weight is None and not (b and p.weight(m.a)):
        raise p.unfit(m.node, "contracts the divided dimension")
    if m.node.kwargs and m.added is not None and any(key in m.node.kwargs for key in ("alpha", "beta")):
        raise p.unfit(m.node, "scales what it adds")
    if p.thrifty and a and a.summed and p.shape(m.b)[m.out] > p.shape(m.b)[m.contracted]:
        raise p.unfit(m.node, "expands a value that was normalised over the ranks")
    cuts: dict[Node, Cut] = {}
    if a is None and b is None:
        extent = p.shape(m.a)[last]
        if extent % p.tp:
            p.note(str(weight), f"its {extent} input features do not divide by {p.tp}")
            return None
        cut = Cut(m.contracted, (extent,))
        if not p.demand(m.b, cut, f"{ROW}, as asked for"):
            return None
        cuts[m.a] = Cut(last, (extent,))
    elif a is None:
        p.explain(m.b, ROW)
        p.bring_as(cuts, m.a, Cut(last, b.blocks, b.padded), "row parallel: its input is divided")
    else:
        source = ", ".join(family(origin) for origin in a.origins[:3])
        why = f"row parallel: its input is divided by {source}"
        if b is None:
            p.bring_as(cuts, m.b, Cut(m.contracted, a.blocks, a.padded), why)
        else:
            p.explain(m.b, why)
    if p.layout(m.added) is not None:
        raise p.unfit(m.node, f"adds {p.weight(m.added) or 'a value'}, which is divided, to a whole one")
    write = _write_row(m) if m.added is not None else None
    return Decision(None, cuts, fills=zeros(p, m.node, cuts), reduce=True, write=write)


def _write_row(m: Product) -> Callable[[Any, Node], Node]:
    def write(writer: Any, node: Node) -> Node:
        partial = writer.call(m.bare, (writer.operand(m.a), writer.operand(m.b)), like=node)
        return writer.call(aten.add.Tensor, (writer.sum(partial), writer.get(m.added)), like=node, sharded=False)

    return write


def attention(p: Propagation, node: Node) -> Decision:
    """Query, key and value are divided along the heads; a key-value head is taken along by its query heads."""
    query, key, value = node.args[:3]
    rank = len(p.shape(query))
    mask = argument(node, "attn_mask")
    divided = p.divided([query, key, value])
    if not divided:
        raise p.unfit(node, "takes a divided mask")
    dim = min(p.layout(x).dim for x in divided)
    if inner := [x for x in divided if p.layout(x).dim != dim or dim >= rank - 2]:
        raise p.unfit(node, "needs whole positions and features of its heads", inner)
    heads = {x: p.shape(x)[dim] for x in (query, key, value)}
    blocks = {x: p.layout(x).blocks for x in divided}
    uniform = len(dict.fromkeys(heads.values())) == 1
    if any(p.layout(x).padded for x in divided) or heads[query] % p.tp:
        raise p.unfit(node, f"has {heads[query]} heads, which {p.tp} ranks do not share evenly")
    parts = blocks[divided[0]] if uniform else (heads[query],)
    if any(blocks[x] != (parts if uniform else (heads[x],)) for x in divided):
        raise p.unfit(node, "reads heads that are divided differently")
    cuts: dict[Node, Cut] = {}
    for x in (query, key, value):
        if p.layout(x) is not None:
            continue
        repeats = heads[query] // heads[x]
        if uniform or heads[x] % p.tp == 0:
            p.bring(cuts, x, Cut(dim, parts if uniform else (heads[x],)))
        else:
            cuts[x] = Cut(dim, (heads[query],), repeats=repeats)
    if isinstance(mask, Node):
        shape = p.shape(mask)
        place = dim - (rank - len(shape))
        if p.layout(mask) is not None:
            if not p.layout(mask).same(Split(place, parts)):
                raise p.unfit(node, "takes a mask that is divided differently")
        elif place >= 0 and shape[place] != 1:
            p.bring(cuts, mask, Cut(place, parts))
    return Decision(Split(dim, parts, p.origins(divided)), cuts)


def depthwise(p: Propagation, node: Node) -> Decision:
    """A convolution with one group per channel: input [b, c, ...], weight [c, 1, ...], divided along the channels."""
    x, weight, bias = argument(node, "input"), argument(node, "weight"), argument(node, "bias")
    split = p.layout(x)
    groups = argument(node, "groups")
    channels = p.shape(weight)[0]
    if split is None or split.dim != len(p.shape(x)) - len(p.shape(weight)) + 1 or split.padded:
        raise p.unfit(node, "convolves along the divided dimension")
    if groups != p.shape(x)[split.dim] or channels != groups:
        raise p.unfit(node, "mixes the divided channels")
    cuts: dict[Node, Cut] = {}
    for operand in (weight, bias):
        if operand is not None and p.layout(operand) is None:
            p.bring(cuts, operand, Cut(0, split.blocks))
        elif operand is not None and not p.layout(operand).same(Split(0, split.blocks)):
            raise p.unfit(node, "has a weight that is divided differently")
    names = [known.name for known in node.target._schema.arguments]
    args = list(node.args) + [argument(node, name) for name in names[len(node.args) : names.index("groups") + 1]]
    args[names.index("groups")] = split.extent(p.tp)
    return Decision(split, cuts, args=tuple(args))
