"""What a cut divides: the main and side nodes in a line, the values alive between them, and where it may be cut."""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch.fx import Graph, Node

from ..ir.aliases import storages, writers
from ..ir.nodes import flops, nbytes


class Line:
    """The main and side nodes of a graph in its order. A cut at ``i`` lies behind ``nodes[i]``.

    ``live[i]``: the main and side values made at or before ``i`` and read behind it, in order; the graph's outputs are
    read at its end. ``legal[i]``: a cut at ``i`` parts neither the pieces of one result (a tuple cannot cross) nor a
    storage from those that write to it in place.
    """

    def __init__(self, graph: Graph, kinds: Mapping[Node, str]):
        self.kinds = kinds
        self.nodes = tuple(node for node in graph.nodes if kinds[node] in ("main", "side"))
        self.index = {node: i for i, node in enumerate(self.nodes)}
        end = len(self.nodes)
        self.last = [max([i, *(self.index.get(user, end) for user in node.users)]) for i, node in enumerate(self.nodes)]
        self.live = self._live()
        self.legal = [all(isinstance(x.meta.get("val"), torch.Tensor) for x in live) for live in self.live]
        for first, last in self._written(graph):
            self.legal[first:last] = [False] * (last - first)

    @cached_property
    def flops(self) -> tuple[int, ...]:
        return tuple(flops(node) for node in self.nodes)

    def main(self, cut: int) -> list[Node]:
        """The main values that a cut sends."""
        return [node for node in self.live[cut] if self.kinds[node] == "main"]

    def bytes(self, cut: int) -> int:
        """Of all values that a cut sends."""
        return sum(nbytes(node) for node in self.live[cut])

    def parameters(self, i: int) -> tuple[str, ...]:
        """The parameters that ``nodes[i]`` reads."""
        return tuple(str(x.target) for x in self.nodes[i].all_input_nodes if self.kinds[x] == "param")

    def _live(self) -> list[tuple[Node, ...]]:
        found: list[tuple[Node, ...]] = []
        alive: list[tuple[int, Node]] = []
        for i, node in enumerate(self.nodes):
            alive = [(last, x) for last, x in alive if last > i]
            if self.last[i] > i:
                alive.append((self.last[i], node))
            found.append(tuple(x for _, x in alive))
        return found

    def _written(self, graph: Graph) -> list[tuple[int, int]]:
        """(first, last) place of every storage that nodes of the line write to in place, up to its last writer; of a
        placeholder or constant from its first writer to its last reader."""
        root = storages(graph)
        spans = []
        for storage, nodes in writers(graph).items():
            places = [self.index[node] for node in nodes if node in self.index]
            if not places:
                continue
            if storage not in self.index:
                users = (user for node in graph.nodes if root[node] is storage for user in node.users)
                places += [self.index[user] for user in users if user in self.index]
                spans.append((min(places), max(places)))
            else:
                spans.append((self.index[storage], max(places)))
        return spans
