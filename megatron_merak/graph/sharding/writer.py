"""What a rule of ``sharding`` may use to write one rank's nodes itself; ``lowering/rewrite.py``
implements it.
"""

from typing import Any, Protocol

from torch.fx import Node


class Writer(Protocol):
    """Writes the nodes of one rank's graph in place of a captured node.

    rank: of this process among the tensor-parallel ranks.
    """

    rank: int

    def get(self, node: Node) -> Node:
        """Return the new node of a captured node, in whatever layout it has."""

    def operand(self, node: Node) -> Node:
        """Return a value as the decision wants it as an operand of sharded work: this rank's shard,
        or all of it.
        """

    def call(
        self,
        target: Any,
        args: tuple[Any, ...],
        like: Node | None = None,
        sharded: bool = True,
        kwargs: dict[str, Any] | None = None,
    ) -> Node:
        """Add a node; its value is that of the captured node ``like``, or computed by ``target`` on
        fake values.
        """

    def sum(self, node: Node) -> Node:
        """All-reduce a partial sum over the tensor-parallel ranks."""

    def stack(self, node: Node) -> Node:
        """Stack the values that a node has on all ranks: [tp, ...]."""

    def enter(self, full: Node) -> Node:
        """Mark a replicated value as an operand of sharded work."""
