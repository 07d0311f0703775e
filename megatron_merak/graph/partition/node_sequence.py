"""The main and side nodes of a graph in order, the values live between them, and where the graph
may be cut.
"""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch.fx import Graph, Node

from ..ir.aliases import storages, writers
from ..ir.nodes import nbytes
from ..ir.operators import flops


class NodeSequence:
    """The main and side nodes of a graph in its order. A cut at ``i`` lies between ``nodes[i]`` and ``nodes[i + 1]``.

    kinds:    the kind of every node, see ``ir.nodes.classify``.
    index:    node -> its index in ``nodes``.
    last[i]:  index of the last node that reads ``nodes[i]``; the graph's outputs are read at the end.
    live[i]:  the main and side values that cross a cut at ``i``, in order.
    legal[i]: whether a cut at ``i`` is possible: no tuple crosses it, and it does not separate a storage from the nodes
              that write to it in place.
    """

    def __init__(self, graph: Graph, kinds: Mapping[Node, str]):
        self.kinds = kinds
        self.nodes = tuple(node for node in graph.nodes if kinds[node] in ("main", "side"))
        self.index = {node: i for i, node in enumerate(self.nodes)}
        end = len(self.nodes)
        self.last = [
            max([i, *(self.index.get(user, end) for user in node.users)])
            for i, node in enumerate(self.nodes)
        ]
        self.live = self._live()
        self.legal = [
            all(isinstance(x.meta.get("val"), torch.Tensor) for x in live) for live in self.live
        ]
        for first, last in self._written_spans(graph):
            self.legal[first:last] = [False] * (last - first)

    @cached_property
    def flops(self) -> tuple[int, ...]:
        return tuple(flops(node) for node in self.nodes)

    def main(self, cut: int) -> list[Node]:
        """Return the main values that cross a cut."""
        return [node for node in self.live[cut] if self.kinds[node] == "main"]

    def bytes(self, cut: int) -> int:
        """Return the bytes of all values that cross a cut."""
        return sum(nbytes(node) for node in self.live[cut])

    def parameters(self, i: int) -> tuple[str, ...]:
        """Return the names of the parameters that ``nodes[i]`` reads."""
        return tuple(
            str(x.target) for x in self.nodes[i].all_input_nodes if self.kinds[x] == "param"
        )

    def _live(self) -> list[tuple[Node, ...]]:
        live: list[tuple[Node, ...]] = []
        alive: list[tuple[int, Node]] = []
        for i, node in enumerate(self.nodes):
            alive = [(last, x) for last, x in alive if last > i]
            if self.last[i] > i:
                alive.append((self.last[i], node))
            live.append(tuple(x for _, x in alive))
        return live

    def _written_spans(self, graph: Graph) -> list[tuple[int, int]]:
        """Return the span (first, last) of every storage that nodes of the sequence write to in
        place.

        It reaches from the node that allocates it to its last writer; for a placeholder or
        constant, from its first use to its last.
        """
        root = storages(graph)
        spans = []
        for storage, nodes in writers(graph).items():
            indices = [self.index[node] for node in nodes if node in self.index]
            if not indices:
                continue
            if storage not in self.index:
                users = (
                    user for node in graph.nodes if root[node] is storage for user in node.users
                )
                indices += [self.index[user] for user in users if user in self.index]
                spans.append((min(indices), max(indices)))
            else:
                spans.append((self.index[storage], max(indices)))
        return spans
