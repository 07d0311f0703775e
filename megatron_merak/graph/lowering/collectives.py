"""Marks moved to where they cost least: fewer bytes, fewer collectives. Nothing else about the graph changes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ir.aliases import aliased
from ..ir.marks import copy_in, reduce_sum, stack
from ..ir.nodes import is_random, nbytes, op_name

aten = torch.ops.aten

# Linear in the first operand, the only one.
LINEAR = (
    "view reshape flatten unflatten unsqueeze squeeze transpose permute clone contiguous alias to expand index "
    "index_select sum slice select"
).split()
MARKS = (copy_in, reduce_sum, stack)


def move(graph: Graph, tp: int) -> None:
    """Lower sums, lift copies, merge sums that are added."""
    for node in list(graph.nodes):
        if node.target is reduce_sum:
            _lower(graph, node, tp)
    _lift(graph)
    for node in list(graph.nodes):
        if op_name(node) == "add":
            _merge(graph, node)


def _lower(graph: Graph, mark: Node, tp: int) -> None:
    """A sum over the ranks behind the linear ops that make it smaller: the experts' outputs after their top-k sum."""
    chain: list[Node] = []
    end = mark
    while len(end.users) == 1 and _linear_in(user := next(iter(end.users)), end):
        chain.append(user)
        end = user
    if not chain or nbytes(best := min(chain, key=nbytes)) >= nbytes(mark):
        return
    chain = chain[: chain.index(best) + 1]
    others = [(node, x) for k, node in enumerate(chain) for x in node.all_input_nodes if x is not [mark, *chain][k]]
    mark.replace_all_uses_with(mark.args[0])
    for node in chain:
        node.meta["sharded"] = True
    for node, x in others:
        with graph.inserting_before(node):
            taken = _enter_as(graph, copy_in, (x,), x, node) if x.meta["grad"] and x.op != "get_attr" else x
            if op_name(node) == "add":  # every rank adds its share
                taken = _enter_as(graph, aten.mul.Tensor, (taken, 1 / tp), x, node)
        node.replace_input_with(x, taken)
    best.replace_all_uses_with(mark)
    mark.args = (best,)
    mark.meta = dict(mark.meta) | {"val": best.meta["val"]}
    best.append(mark)


def _enter_as(graph: Graph, target: Callable[..., Any], args: tuple[Any, ...], like: Node, user: Node) -> Node:
    made = graph.call_function(target, args)
    made.meta = {"val": like.meta["val"], "unit": user.meta["unit"], "sharded": True, "grad": like.meta["grad"]}
    return made


def _linear_in(user: Node, x: Node) -> bool:
    """Whether a node, in the same unit, is linear in ``x`` and draws, writes and converts nothing."""
    name = op_name(user)
    if user.meta.get("unit") != x.meta.get("unit") or user.meta.get("sharded") or aliased(user)[1]:
        return False
    if user.op != "call_function" or user.args.count(x) != 1 or not isinstance(user.meta["val"], torch.Tensor):
        return False
    if user.meta["val"].dtype != x.meta["val"].dtype:
        return False
    if name == "add":
        others = [other for other in user.args if other is not x]
        shape = user.meta["val"].shape
        return not user.kwargs and all(isinstance(y, Node) for y in others) and x.meta["val"].shape == shape
    first = user.args[0] is x
    return name == "mul" or first and (name in LINEAR or name == "div" or name == "masked_fill" and user.args[2] == 0)


def _lift(graph: Graph) -> None:
    """One copy into sharded work before ops that only such work reads, instead of one behind each of them, where that
    is less to sum: before the experts' gather, before the steps of a scan, or at a parameter, where it is free.

    A copy is the identity and its backward is linear, so any op with one differentiable operand may follow it.
    """
    below = _copied_below(graph)
    for source in list(graph.nodes):
        lifted = [user for user in source.users if below.get(user, (None,))[0] is source]
        marks = [user for user in source.users if user.target is copy_in]
        parameter = source.op == "get_attr"
        if not lifted or source.meta["sharded"] or not isinstance(source.meta["val"], torch.Tensor):
            continue
        if not parameter and not marks and _sum(below[user][1] for user in lifted) <= (nbytes(source), 1):
            continue
        copied = source
        if not parameter:
            with graph.inserting_after(source):
                copied = graph.call_function(copy_in, (source,))
            copied.meta = dict(source.meta) | {"sharded": True}
        for mark in marks:
            mark.replace_all_uses_with(copied)
            graph.erase_node(mark)
        for node in lifted:
            node.replace_input_with(source, copied)
            _enter(graph, node)


def _copied_below(graph: Graph) -> dict[Node, tuple[Node, tuple[int, int]]]:
    """Of every node that a copy can be lifted over: the operand it would be lifted to, and (bytes, copies) behind it at
    best."""
    below: dict[Node, tuple[Node, tuple[int, int]]] = {}
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node.meta["sharded"] or node.target in MARKS or not node.users:
            continue
        unit = node.meta["unit"]
        inside = [user for user in node.users if below.get(user, (None,))[0] is node]
        marks = [user for user in node.users if user.target is copy_in]
        if len(inside) + len(marks) < len(node.users) or any(user.meta["unit"] != unit for user in marks):
            continue
        sources = [x for x in node.all_input_nodes if x.meta["grad"]]
        if len(sources) != 1 or is_random(node) or aliased(node)[1]:
            continue
        if sources[0].op == "get_attr" or sources[0].meta["unit"] == unit:
            here = (nbytes(node), 1)
            below[node] = (sources[0], here if marks else min(here, _sum(below[user][1] for user in inside)))
    return below


def _sum(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    first, second = zip(*pairs, strict=True)
    return sum(first), sum(second)


def _enter(graph: Graph, node: Node) -> None:
    """``node`` and all behind it becomes sharded work, without the copies in between."""
    node.meta["sharded"] = True
    for mark in [user for user in node.users if user.target is copy_in]:
        mark.replace_all_uses_with(node)
        graph.erase_node(mark)
    for user in node.users:
        if not user.meta["sharded"]:
            _enter(graph, user)


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
