"""The vocabulary of sharding decisions: where the parts of a value are, and what one rank does for a node."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Node

Filler = float | int | bool | None  # what every entry of some padding holds; None: not known


@dataclass(frozen=True)
class Split:
    """A value of which every rank holds a part.

    ``dim`` is a concatenation of ``blocks`` (full extents), each divided evenly over the ranks. ``origins`` are the
    weights that the division started from. ``padded`` (0: no padding) is the extent that is divided when the one block
    does not divide by itself: the excess, at the end of the last ranks' parts, means nothing; it holds ``filler`` (see
    padding.py). ``summed``: on its way
    the value was scaled by a statistic that needed a sum over the ranks. ``rows``: (first, per entry) of the output
    features of its origins that the entries of ``dim`` stand for, where that is known.
    """

    dim: int
    blocks: tuple[int, ...]
    origins: tuple[str, ...] = ()
    padded: int = 0
    summed: bool = False
    rows: tuple[int, int] | None = None
    filler: Filler = 0

    def extent(self, tp: int) -> int:
        """The extent of ``dim`` on one rank."""
        return (self.padded or sum(self.blocks)) // tp

    def same(self, other: "Split") -> bool:
        """Whether the parts are the same, wherever they came from and whatever their padding holds."""
        return (self.dim, self.blocks, self.padded) == (other.dim, other.blocks, other.padded)

    def piece(self, start: int, blocks: tuple[int, ...]) -> "Split":
        """The part of the dimension from ``start`` on that consists of ``blocks``."""
        rows = self.rows and (self.rows[0] + start * self.rows[1], self.rows[1])
        return replace(self, blocks=blocks, rows=rows)

    def cut(self) -> "Cut":
        return Cut(self.dim, self.blocks, self.padded)


Layout = Split | None | tuple[Split | None, ...]  # None: every rank holds all of it; a tuple: one per tensor of a tuple


@dataclass(frozen=True)
class Cut:
    """A rank's part of a value that every rank holds; the fields mean what they mean in ``Split``.

    ``repeats``: what is divided is ``dim`` with each entry repeated so often (key-value heads under their query heads).
    """

    dim: int
    blocks: tuple[int, ...]
    padded: int = 0
    repeats: int = 1


@dataclass(frozen=True)
class Decision:
    """What one rank does for one node of the captured graph.

    ``layout`` of the result. Operands that are divided are used as they are; of those in ``cuts`` the rank takes its
    part; those in ``gathered`` are first made whole; any other operand enters whole. The padding of those in
    ``fills`` is replaced by a number, through which no gradient passes. ``args`` and ``target`` replace the node's
    where extents are written out. ``reduce``: the result is a partial sum, to be added up over the ranks; ``scale``
    multiplies it before. ``common``: nothing that the node still reads depends on parameters. ``write``, if set, does
    all of this itself, given the writer and the node.
    """

    layout: Layout
    cuts: Mapping[Node, Cut] = field(default_factory=dict)
    gathered: tuple[Node, ...] = ()
    fills: Mapping[Node, Filler] = field(default_factory=dict)
    args: tuple[Any, ...] | None = None
    target: Callable[..., Any] | None = None
    reduce: bool = False
    scale: float = 1.0
    common: bool = False
    write: Callable[[Any, Node], Node] | None = None


class Unfit(Exception):
    """An op cannot work on the parts of ``operands``; ``why`` continues the sentence '<op> in <module> ...'."""

    def __init__(self, node: Node, operands: tuple[Node, ...], why: str):
        super().__init__(why)
        self.node, self.operands, self.why = node, operands, why


class Stuck(Exception):
    """A node cannot work on the parts of values, and a plan has divided the weights behind them, ``origins``. ``why``
    continues the sentence '<op> in <module> ...'."""

    def __init__(self, node: Node, origins: tuple[str, ...], why: str):
        super().__init__(why)
        self.node, self.origins, self.why = node, origins, why


class Again(Exception):
    """What was assumed of a weight has changed: propagation starts again."""
