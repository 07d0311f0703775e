"""Replaces in-place operations of a graph by out-of-place ones where every reader of their result
is known.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node, map_arg

from megatron_merak.graph.ir.aliases import Storages, aliased

from .nodes import called, operand, schema

aten = torch.ops.aten
_SCATTER: dict[Any, OpOverload] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}


def call(graph: Graph, like: Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """Add a call at the graph's insertion point, with its fake value and with the other meta of
    ``like``.
    """
    node = graph.call_function(target, args, kwargs)
    node.meta = {
        key: value for key, value in like.meta.items() if key not in ("val", "tensor_meta")
    }
    values = map_arg((args, kwargs), lambda n: n.meta["val"])
    mode = next((v.fake_mode for v in _tensors(values) if isinstance(v, FakeTensor)), None)
    with mode or torch.no_grad(), torch.no_grad():
        node.meta["val"] = target(*values[0], **values[1])
    return node


def out_of_place(graph: Graph) -> None:
    """Replace each write into a tensor, or into a slice of one, by a new value that later readers
    read instead.

    Writes into a constant, and writes that another live view would show, stay in place. A write
    into an entry of the batch is replaced, so the caller's tensor is not changed.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    storages = Storages()
    for node in list(graph.nodes):
        storages.add(node)
        if _writes_first(node):
            _replace(graph, node, storages, order)


def _writes_first(node: Node) -> bool:
    """Whether a node writes to its first argument, and to no other."""
    return bool(node.args) and aliased(node)[1] == [node.args[0]]


def _replace(graph: Graph, node: Node, storages: Storages, order: dict[Node, int]) -> None:
    target = operand(node)
    root = storages.root[node]
    if root.op == "get_attr" or not isinstance(root.meta["val"], Tensor):
        return

    def later(of: Node) -> list[Node]:
        return [user for user in of.users if user is not node and order[user] > order[node]]

    path = _views_between(target, root) if later(root) else []
    if path is None:
        return
    other_views = [x for x in storages.shared[root] if x not in (root, target, node)]
    rewritten = [
        user
        for x in (target, node)
        for user in later(x)
        if _writes_first(user) and user.args[0] is x
    ]
    if any(later(x) for x in other_views) or (target is not root and rewritten):
        return
    start = node.prev
    with graph.inserting_before(node):
        value = _out_of_place_value(graph, node)
        if value is None:
            return
        new_root = value
        for view in path:
            new_root = call(
                graph, node, _SCATTER[called(view)], view.args[0], new_root, *view.args[1:]
            )
    added = start.next
    while added is not node:
        order[added] = order[node]
        storages.add(added)
        added = added.next
    storages.shared[root].remove(node)
    for old, new in ((target, value), (root, new_root)) if path else ((target, value),):
        for reader in later(old):
            reader.replace_input_with(old, new)
    node.replace_all_uses_with(value)
    graph.erase_node(node)


def _views_between(target: Node, root: Node) -> list[Node] | None:
    """Return the slices that lead from ``target`` back to ``root``, innermost first; None if there
    is another view.
    """
    path = []
    while target is not root:
        if target.target not in _SCATTER:
            return None
        path.append(target)
        target = operand(target)
    return path


def _out_of_place_value(graph: Graph, node: Node) -> Node | None:
    """Add nodes that compute what ``node`` writes, of the same shape and dtype; return the last, or
    None if unknown.
    """
    target = operand(node)
    expected = node.meta["val"]
    name = schema(node).name.removeprefix("aten::")
    if name == "copy_":
        value = call(graph, node, aten.clone.default, node.args[1])
    elif name == "zero_":
        return call(graph, node, aten.zeros_like.default, target)
    else:
        overload = getattr(
            getattr(aten, name.removesuffix("_"), None),
            schema(node).overload_name or "default",
            None,
        )
        if overload is None:
            return None
        value = call(graph, node, overload, *node.args, **node.kwargs)
    if value.meta["val"].dtype != expected.dtype:
        value = call(graph, node, aten.to.dtype, value, expected.dtype)
    if value.meta["val"].shape != expected.shape:
        value = call(graph, node, aten.expand.default, value, list(expected.shape))
    return value


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
