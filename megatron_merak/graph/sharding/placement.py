"""The data types of sharding: how a value is sharded over tensor-parallel ranks, and what one rank
does for a node.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Node

from .writer import Writer

# what every padding entry of a shard contains; None: not known
PaddingValue = float | int | bool | None


@dataclass(frozen=True)
class Layout:
    """How a tensor is sharded over the tensor-parallel ranks.

    dim:           the sharded dimension.
    blocks:        full extents of the blocks that ``dim`` is a concatenation of; each is sharded
                   evenly by itself.
    origins:       names of the parameters whose sharding led to this one.
    padded:        extent of ``dim`` with padding, where its one block is not divisible by the
                   ranks; 0: no padding. The padding is at the end of the last ranks' shards and
                   means nothing.
    renormalized:  whether the value was scaled by a statistic that took an all-reduce.
    features:      (first, per entry): which output features of the origins the entries of ``dim``
                   stand for; None where that is not known.
    padding_value: what the padding contains, see padding.py.
    """

    dim: int
    blocks: tuple[int, ...]
    origins: tuple[str, ...] = ()
    padded: int = 0
    renormalized: bool = False
    features: tuple[int, int] | None = None
    padding_value: PaddingValue = 0

    def extent(self, tp: int) -> int:
        """Return the extent of ``dim`` on one rank."""
        return (self.padded or sum(self.blocks)) // tp

    def same_shards(self, other: "Layout") -> bool:
        """Whether the shards are the same; origins and padding values may differ."""
        return (self.dim, self.blocks, self.padded) == (other.dim, other.blocks, other.padded)

    def piece(self, start: int, blocks: tuple[int, ...]) -> "Layout":
        """Return the layout of the range of ``dim`` that starts at ``start`` and consists of
        ``blocks``.
        """
        features = self.features and (self.features[0] + start * self.features[1], self.features[1])
        return replace(self, blocks=blocks, features=features)

    def spec(self) -> "ShardSpec":
        """Return which shard each rank has."""
        return ShardSpec(self.dim, self.blocks, self.padded)


# Of a node: None if its value is replicated; a tuple has one entry for each tensor of a tuple.
NodeLayout = Layout | None | tuple[Layout | None, ...]


@dataclass(frozen=True)
class ShardSpec:
    """Which shard of a replicated tensor each rank takes. dim, blocks, padded: see ``Layout``.

    repeats: ``dim`` is sharded as if each of its entries were repeated this often (key-value heads,
             each of which serves several query heads).
    """

    dim: int
    blocks: tuple[int, ...]
    padded: int = 0
    repeats: int = 1


@dataclass(frozen=True)
class Decision:
    """What one rank does for one node of the captured graph.

    Sharded operands are used as they are, unless ``gathered``; replicated ones too, unless
    ``to_shard``.

    layout:   of the result.
    to_shard: replicated operands of which the rank takes its shard.
    gathered: sharded operands that are all-gathered first.
    fills:    operands whose padding is overwritten by a number, through which no gradient passes.
    args:     the node's arguments on one rank, where they contain extents; None: as captured.
    target:   what is called instead of the node's target.
    reduce:   the result is a partial sum, to be all-reduced.
    scale:    multiplies a partial sum before the all-reduce.
    common:   nothing that the node still reads depends on parameters.
    write:    if set, does all of this itself, given a ``Writer`` and the node.
    """

    layout: NodeLayout
    to_shard: Mapping[Node, ShardSpec] = field(default_factory=dict)
    gathered: tuple[Node, ...] = ()
    fills: Mapping[Node, PaddingValue] = field(default_factory=dict)
    args: tuple[Any, ...] | None = None
    target: Callable[..., Any] | None = None
    reduce: bool = False
    scale: float = 1.0
    common: bool = False
    write: Callable[[Writer, Node], Node] | None = None


class CannotShard(Exception):
    """An operator cannot work on shards of ``operands``. ``why`` continues the sentence '<op> in
    <module> ...'.

    origins: the parameters whose sharding led to that of the operands.
    """

    def __init__(self, node: Node, operands: tuple[Node, ...], why: str):
        super().__init__(why)
        self.node = node
        self.operands = operands
        self.why = why
        self.origins: tuple[str, ...] = ()


class NeedsBlocks(CannotShard):
    """An operator takes pieces of the sharded dimension. blocks: see ``Assumptions``, those that
    parameters need.
    """

    def __init__(self, node: Node, blocks: Mapping[tuple[str, int], tuple[int, ...]]):
        super().__init__(node, (), "takes pieces of the sharded dimension")
        self.blocks = blocks


class PlanConflict(Exception):
    """A node cannot work on shards of values, but a plan shards the parameters ``origins`` that
    they depend on.

    ``why`` continues the sentence '<op> in <module> ...'.
    """

    def __init__(self, node: Node, origins: tuple[str, ...], why: str):
        super().__init__(why)
        self.node = node
        self.origins = origins
        self.why = why
