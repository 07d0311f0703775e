"""Fusion of query, key and value: one product, whose heads rotary embedding turns in place."""

import operator
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ... import ops
from ..ir.inplace import call as new_node
from ..ir.kinds import kinds
from ..ir.nodes import is_op, is_random, operand
from .adapters import LinearLayer, can_share, fit_together, join, layer_of
from .pointwise import erase_unread, swaps_heads, value

aten = torch.ops.aten

_ATTENTION = (ops.causal_attention, ops.attention)


@dataclass(frozen=True)
class _Heads:
    """Query, key or value heads, as attention reads them.

    read:   the node that attention reads.
    linear: the linear layer that computes them.
    layer:  what that is made of.
    angles: cos and sin; None where they are not turned.
    """

    read: Node
    linear: Node
    layer: LinearLayer
    count: int
    size: int
    angles: tuple[Node, ...] | None


def join_heads(graph: Graph, written: Collection[Node]) -> int:
    """Fuse query, key and value of attention into one product where one input makes them and
    rotary embedding turns them; return how often.

    written: nodes whose memory is written in place.
    """
    found = 0
    for node in list(graph.nodes):
        if node.target in _ATTENTION:
            parts = [_heads_of(operand(node, k), node, written) for k in range(3)]
            known = [part for part in parts if part is not None]
            if len(known) == 3 and _fit(node, known):
                _join(graph, node, known)
                found += 1
    return found


def _heads_of(read: Node, attention: Node, written: Collection[Node]) -> _Heads | None:
    """Return what attention reads, if nothing else reads it, nor what it is made of."""
    path = [read]
    if attention.target is ops.attention:
        if not swaps_heads(read):
            return None
        path.append(operand(read))
    angles = None
    if path[-1].target is ops.rotary_heads:
        turned = path[-1]
        if len(turned.args) > 3:
            return None  # adjacent features
        angles = (operand(turned, 1), operand(turned, 2))
        path.append(operand(turned))
    split = path[-1]
    if not is_op(split, "view", "reshape", "_unsafe_view") or value(split).dim() != 4:
        return None
    linear = operand(split)
    layer = layer_of(linear)
    if layer is None or not can_share(linear, written):
        return None
    if any(len(each.users) > 1 or each in written for each in (*path, linear)):
        return None
    batch, length, count, size = value(split).shape
    if tuple(value(linear).shape) != (batch, length, count * size):
        return None
    return _Heads(read, linear, layer, count, size=size, angles=angles)


def _fit(attention: Node, parts: list[_Heads]) -> bool:
    """Whether one product computes all three, in the unit of the attention and on its ranks."""
    query, key, values = parts
    if query.angles is None or key.angles is None or values.angles is not None:
        return False
    if not all(map(_alike, query.angles, key.angles)):
        return False
    if key.count != values.count or not query.size == key.size == values.size:
        return False
    home = (operand(query.linear), attention.meta.get("unit"), kinds(attention))
    linears = [part.linear for part in parts]
    if any((operand(each), each.meta.get("unit"), kinds(each)) != home for each in linears):
        return False
    layers = [part.layer for part in parts]
    biased = {layer.bias is None for layer in layers}
    if len(biased) > 1 or not fit_together(layers):
        return False
    return len({*linears, *(layer.weight for layer in layers)}) == 6


def _alike(a: object, b: object) -> bool:
    """Whether two common values are the same, or computed alike."""
    if not (isinstance(a, Node) and isinstance(b, Node)) or a is b:
        return a == b
    called = a.op == b.op == "call_function" and a.target is b.target and not is_random(a)
    if not called or a.kwargs != b.kwargs or len(a.args) != len(b.args):
        return False
    return all(map(_alike, a.args, b.args))


def _join(graph: Graph, attention: Node, parts: list[_Heads]) -> None:
    query, key, _ = parts
    with graph.inserting_before(attention):
        product = join(graph, query.linear, [part.layer for part in parts])
        counts = (query.count, key.count)
        heads = new_node(graph, query.read, ops.split_heads, product, *counts, query.angles)
        for place, part in enumerate(parts):
            item = new_node(graph, part.read, operator.getitem, heads, place)
            if attention.target is ops.attention:
                item = new_node(graph, part.read, aten.transpose.int, item, 1, 2)
            attention.replace_input_with(part.read, item)
    for part in parts:
        erase_unread(graph, part.read)
