"""Marks moved to where they cost least: fewer bytes, fewer collectives. Nothing else about the graph changes."""

import torch
from torch.fx import Graph, Node

from .marks import copy_in, reduce_max, reduce_sum
from .nodes import aliased, is_random, nbytes, op_name

aten = torch.ops.aten

# Linear in the first operand, which is the only one that a gradient passes through or is a factor.
LINEAR = (
    "view reshape flatten unflatten unsqueeze squeeze transpose permute clone contiguous alias to expand index "
    "index_select sum mul div slice select"
).split()
MARKS = (copy_in, reduce_sum, reduce_max)


def move(graph: Graph, trainable: frozenset[str]) -> None:
    """Lower sums, lift copies, merge sums that are added. ``trainable``: parameters that take a gradient."""
    for node in list(graph.nodes):
        if node.target is reduce_sum:
            _lower(graph, node, trainable)
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and node.target not in MARKS:
            _lift(graph, node, trainable)
    for node in list(graph.nodes):
        if op_name(node) == "add":
            _merge(graph, node)


def _lower(graph: Graph, mark: Node, trainable: frozenset[str]) -> None:
    """A sum over the ranks behind the linear ops that make it smaller: the experts' outputs after their top-k sum."""
    chain: list[Node] = []
    end = mark
    while len(end.users) == 1 and _linear_in(user := next(iter(end.users)), end):
        chain.append(user)
        end = user
    if not chain or nbytes(best := min(chain, key=nbytes)) >= nbytes(mark):
        return
    mark.replace_all_uses_with(mark.args[0])
    for node in chain[: chain.index(best) + 1]:
        node.meta["sharded"] = True
        for factor in node.all_input_nodes:
            if op_name(node) in ("mul", "div") and factor is not node.args[0] and _carries(factor, trainable):
                with graph.inserting_before(node):
                    copied = graph.call_function(copy_in, (factor,))
                copied.meta = dict(factor.meta) | {"sharded": True, "unit": node.meta["unit"]}
                node.replace_input_with(factor, copied)
    best.replace_all_uses_with(mark)
    mark.args = (best,)
    mark.meta = dict(mark.meta) | {"val": best.meta["val"]}
    best.append(mark)


def _linear_in(user: Node, x: Node) -> bool:
    name = op_name(user)
    if user.args[:1] != (x,) or user.meta.get("unit") != x.meta.get("unit") or user.meta.get("sharded"):
        return False
    if sum(operand is x for operand in user.args) != 1 or aliased(user)[1]:
        return False
    return name in LINEAR or name == "masked_fill" and user.args[2] == 0


def _lift(graph: Graph, source: Node, trainable: frozenset[str]) -> None:
    """One copy into sharded work before the ops that only such work reads, instead of one behind each of them, where
    that is less to sum: before the experts' gather, before a scan's steps, or at a parameter, where it is free.

    A copy is the identity and its backward is linear, so any op with one differentiable operand may follow it.
    """
    parameter = source.op == "get_attr"
    lifted = [user for user in source.users if _only_source(user, trainable) is source]
    if not lifted or not isinstance(source.meta["val"], torch.Tensor) or not _carries(source, trainable):
        return
    copies = sum(nbytes(node) for node in lifted)
    if not parameter and copies <= nbytes(source) and not _from_parameter(source, trainable):
        return
    marks = [user for user in source.users if user.target is copy_in]
    copied = source
    if not parameter:
        with graph.inserting_after(source):
            copied = graph.call_function(copy_in, (source,))
        copied.meta = dict(source.meta) | {"sharded": True}
    for mark in marks:
        mark.replace_all_uses_with(copied)
        graph.erase_node(mark)
    for node in lifted:
        node.meta["sharded"] = True
        node.replace_input_with(source, copied)
        for mark in list(node.users):
            mark.replace_all_uses_with(node)
            graph.erase_node(mark)


def _only_source(node: Node, trainable: frozenset[str]) -> Node | None:
    """The one operand that a gradient flows to, of a replicated node without effects that only copies read."""
    if node.op != "call_function" or node.meta["sharded"] or node.target in MARKS or not node.users:
        return None
    unit = node.meta["unit"]
    if any(user.target is not copy_in or user.meta["unit"] != unit for user in node.users):
        return None
    sources = [x for x in node.all_input_nodes if _carries(x, trainable)]
    if len(sources) != 1 or is_random(node) or aliased(node)[1]:
        return None
    return sources[0] if sources[0].op == "get_attr" or sources[0].meta["unit"] == unit else None


def _carries(node: Node, trainable: frozenset[str]) -> bool:
    """Whether a gradient may flow to a value."""
    if node.op != "call_function":
        return node.op == "get_attr" and node.target in trainable
    value = node.meta["val"]
    return node.meta["unit"] is not None and (not isinstance(value, torch.Tensor) or _inexact(value))


def _inexact(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _from_parameter(node: Node, trainable: frozenset[str]) -> bool:
    """Whether a parameter and nothing else lies behind a value, by ops that nothing else reads."""
    while node.op == "call_function" and len([u for u in node.users if u.target is not copy_in]) <= 1:
        sources = [x for x in node.all_input_nodes if _carries(x, trainable)]
        if len(sources) != 1 or is_random(node) or aliased(node)[1]:
            return False
        node = sources[0]
    return node.op == "get_attr"


def _merge(graph: Graph, node: Node) -> None:
    """sum(a) + sum(b) = sum(a + b): parallel attention and feed-forward, token and position embeddings."""
    if len(node.args) != 2 or node.kwargs or aliased(node)[1]:
        return
    a, b = node.args
    if any(not isinstance(x, Node) or x.target is not reduce_sum or len(x.users) != 1 for x in (a, b)):
        return
    if a is b or a.meta["unit"] != node.meta["unit"] or b.meta["unit"] != node.meta["unit"]:
        return
    node.args = (a.args[0], b.args[0])
    node.meta["sharded"] = True
    with graph.inserting_after(node):
        merged = graph.call_function(reduce_sum, (node,))
    merged.meta = dict(a.meta) | {"val": node.meta["val"]}
    node.replace_all_uses_with(merged, delete_user_cb=lambda user: user is not merged)
    graph.erase_node(a)
    graph.erase_node(b)
