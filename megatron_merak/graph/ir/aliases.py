"""Which nodes of a graph share memory, and which write to it, by the schemas of their operators."""

import operator
from typing import Any

from torch._ops import OpOverload
from torch.fx import Graph, Node

from .opaque import CustomFunction


def aliased(node: Node) -> tuple[list[Node], list[Node]]:
    """Return the inputs that share memory with what a node makes, and those of them that it writes to."""
    if node.target is operator.getitem:
        return [] if _makes_memory(node.args[0]) else [x for x in node.args[:1] if isinstance(x, Node)], []
    if isinstance(node.target, CustomFunction) and node.target.shares:
        return list(node.args[:1]), []
    if not isinstance(node.target, OpOverload):
        return [], []
    shared: list[Node] = []
    written: list[Node] = []
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None:
            continue
        value = node.kwargs.get(argument.name, node.args[index] if index < len(node.args) else None)
        found = [x for x in (value if isinstance(value, list | tuple) else [value]) if isinstance(x, Node)]
        shared += found
        written += found if argument.alias_info.is_write else []
    return shared, written


def _makes_memory(source: Any) -> bool:
    """Whether a node makes several tensors, each in memory of its own."""
    return isinstance(source.target, OpOverload) and not aliased(source)[0]


def is_view(node: Node) -> bool:
    """Whether a node's value may share memory with its first argument, and the node does not write to it."""
    shared, written = aliased(node)
    return not written and bool(node.args) and node.args[0] in shared


class Storages:
    """Which nodes share memory, as far as the nodes added so far tell.

    root:   for each node, the node that made its memory.
    shared: for each such node, all nodes in its memory, in order.
    """

    def __init__(self) -> None:
        self.root: dict[Node, Node] = {}
        self.shared: dict[Node, list[Node]] = {}
        self._results: dict[tuple[Node, Any], Node] = {}

    def add(self, node: Node) -> list[Node]:
        """Add a node after all that it reads; return the nodes that made the memory that it writes to."""
        shared, written = aliased(node)
        root = self.root[shared[0]] if shared else node
        if node.target is operator.getitem and not shared:
            root = self._results.setdefault((node.args[0], node.args[1]), node)
        self.root[node] = root
        self.shared.setdefault(root, []).append(node)
        return list(dict.fromkeys(self.root[x] for x in written))


def storages(graph: Graph) -> dict[Node, Node]:
    """Return, for every node, the one that made its memory: itself, or the start of the views it is the last of."""
    found = Storages()
    for node in graph.nodes:
        found.add(node)
    return found.root


def writers(graph: Graph) -> dict[Node, list[Node]]:
    """Return the nodes that write to each memory in place, in order, by the node that made it."""
    memory = Storages()
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for root in memory.add(node):
            found.setdefault(root, []).append(node)
    return found


def written(graph: Graph) -> dict[Node, list[Node]]:
    """Return all nodes that share the memory that a node writes to in place, for every node that does."""
    memory = Storages()
    roots = {node: memory.add(node) for node in graph.nodes}
    return {node: [x for root in made for x in memory.shared[root]] for node, made in roots.items() if made}


def changing(graph: Graph) -> set[Node]:
    """Return all nodes whose memory is written to in place, before or after they are made."""
    return {node for shared in written(graph).values() for node in shared}


def mutation_deps(graph: Graph) -> dict[Node, tuple[Node, ...]]:
    """Return what the dataflow does not show: for a node, the earlier nodes that wrote to memory that it reads.

    A node must run after all of these; nodes without any are left out.
    """
    memory = Storages()
    earlier: dict[Node, list[Node]] = {}
    found: dict[Node, tuple[Node, ...]] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        before = [writer for x in inputs for writer in earlier.get(memory.root[x], ()) if writer is not x]
        if before:
            found[node] = tuple(dict.fromkeys(before))
        for root in memory.add(node):
            earlier.setdefault(root, []).append(node)
    return found
