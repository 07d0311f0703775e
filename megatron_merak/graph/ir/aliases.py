"""Which nodes of a graph share memory, and which write to it, by the schemas of their operators."""

import operator
from typing import Any

from torch._ops import OpOverload
from torch.fx import Graph, Node

from .opaque import CustomFunction


def aliased(node: Node) -> tuple[list[Node], list[Node]]:
    """Return the inputs that share memory with a node's result, and those of them that it writes to
    in place.
    """
    if node.target is operator.getitem:
        return [] if _allocates(node.args[0]) else [
            x for x in node.args[:1] if isinstance(x, Node)
        ], []
    if isinstance(node.target, CustomFunction) and node.target.aliases_input:
        return [x for x in node.args[:1] if isinstance(x, Node)], []
    if not isinstance(node.target, OpOverload):
        return [], []
    shared: list[Node] = []
    written: list[Node] = []
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None:
            continue
        value = node.kwargs.get(argument.name, node.args[index] if index < len(node.args) else None)
        nodes = [
            x
            for x in (value if isinstance(value, list | tuple) else [value])
            if isinstance(x, Node)
        ]
        shared += nodes
        written += nodes if argument.alias_info.is_write else []
    return shared, written


def _allocates(source: Any) -> bool:
    """Whether a node returns several tensors, each in new memory of its own."""
    return isinstance(source.target, OpOverload) and not aliased(source)[0]


def is_view(node: Node) -> bool:
    """Whether a node's value may share memory with its first argument, and the node does not write
    to it.
    """
    shared, written = aliased(node)
    return not written and bool(node.args) and node.args[0] in shared


class Storages:
    """Which nodes share memory, of the nodes added so far.

    root:   node -> the node that allocated its memory.
    shared: each such node -> all nodes in its memory, in order.
    """

    def __init__(self) -> None:
        self.root: dict[Node, Node] = {}
        self.shared: dict[Node, list[Node]] = {}
        self._results: dict[tuple[Node, Any], Node] = {}

    def add(self, node: Node) -> list[Node]:
        """Add a node, after all that it reads; return the nodes that allocated the memory that it
        writes to.
        """
        shared, written = aliased(node)
        root = self.root[shared[0]] if shared else node
        if node.target is operator.getitem and not shared:
            source, index = node.args
            assert isinstance(source, Node)
            root = self._results.setdefault((source, index), node)
        self.root[node] = root
        self.shared.setdefault(root, []).append(node)
        return list(dict.fromkeys(self.root[x] for x in written))


def storages(graph: Graph) -> dict[Node, Node]:
    """Return, for every node, the one that allocated its memory: itself, or the base of its chain
    of views.
    """
    memory = Storages()
    for node in graph.nodes:
        memory.add(node)
    return memory.root


def writers(graph: Graph) -> dict[Node, list[Node]]:
    """Return, for each node that allocated memory, the nodes that write to it in place, in
    order.
    """
    memory = Storages()
    by_root: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for root in memory.add(node):
            by_root.setdefault(root, []).append(node)
    return by_root


def written(graph: Graph) -> dict[Node, list[Node]]:
    """Return, for every node that writes in place, all nodes that share the memory it writes to."""
    memory = Storages()
    written_roots = {node: memory.add(node) for node in graph.nodes}
    return {
        node: [x for root in roots for x in memory.shared[root]]
        for node, roots in written_roots.items()
        if roots
    }


def changing(graph: Graph) -> set[Node]:
    """Return all nodes whose memory is written to in place, before or after they run."""
    return {node for shared in written(graph).values() for node in shared}


def mutation_deps(graph: Graph) -> dict[Node, tuple[Node, ...]]:
    """Return, for a node, the earlier nodes that wrote in place to memory that it reads.

    A node must run after all of these, which the dataflow alone does not show. Nodes without any
    are left out.
    """
    memory = Storages()
    earlier: dict[Node, list[Node]] = {}
    deps: dict[Node, tuple[Node, ...]] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        writes = [
            writer for x in inputs for writer in earlier.get(memory.root[x], ()) if writer is not x
        ]
        if writes:
            deps[node] = tuple(dict.fromkeys(writes))
        for root in memory.add(node):
            earlier.setdefault(root, []).append(node)
    return deps
