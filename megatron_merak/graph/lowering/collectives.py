"""Moves the collective marks of a rewritten graph to where they communicate least; nothing else of
it changes.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from ...segment import LayerAxis
from ..ir.aliases import aliased
from ..ir.kinds import NodeKind, is_mark_over, kind
from ..ir.marks import MARKS, copy_in, reduce_sum
from ..ir.nodes import constant, is_random, nbytes, op_name, operand
from ..ir.operators import facts

aten = torch.ops.aten


def move_collectives(graph: Graph, tp: int) -> None:
    """Delay all-reduces until after ops that shrink them, hoist ``copy_in`` marks, merge
    all-reduces that are added.

    tp: tensor-parallel degree.
    """
    for node in list(graph.nodes):
        if node.target is reduce_sum:
            _delay_reduction(graph, node, tp)
    hoist_copies(graph, LayerAxis.TP)
    for node in list(graph.nodes):
        if op_name(node) == "add":
            _merge_reductions(graph, node)


def _delay_reduction(graph: Graph, mark: Node, tp: int) -> None:
    """Move an all-reduce after the linear ops that make its value smaller.

    For example, the outputs of MoE experts are all-reduced after the sum over the top k.
    """
    chain: list[Node] = []
    end = mark
    while len(end.users) == 1 and _is_linear_in(user := next(iter(end.users)), end):
        chain.append(user)
        end = user
    if not chain or nbytes(best := min(chain, key=nbytes)) >= nbytes(mark):
        return
    chain = chain[: chain.index(best) + 1]
    others = [
        (node, x)
        for k, node in enumerate(chain)
        for x in node.all_input_nodes
        if x is not [mark, *chain][k]
    ]
    mark.replace_all_uses_with(operand(mark))
    for node in chain:
        node.meta[LayerAxis.TP] = NodeKind.SHARDS
    for node, x in others:
        with graph.inserting_before(node):
            own = x
            if x.meta["grad"] and x.op != "get_attr":
                own = _new_sharded_node(graph, copy_in, (x,), x, user=node)
            if op_name(node) == "add":  # each rank adds 1 / tp of the replicated operand
                own = _new_sharded_node(graph, aten.mul.Tensor, (own, 1 / tp), x, user=node)
        node.replace_input_with(x, own)
    best.replace_all_uses_with(mark)
    mark.args = (best,)
    mark.meta = dict(mark.meta) | {"val": best.meta["val"]}
    best.append(mark)


def _new_sharded_node(
    graph: Graph, target: Callable[..., Any], args: tuple[Any, ...], like: Node, user: Node
) -> Node:
    node = graph.call_function(target, args)
    node.meta = {
        "val": like.meta["val"],
        "unit": user.meta["unit"],
        LayerAxis.TP: NodeKind.SHARDS,
        "grad": like.meta["grad"],
    }
    return node


def _is_linear_in(user: Node, x: Node) -> bool:
    """Whether ``user`` is in the unit of ``x``, linear in it, and neither writes in place nor
    changes the dtype.
    """
    name = op_name(user)
    if user.meta.get("unit") != x.meta.get("unit") or kind(user, LayerAxis.TP) or aliased(user)[1]:
        return False
    if (
        user.op != "call_function"
        or user.args.count(x) != 1
        or not isinstance(user.meta["val"], torch.Tensor)
    ):
        return False
    if user.meta["val"].dtype != x.meta["val"].dtype:
        return False
    if name == "add":
        others = [other for other in user.args if other is not x]
        shape = user.meta["val"].shape
        return (
            not user.kwargs
            and all(isinstance(y, Node) for y in others)
            and x.meta["val"].shape == shape
        )
    first = user.args[0] is x
    if name == "mul":
        return True
    return first and (
        facts(user).linear
        or name == "div"
        or name == "masked_fill"
        and bool(constant(user, 2) == 0)
    )


def hoist_copies(graph: Graph, axis: LayerAxis) -> None:
    """Replace the ``copy_in`` marks after ops that only sharded work reads by one mark before these
    ops.

    This is done where it reduces the bytes to all-reduce in the backward: before the gather of MoE
    experts, before the steps of a scan, or at a parameter, where it costs nothing. It is valid for
    any op with one differentiable operand, since ``copy_in`` is the identity and its backward is
    linear.

    axis: of the ranks that the marks are for.
    """
    hoistable = _hoistable(graph, axis)
    for source in list(graph.nodes):
        consumers = [user for user in source.users if hoistable.get(user, (None,))[0] is source]
        marks = [user for user in source.users if is_mark_over(user, copy_in, axis)]
        parameter = source.op == "get_attr"
        if not consumers or kind(source, axis) or not isinstance(source.meta["val"], torch.Tensor):
            continue
        if (
            not parameter
            and not marks
            and _add_pairs(hoistable[user][1] for user in consumers) <= (nbytes(source), 1)
        ):
            continue
        copy = source
        if not parameter:
            with graph.inserting_after(source):
                copy = graph.call_function(copy_in, (source,))
            copy.meta = dict(source.meta) | {axis: NodeKind.SHARDS, "over": axis}
        for mark in marks:
            mark.replace_all_uses_with(copy)
            graph.erase_node(mark)
        for node in consumers:
            node.replace_input_with(source, copy)
            _make_sharded(graph, node, axis)


def _hoistable(graph: Graph, axis: LayerAxis) -> dict[Node, tuple[Node, tuple[int, int]]]:
    """Return, for each node that a ``copy_in`` can be hoisted over, (operand, (bytes, marks)).

    The operand is the one that the mark would move to; (bytes, marks) is the least cost of the
    marks at or after the node.
    """
    hoistable: dict[Node, tuple[Node, tuple[int, int]]] = {}
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or kind(node, axis) or node.target in MARKS or not node.users:
            continue
        unit = node.meta["unit"]
        consumers = [user for user in node.users if hoistable.get(user, (None,))[0] is node]
        marks = [user for user in node.users if is_mark_over(user, copy_in, axis)]
        if len(consumers) + len(marks) < len(node.users) or any(
            user.meta["unit"] != unit for user in marks
        ):
            continue
        sources = [x for x in node.all_input_nodes if x.meta["grad"]]
        if len(sources) != 1 or is_random(node) or aliased(node)[1]:
            continue
        if sources[0].op == "get_attr" or sources[0].meta["unit"] == unit:
            own_cost = (nbytes(node), 1)
            cost = (
                own_cost
                if marks
                else min(own_cost, _add_pairs(hoistable[user][1] for user in consumers))
            )
            hoistable[node] = (sources[0], cost)
    return hoistable


def _add_pairs(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    first, second = zip(*pairs, strict=True)
    return sum(first), sum(second)


def _make_sharded(graph: Graph, node: Node, axis: LayerAxis) -> None:
    """Make ``node`` and all that reads it sharded work, and remove the ``copy_in`` marks in
    between.
    """
    node.meta[axis] = NodeKind.SHARDS
    for mark in [user for user in node.users if is_mark_over(user, copy_in, axis)]:
        mark.replace_all_uses_with(node)
        graph.erase_node(mark)
    for user in node.users:
        if not kind(user, axis):
            _make_sharded(graph, user, axis)


def _merge_reductions(graph: Graph, node: Node) -> None:
    """Replace reduce_sum(a) + reduce_sum(b) by reduce_sum(a + b).

    This occurs with parallel attention and MLP, and with token and position embeddings.
    """
    if len(node.args) != 2 or node.kwargs or aliased(node)[1]:
        return
    a, b = node.args
    if not isinstance(a, Node) or not isinstance(b, Node):
        return
    if any(x.target is not reduce_sum or len(x.users) != 1 for x in (a, b)):
        return
    if a is b or a.meta["unit"] != node.meta["unit"] or b.meta["unit"] != node.meta["unit"]:
        return
    node.args = (a.args[0], b.args[0])
    node.meta[LayerAxis.TP] = NodeKind.SHARDS
    with graph.inserting_after(node):
        merged = graph.call_function(reduce_sum, (node,))
    merged.meta = dict(a.meta) | {"val": node.meta["val"]}
    node.replace_all_uses_with(merged, delete_user_cb=lambda user: user is not merged)
    graph.erase_node(a)
    graph.erase_node(b)
