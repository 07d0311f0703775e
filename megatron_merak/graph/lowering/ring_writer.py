"""Writes attention to keys and values that ranks pass on in a ring: the p2p kind of context
parallelism. See ``ops.ring`` for what each operation does.

    forward    part 0 --- part 1 ------- part 2 ------- end      sums of what was seen so far
                 |          |              |
    both ---------- rotate -- arrive -- rotate -- arrive         keys and values, and their gradients back
                            |              |
    pass_back ---------- turn_back - pass_back - turn_back - end    nothing; keys and values in the backward

What arrives is sent on in a segment of its own, before the part that computes with it; in the backward
likewise. So every transfer has a part to travel behind.

With the a2a+p2p kind neighbours exchange heads before and after all that: each has its share of the
heads, of the positions of all of them, and a ring is of the ranks at the same place of each group of
neighbours. Parts from both ends of a sequence make up such parts of fewer ranks:

    chunks of ranks     0 7 | 1 6 | 2 5 | 3 4
    of two groups       0 1 6 7   | 2 3 4 5
"""

import math
import operator
from collections.abc import Container
from typing import Any

from torch.fx import Node

from ... import ops
from ...segment import LayerAxis
from ..ir.kinds import NodeKind
from ..ir.marks import exchange, rotate, turn_back
from ..ir.nodes import constant, op_name, operand, values
from ..ir.operators import is_causal
from ..sharding import local
from ..sharding.placement import Decision, Layout
from ..sharding.rules_value import argument
from .sequence_writer import SequenceWriter, aten

_NOTHING = (0, 0, 0, 0, False)  # is seen
_RESHAPES = ("reshape", "view", "_unsafe_view")


class RingWriter(SequenceWriter):
    """A ``SequenceWriter`` that lets keys and values of some attention go round.

    rings: this attention.
    inner: number of neighbours that exchange heads; 1: none do.
    """

    def __init__(self, *places: Any, rings: Container[Node], inner: int = 1, **named: Any):
        super().__init__(*places, **named)
        self.rings = rings
        self.inner = inner

    def _apply(self, node: Node, decision: Decision) -> None:
        if node not in self.rings:
            super()._apply(node, decision)
            return
        with self.graph.inserting_before(node):
            target: Any = ops.ring_end
            args = self._round(node, decision)
            if self.inner > 1:
                target = aten.transpose.int
                args = self._own_positions(self._moved(ops.ring_end, args, node))
        node.target = target
        node.args = args
        node.kwargs = {}
        node.meta = {**node.meta, self.axis: NodeKind.PARTS}
        node.meta["val"] = self._own_value(node.meta["val"], self._layout(node))
        self._own[node] = node

    @property
    def _place(self) -> tuple[int, int]:
        """The index of this rank in its ring, and the number of ranks there."""
        return self.rank // self.inner, self.tp // self.inner

    def _round(self, node: Node, decision: Decision) -> tuple[Any, ...]:
        """Write the parts; return the arguments of the end."""
        query = self._in_unit(operand(node), node.meta["unit"])
        pair = [self._unrepeated(operand(node, place), node) for place in (1, 2)]
        scale = argument(node, "scale")
        mask = argument(node, "attn_mask")
        length = self._layout(operand(node, 1)).blocks
        rows = self._rows(node, mask, decision) if isinstance(mask, Node) else None
        both = self._call(aten.cat.default, (pair, -1), node)
        if self.inner > 1:
            query = self._own_heads(query)
            both = self._own_heads(both)
        own = both
        rank, ranks = self._place
        before: tuple[Node, ...] = ()
        hole: Node | None = None
        for step in range(ranks):
            if step:
                sent = self._between(rotate, both, ranks)
                both = self._step(ops.ring_arrive, (sent, before[1]), node)
            source = (rank - step) % ranks
            columns = self._columns(rows, length, source)
            span = self._span(node, query, both, source)
            part = self._step(ops.ring_part, (query, both, columns, before, span, scale), node)
            results = [
                self._call(operator.getitem, (part, place), part)
                for place in range(len(values(part)))
            ]
            before = tuple(results[:3])
            if step:
                args = (results[3],) if hole is None else (results[3], hole)
                passed = self._step(ops.ring_pass_back, args, node)
                hole = self._between(turn_back, passed, ranks)
        assert hole is not None
        return (*before, own, hole)

    def _step(self, target: Any, args: tuple[Any, ...], node: Node) -> Node:
        return self._call(target, args, node, apart=True, moves=True)

    def _unrepeated(self, x: Node, reader: Node) -> Node:
        """Return a rank's keys or values, before each head was repeated for several queries."""
        spread = x
        while op_name(spread) in _RESHAPES or op_name(spread) in ("clone", "contiguous"):
            spread = operand(spread)
        if op_name(spread) == "expand" and op_name(operand(spread)) == "unsqueeze":
            single = operand(spread)
            source = operand(single)
            heads = self._shapes[source]
            whole = self._shapes[x]
            layout = self.layouts.get(source)
            repeats = constant(single, 1) == 2 and len(self._shapes[spread]) == len(heads) + 1 == 5
            alike = (heads[0], *heads[2:]) == (whole[0], *whole[2:])
            if repeats and alike and isinstance(layout, Layout) and layout.dim == 2:
                x = source
        return self._in_unit(x, reader.meta["unit"])

    def _columns(self, rows: Node | None, length: tuple[int, ...], source: int) -> Node | None:
        """Return the part of a mask that is of a rank's keys."""
        if rows is None or rows.meta["val"].shape[-1] == 1:
            return rows
        last = rows.meta["val"].dim() - 1
        take = local.take_ends if self.from_ends else local.take
        return self._call(take, (rows, last, length, source, self._place[1]), rows)

    def _span(self, node: Node, query: Node, both: Node, source: int) -> tuple[Any, ...]:
        """Return which queries of this rank see which keys of another, see ``ops.ring_part``."""
        queries = query.meta["val"].shape[2]
        keys = both.meta["val"].shape[2]
        rank, _ = self._place
        if not is_causal(node) or source == rank:
            return (0, queries, 0, keys, is_causal(node))
        if self.from_ends:
            before = (0, queries, 0, keys // 2, False)
            return before if source < rank else (queries // 2, queries, 0, keys, False)
        return (0, queries, 0, keys, False) if source < rank else _NOTHING

    # ---- among neighbours --------------------------------------------------------------------
    def _between(self, mark: Any, x: Node, ranks: int) -> Node:
        """Mark a value that goes round, or whose gradient does."""
        made = self._mark(mark, x, x.meta["val"].shape, ranks=ranks)
        made.meta["over"] = LayerAxis.OUTER if self.inner > 1 else self.axis
        return made

    def _moved(self, target: Any, args: tuple[Any, ...], like: Node) -> Node:
        return self._call(target, args, like, moves=True)

    def _swapped(self, x: Node, dim: int) -> Node:
        """Return what neighbours have of this rank's share of ``x`` along a dimension, [inner, ...]."""
        extent = x.meta["val"].shape[dim]
        given = self._moved(local.shares, (x, dim, (extent,), self.inner), x)
        got = self._mark(exchange, given, given.meta["val"].shape)
        got.meta["over"] = LayerAxis.INNER
        return got

    def _own_heads(self, x: Node) -> Node:
        """Return this rank's heads of what neighbours have the positions of, [b, n, s, d].

        Of fewer heads than neighbours, or another number than these can share, each is repeated for
        the ranks whose queries read it.
        """
        heads = x.meta["val"].shape[1]
        repeats = self.inner // math.gcd(heads, self.inner)
        if repeats > 1:
            x = self._moved(aten.repeat_interleave.self_int, (x, repeats, 1), x)
        length = x.meta["val"].shape[2] * self.inner
        swapped = self._swapped(x, 1)
        united = self._moved(local.united, (swapped, 2, (length,)), swapped)
        if not self.from_ends:
            return united
        return self._moved(local.by_position, (united, 2, (length,), self.inner), united)

    def _own_positions(self, out: Node) -> tuple[Any, ...]:
        """Return the arguments of a transpose that leaves all heads of this rank's positions, of the
        strides of ``attention``.
        """
        heads = out.meta["val"].shape[1] * self.inner
        rows = self._moved(aten.transpose.int, (out, 1, 2), out)
        if self.from_ends:
            length = rows.meta["val"].shape[1]
            rows = self._moved(local.by_rank, (rows, 1, (length,), self.inner), rows)
        swapped = self._swapped(rows, 1)
        return self._moved(local.united, (swapped, 2, (heads,)), swapped), 1, 2

    def _rows(self, node: Node, mask: Node, decision: Decision) -> Node:
        """Return the part of a mask that is of a rank's queries."""
        if self.inner == 1:
            return self._operand(node, mask, decision)
        rank, ranks = self._place
        cut = decision.to_shard.get(mask)
        takes = [] if cut is None else [(self._take(node), cut.dim, cut.blocks, rank, ranks)]
        shape = self._shapes[mask]
        heads = shape[-3] if len(shape) > 2 else 1
        if heads > 1:
            place = self.rank % self.inner
            takes.append((local.take, len(shape) - 3, (heads,), place, self.inner))
        rows = mask
        for take, *literals in takes:
            key = (take, rows, *literals)
            if key not in self._made:
                self._made[key] = self._call(take, (rows, *literals), rows)
            rows = self._made[key]
        return rows
