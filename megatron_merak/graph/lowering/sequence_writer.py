"""Writes a graph that computes on parts of sequences, as ``sequence`` has decided."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ... import ops
from ...segment import LayerAxis
from ..ir.kinds import NodeKind, is_mark_over, kind, kinds_like
from ..ir.marks import all_gather, copy_in, exchange, reduce_scatter, reduce_sum, stack
from ..ir.nodes import is_random, op_name, operand, values
from ..ir.operators import facts
from ..sharding import local
from ..sharding.placement import Decision, Layout, NodeLayout, ShardSpec

aten = torch.ops.aten

# what views heads of keys and values in another way, or repeats them for queries
_VIEWS = "unsqueeze expand reshape view _unsafe_view clone contiguous transpose".split()


@dataclass(frozen=True)
class SequenceView:
    """How parts lie in a value: along the length of its view [samples, length, *rest]."""

    samples: int
    length: int
    rest: tuple[int, ...]

    def view(self, count: int = 1) -> list[int]:
        """Return the shape of that view of one of ``count`` parts."""
        return [self.samples, self.length // count, *self.rest]


def parts_of(shape: Sequence[int], layout: Layout) -> SequenceView | None:
    """Return how parts lie in a value of this full shape; None if their lengths differ."""
    if len(dict.fromkeys(layout.blocks)) != 1 or layout.padded:
        return None
    samples = prod(shape[: layout.dim]) * len(layout.blocks)
    return SequenceView(samples, layout.blocks[0], tuple(shape[layout.dim + 1 :]))


class SequenceWriter:
    """Changes one rank's graph in place.

    layouts:    of the values that are sharded along the sequence; None, or none, of all others.
    decisions:  what replicated nodes do instead.
    starts:     the all-reduced values that are reduce-scattered.
    axis:       of the ranks that have parts.
    parameters: names of the model's parameters.
    mode:       of the fake values in the graph.
    turned:     nodes that are sharded along another dimension than the sequence.
    exchanges:  node -> how operands are sharded for it, where it reads them otherwise.
    from_ends:  whether ranks have their parts of sequences from both ends, see ``local.take_ends``.
    """

    def __init__(
        self,
        graph: Graph,
        layouts: Mapping[Node, NodeLayout],
        decisions: Mapping[Node, Decision],
        starts: Container[Node],
        *,
        axis: LayerAxis,
        parameters: Container[str],
        rank: int,
        tp: int,
        mode: FakeTensorMode,
        turned: Container[Node] = (),
        exchanges: Mapping[Node, Mapping[Node, Layout]] = MappingProxyType({}),
        from_ends: bool = False,
    ):
        self.graph = graph
        self.layouts = layouts
        self.decisions = decisions
        self.starts = starts
        self.axis = axis
        self.parameters = parameters
        self.rank = rank
        self.tp = tp
        self.mode = mode
        self.turned = turned
        self.exchanges = exchanges
        self.from_ends = from_ends
        self._shapes = {n: tuple(values(n)[0].shape) for n in graph.nodes if values(n)}
        # a sharded value -> the node that computes this rank's part
        self._own: dict[Node, Node] = {}
        self._made: dict[Any, Node] = {}

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node in self.starts:
                self._scatter(node)
            elif is_mark_over(node, copy_in, self.axis) and self._is_sharded(operand(node)):
                self._enter(node)
            elif node in self.decisions:
                self._apply(node, self.decisions[node])
            else:
                self._read_full(node)

    def _is_sharded(self, node: Node) -> bool:
        return self.layouts.get(node) is not None

    def _layout(self, node: Node) -> Layout:
        layout = self.layouts[node]
        assert isinstance(layout, Layout)
        return layout

    def _parts(self, node: Node) -> SequenceView:
        parts = parts_of(self._shapes[node], self._layout(node))
        assert parts is not None
        return parts

    # ---- nodes ------------------------------------------------------------------------------
    def _call(
        self,
        target: Any,
        args: tuple[Any, ...],
        like: Node,
        kind: NodeKind = NodeKind.PARTS,
        **meta: Any,
    ) -> Node:
        """Add a node, by default on parts, in the unit of ``like``; ``meta`` says what differs."""
        node = self.graph.call_function(target, args)
        node.meta = {"unit": like.meta["unit"], "grad": like.meta["grad"], **kinds_like(like)}
        node.meta |= {self.axis: kind, **meta}
        if "val" not in meta:
            with torch.no_grad(), self.mode:
                node.meta["val"] = target(*map_arg(args, lambda x: x.meta["val"]))
        return node

    def _mark(self, mark: Any, x: Node, shape: Sequence[int], **meta: Any) -> Node:
        value = self._empty(shape, x.meta["val"])
        return self._call(mark, (x,), x, val=value, over=self.axis, **meta)

    def _kind(self, node: Node) -> NodeKind:
        """Return what a node that has a part of its value computes with.

        Attention draws the random numbers of its rank's queries, and not those of all.
        """
        own = node in self.turned or is_random(node) and facts(node).attends
        return NodeKind.SHARDS if own else NodeKind.PARTS

    def _in_chunks(self, node: Node) -> bool:
        """Whether a rank's part of a value is from both ends of each sequence."""
        return self.from_ends and node not in self.turned

    def _view(self, x: Node, shape: Sequence[int], **meta: Any) -> Node:
        """Return ``x`` in another shape: itself where it has it."""
        if tuple(x.meta["val"].shape) == tuple(shape):
            return x
        return self._call(aten.reshape.default, (x, list(shape)), x, **meta)

    def _empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        with self.mode:
            return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)

    def _own_shape(self, shape: Sequence[int], layout: Layout) -> list[int]:
        own = list(shape)
        own[layout.dim] = layout.extent(self.tp)
        return own

    def _own_value(self, value: Any, layout: NodeLayout) -> Any:
        if isinstance(layout, tuple):
            pairs = zip(value, layout, strict=True)
            return type(value)(self._own_value(each, one) for each, one in pairs)
        return value if layout is None else self._empty(self._own_shape(value.shape, layout), value)

    # ---- into parts -------------------------------------------------------------------------
    def _scatter(self, mark: Node) -> None:
        """Replace an all-reduce by a reduce-scatter."""
        parts = self._parts(mark)
        with self.graph.inserting_before(mark):
            partial = self._view(operand(mark), parts.view(), kind=NodeKind.SHARDS)
            scattered = self._mark(reduce_scatter, partial, parts.view(self.tp))
            # One reader, in this unit: it gathers the gradient when that is summed over all others.
            own_shape = self._own_shape(self._shapes[mark], self._layout(mark))
            self._own[mark] = self._call(aten.reshape.default, (scattered, own_shape), mark)

    def _apply(self, node: Node, decision: Decision) -> None:
        """Let a node do what was decided."""
        on_parts = decision.layout is not None or decision.reduce
        with self.graph.inserting_before(node):
            if on_parts:
                new = {x: self._operand(node, x, decision) for x in node.all_input_nodes}
            else:
                new = {x: self._full(x, node) for x in node.all_input_nodes}
        kwargs = {} if decision.target is not None else node.kwargs
        args = node.args if decision.args is None else decision.args
        node.args = map_arg(args, new.__getitem__)
        node.kwargs = map_arg(kwargs, new.__getitem__)
        node.target = decision.target or node.target
        if not on_parts:
            return
        node.meta = {**node.meta, self.axis: self._kind(node)}
        if decision.layout is not None:
            node.meta["val"] = self._own_value(node.meta["val"], decision.layout)
            self._own[node] = node
        if is_random(node) and self._kind(node) is NodeKind.PARTS:
            self._drop(node)
        if decision.reduce:
            self._reduce(node, decision.scale)

    def _drop(self, dropout: Node) -> None:
        """Let a dropout use its part of the mask of the full value."""
        x, p, train = dropout.args
        samples = self._parts(dropout).samples
        chunks = local.ends_of(self.rank, self.tp) if self.from_ends else (self.rank,)
        dropout.target = ops.dropout_of_parts
        dropout.args = (x, p, train, (samples, chunks, len(chunks) * self.tp))

    def _reduce(self, node: Node, scale: float) -> None:
        """All-reduce what a node has summed over its parts."""
        users = list(node.users)
        shape = node.meta["val"].shape
        with self.graph.inserting_before(node.next):
            scaled = node
            if scale != 1:
                args = (node, scale)
                scaled = self._call(aten.mul.Tensor, args, node, val=node.meta["val"])
            total = self._mark(reduce_sum, scaled, shape, kind=NodeKind.FULL)
        for user in users:
            user.replace_input_with(node, total)

    def _operand(self, node: Node, x: Node, decision: Decision) -> Node:
        """Return what a node that computes on parts reads instead of ``x``."""
        read_as = self.exchanges.get(node, {}).get(x)
        if read_as is not None:
            return self._exchanged(x, read_as, node)
        cut = decision.to_shard.get(x)
        if x in decision.gathered:
            return self._taken(x, cut, node)
        if x in self._own:
            return self._own[x]
        if cut is None:
            return self._entering(x)
        unit = x.meta["unit"]
        others: dict[str, Any] = {}
        if str(x.target) in self.parameters:
            # Of a parameter one node for each unit and kind of reader: none crosses between units,
            # and its gradient is partial where the reader's is.
            unit = node.meta["unit"]
            others = {axis: each for axis, each in kinds_like(node).items() if axis != self.axis}
        take = self._take(node)
        key = (take, x, cut.dim, cut.blocks, unit, *others.values())
        if key not in self._made:
            args = (self._entering(x), cut.dim, cut.blocks, self.rank, self.tp)
            self._made[key] = self._call(take, args, x, unit=unit, **others)
        return self._made[key]

    def _entering(self, x: Node) -> Node:
        """Mark a replicated value that is read for parts: each rank has a part of its gradient."""
        if x.op != "call_function" or not x.meta["grad"] or kind(x, self.axis):
            return x
        key = ("enter", x)
        if key not in self._made:
            self._made[key] = self._mark(copy_in, x, x.meta["val"].shape)
        return self._made[key]

    def _taken(self, x: Node, cut: ShardSpec | None, reader: Node) -> Node:
        """Return a gathered ``x``, or the positions or heads of it that this rank reads."""
        by_position = reader not in self.turned
        full = (
            self._all_positions(x, reader) if by_position else self._entered(x, reader.meta["unit"])
        )
        if cut is None:
            return full
        if by_position:
            rows = (full, cut.dim, cut.blocks, self.rank, self.tp)
            return self._call(self._take(reader), rows, full, kind=self._kind(reader))
        heads = (full, cut.dim, sum(cut.blocks), cut.repeats, self.rank, self.tp)
        return self._call(local.take_heads, heads, full, kind=NodeKind.SHARDS)

    def _take(self, reader: Node) -> Any:
        """Return what takes a rank's part of a value for a reader."""
        return local.take_ends if self._in_chunks(reader) else local.take

    def _all_positions(self, x: Node, reader: Node) -> Node:
        """Return a gathered ``x``. Gathered is what it is another view of: one of the heads that it
        repeats for queries.
        """
        source = x
        steps = []
        while op_name(source) in _VIEWS and self._own.get(operand(source)) is operand(source):
            steps.append(source)
            source = operand(source)
        kind = self._kind(reader)
        full = self._entered(source, reader.meta["unit"], kind)
        for step in reversed(steps):
            if op_name(step) in ("unsqueeze", "transpose"):
                target: Any = step.target
                args = (full, *step.args[1:])
            else:
                target = aten.expand.default if op_name(step) == "expand" else aten.reshape.default
                args = (full, list(self._shapes[step]))
            full = self._call(target, args, full, kind=kind)
        return full

    def _exchanged(self, x: Node, layout: Layout, reader: Node) -> Node:
        """Return ``x`` sharded by another layout, for a reader: ranks exchange pieces."""
        unit = reader.meta["unit"]
        key = ("exchange", x, layout.dim, layout.blocks, unit)
        if key not in self._made:
            before = self._layout(x)
            own = self._in_unit(x, unit)
            if self.from_ends and x in self.turned:
                order = (own, layout.dim, layout.blocks, self.tp)
                own = self._call(local.by_rank, order, own, kind=self._kind(x), unit=unit)
            args = (own, layout.dim, layout.blocks, self.tp)
            given = self._call(local.shares, args, own, kind=self._kind(x), unit=unit)
            got = self._mark(exchange, given, given.meta["val"].shape, kind=self._kind(x))
            where = (got, before.dim, before.blocks)
            united = self._call(local.united, where, got, kind=self._kind(reader))
            self._made[key] = self._ordered(united, x, before, self._kind(reader))
        return self._made[key]

    def _ordered(self, full: Node, x: Node, layout: Layout, kind: NodeKind) -> Node:
        """Return a value that was put together from the ranks' parts of ``x``, by position.

        layout: of the parts in ``full``.
        """
        if not self._in_chunks(x):
            return full
        args = (full, layout.dim, layout.blocks, self.tp)
        return self._call(local.by_position, args, full, kind=kind)

    # ---- out of parts -----------------------------------------------------------------------
    def _enter(self, mark: Node) -> None:
        """Gather a value for sharded work, whose gradients of it are then reduce-scattered."""
        with self.graph.inserting_before(mark):
            full = self._entered(operand(mark), mark.meta["unit"])
        mark.replace_all_uses_with(full)
        self.graph.erase_node(mark)

    def _entered(self, x: Node, unit: int | None, kind: NodeKind = NodeKind.SHARDS) -> Node:
        """Return the full value of ``x`` for work of a kind in a unit."""
        gathered = self._gathered(x, unit)
        shape = gathered.meta["val"].shape
        entering = self._mark(copy_in, gathered, shape, kind=kind, unit=unit)
        full = self._view(entering, self._shapes[x], kind=kind)
        return self._ordered(full, x, self._layout(x), kind)

    def _gathered(self, x: Node, unit: int | None) -> Node:
        """Return the full value of ``x``, viewed as [samples, length, ...]."""
        key = ("gather", x, unit)
        if key not in self._made:
            self._made[key] = self._mark(all_gather, self._leaving(x, unit), self._parts(x).view())
        return self._made[key]

    def _leaving(self, x: Node, unit: int | None) -> Node:
        """Return this rank's part of ``x``, viewed as [samples, length / tp, ...].

        It is in the unit that gathers it.
        """
        own = self._in_unit(x, unit)
        moves = {key: own.meta[key] for key in ("unit", "moves") if "moves" in own.meta}
        return self._view(own, self._parts(x).view(self.tp), **moves)

    def _in_unit(self, x: Node, unit: int | None) -> Node:
        """Return this rank's part of ``x`` in a unit, so that parts cross between units."""
        own = self._own[x]
        if own.meta["unit"] == unit:
            return own
        own_kind = kind(own, self.axis)
        return self._call(aten.alias.default, (own,), own, kind=own_kind, unit=unit, moves=True)

    def _read_full(self, node: Node) -> None:
        """Let a node that does not compute on parts read full values."""
        for x in node.all_input_nodes:
            with self.graph.inserting_before(node):
                full = self._full(x, node)
            if full is not x:
                node.replace_input_with(x, full)

    def _full(self, x: Node, reader: Node) -> Node:
        """Return the full value of ``x`` for a reader whose gradient of it, if any, is complete."""
        if not self._is_sharded(x):
            return x
        unit = reader.meta.get("unit", x.meta["unit"])
        key = ("full", x, unit)
        if key not in self._made:
            own = self._leaving(x, unit)
            shape = (self.tp, *own.meta["val"].shape)
            stacked = self._mark(stack, own, shape, kind=NodeKind.FULL)
            args = (stacked, list(self._shapes[x]))
            full = self._call(local.joined, args, stacked, kind=NodeKind.FULL)
            self._made[key] = self._ordered(full, x, self._layout(x), NodeKind.FULL)
        return self._made[key]
