"""Rewrites the captured graph for one rank of a layer: local shapes, and marks where collectives
belong.

Weights are divided first, which makes the program of one tensor-parallel rank. Context-parallel
ranks then divide the sequences of that program, whatever is left of a weight in it. What neither
divides may be divided along the sequence again, over the tensor-parallel ranks.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ...segment import LayerAxis
from ..capture.captured import Captured
from ..ir.gradients import passes_gradient
from ..ir.kinds import AXES, NodeKind, kind, over
from ..ir.marks import MARKS, copy_in, reduce_sum, stack
from ..ir.nodes import operand, values
from ..partition.cut import Chain
from ..sharding import local
from ..sharding.placement import Decision, Layout, ShardSpec
from ..sharding.shard import Sharding
from ..sharding.writer import Writer
from .collectives import move_collectives
from .context import shard_contexts
from .experts import ExpertRanks, divide_over_copies
from .padded import pad_vocabularies
from .routed import find_routed
from .rows import prepare_rows
from .sequence import shard_sequences

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Rewritten:
    """The graph of one rank.

    Every node but the output has these entries in its meta:

    val:     the value, fake or real, of the local shape.
    unit:    index of its unit in the chain; None for common values, parameters and constants.
    grad:    whether a gradient may flow to it.
    tp, cp:  what it computes with along each axis, see ``kinds``: with shards also where the value
             is a partial sum, or an input of sharded work marked by ``copy_in``.
    over:    of a mark, the axis of the ranks of its collective.

    What ``graph.behind`` moves has ``behind`` or ``late``, too.

    Attributes:

    constants: values of the get_attr nodes that are not parameters, by target.
    names:     of the nodes that the output returns, all replicated.
    partial:   replicated parameters whose gradients must be all-reduced over the tensor-parallel
               ranks. Over the context-parallel ranks all gradients are partial.
    trainable: parameters that take a gradient.
    cp_comm_type: how ranks that divide sequences exchange; "" without any.
    """

    graph: Graph
    constants: Mapping[str, Any]
    names: tuple[str, ...]
    partial: tuple[str, ...]
    trainable: frozenset[str]
    cp_comm_type: str = ""


def rewrite(
    captured: Captured,
    chain: Chain,
    sharding: Sharding,
    tp_rank: int,
    tp: int,
    partial: Collection[str] = (),
    sequence_parallel: bool = False,
    cp_rank: int = 0,
    cp: int = 1,
    expert_rank: int = 0,
    cp_comm_type: str | None = None,
    cp_inner: int = 1,
) -> Rewritten:
    """Apply the decisions of ``sharding`` for one rank; the captured graph is not changed.

    A rank computes what the model does, but for the weights of routed rows, see ``rows``.

    partial:           replicated parameters whose gradients must be partial sums even where they
                       could be complete on each rank.
    sequence_parallel: whether replicated work is sharded along the sequence where it can be.
    cp_rank, cp:       of the ranks that divide sequences.
    expert_rank:       of the ranks that divide experts, where copies of a layer do.
    cp_comm_type:      how ranks that divide sequences exchange, see ``shard_contexts``; likewise
                       cp_inner.
    """
    assert sharding.tp == tp and 0 <= tp_rank < tp and 0 <= cp_rank < cp
    writer = GraphWriter(captured, chain, sharding, tp_rank)
    writer.run()
    if tp == 1:
        pad_vocabularies(writer.graph, sharding.tensors, mode=writer.mode)
    move_collectives(writer.graph, tp)
    prepare_rows(writer.graph)
    experts = frozenset(name for name, t in sharding.tensors.items() if t.experts)
    rows = frozenset(name for name, t in sharding.tensors.items() if t.dim == 0)
    routed = find_routed(writer.graph, rows)
    exchange = ""
    if cp > 1:
        exchange = shard_contexts(
            writer.graph,
            captured,
            cp_rank,
            cp,
            mode=writer.mode,
            cp_comm_type=cp_comm_type,
            inner=cp_inner,
        )
    if sequence_parallel and tp > 1:
        shard_sequences(
            writer.graph,
            captured,
            tp_rank,
            tp,
            mode=writer.mode,
            routed=routed,
            divided=rows - experts,
            room=sharding.room,
        )
    if experts:
        shared = [axis for axis, ranks in ((LayerAxis.TP, tp), (LayerAxis.CP, cp)) if ranks > 1]
        divide_over_copies(
            writer.graph,
            routed,
            experts,
            ExpertRanks(
                expert_rank,
                sharding.experts,
                LayerAxis.EP,
                shards=sharding.shards,
                room=sharding.room,
            ),
            mode=writer.mode,
            shared=shared,
        )
    summed: tuple[str, ...] = ()
    trained = _trained(writer.graph, captured)
    if tp > 1:
        whole = [node for node in trained if sharding.tensors[str(node.target)].dim is None]
        summed = _separate_partial(writer.graph, whole, LayerAxis.TP, tp_rank, also=partial)
    if cp > 1:
        _separate_partial(writer.graph, trained, LayerAxis.CP, cp_rank, also=captured.trainable)
    if (tp > 1) + (cp > 1) + bool(experts) > 1:
        _part_marks(writer.graph)
    writer.graph.eliminate_dead_code()
    constants = {
        str(node.target): _attribute(captured, str(node.target))
        for node in writer.graph.nodes
        if node.op == "get_attr" and node.target not in captured.shapes
    }
    return Rewritten(
        writer.graph,
        constants,
        captured.outputs,
        partial=summed,
        trainable=captured.trainable,
        cp_comm_type=exchange,
    )


def _attribute(captured: Captured, path: str) -> Any:
    value: Any = captured.module
    for name in path.split("."):
        value = getattr(value, name)
    return value


class GraphWriter(Writer):
    """Writes the graph of one rank node by node; ``Decision.write`` functions build new nodes with
    it.
    """

    def __init__(self, captured: Captured, chain: Chain, sharding: Sharding, rank: int):
        self.captured = captured
        self.chain = chain
        self.sharding = sharding
        self.rank = rank
        self.tp = sharding.tp
        self.graph = Graph()
        self.new: dict[Node, Node] = {}
        # operands of sharded work made from replicated values, to be shared
        self.operands: dict[Any, Node] = {}
        self.units = {node: index for index, unit in enumerate(chain.units) for node in unit}
        self.empty: dict[Any, Tensor] = {}
        all_values = (value for node in captured.module.graph.nodes for value in values(node))
        mode = next(
            (value.fake_mode for value in all_values if isinstance(value, FakeTensor)), None
        )
        self.mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
        self.unit: int | None = None
        self.decision: Decision | None = None

    def run(self) -> None:
        for node in self.captured.module.graph.nodes:
            self.unit = self.units.get(node)
            self.decision = self.sharding.decisions.get(node)
            if self.decision is not None and self.decision.common:
                self.unit = None
            if node.op == "output":
                outputs = map_arg(node.args[0], self._output)
                outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
                self.graph.output(tuple(outputs))
                return
            self.new[node] = self._write(node)
        raise AssertionError("a graph without output")

    def _output(self, node: Node) -> Node:
        self.unit = self.units.get(node)
        return self._gather(node) if self.sharding.layouts.get(node) else self.new[node]

    def _write(self, node: Node) -> Node:
        decision = self.decision
        if node.op in ("placeholder", "get_attr"):
            return self._copy(node, self.new.__getitem__, self.sharding.layouts.get(node))
        if decision is None:
            return self._copy(node, self.new.__getitem__, None)
        if decision.write is not None:
            return decision.write(self, node)
        if decision.layout is None and not decision.reduce:
            return self._copy(
                node,
                lambda x: self._gather(x) if x in decision.gathered else self.new[x],
                None,
                decision,
            )
        new = self._copy(node, self.operand, decision.layout, decision)
        if not decision.reduce:
            return new
        if decision.scale != 1:
            new = self.call(aten.mul.Tensor, (new, decision.scale), like=node)
        return self.sum(new)

    def _copy(
        self,
        node: Node,
        operand: Callable[[Node], Node],
        layout: Any,
        decision: Decision | None = None,
    ) -> Node:
        """Copy a node with its operands replaced; its value has the local shape that ``layout``
        gives.
        """
        args = node.args if decision is None or decision.args is None else decision.args
        new = self.graph.create_node(
            node.op,
            node.target if decision is None or decision.target is None else decision.target,
            map_arg(args, operand),
            {}
            if decision is not None and decision.target is not None
            else map_arg(node.kwargs, operand),
            name=node.name,
        )
        new.meta = dict(node.meta)
        sharded = layout is not None and (not isinstance(layout, tuple) or any(layout))
        self._set_meta(new, sharded or bool(decision and decision.reduce))
        if sharded:
            new.meta["val"] = self._shard_of(node.meta["val"], layout)
        return new

    def get(self, node: Node) -> Node:
        return self.new[node]

    def operand(self, node: Node) -> Node:
        assert self.decision is not None
        split = self.sharding.layouts.get(node)
        if split is not None and node not in self.decision.gathered:
            if node not in self.decision.fills:
                return self.new[node]
            assert isinstance(split, Layout)
            return self._fill(node, self.new[node], split.spec())
        full = self._gather(node) if node in self.decision.gathered else self.new[node]
        cut = self.decision.to_shard.get(node)
        if cut is None:
            return self.enter(full)
        shard = self._take_shard(full, cut)
        return self._fill(node, shard, cut) if node in self.decision.fills else shard

    def call(
        self,
        target: Any,
        args: tuple[Any, ...],
        like: Node | None = None,
        sharded: bool = True,
        kwargs: dict[str, Any] | None = None,
    ) -> Node:
        new = self.graph.call_function(target, args, kwargs)
        if like is None:
            with torch.no_grad(), self.mode:
                fakes = map_arg(args, lambda x: x.meta["val"])
                val = target(*fakes)
        else:
            val = like.meta["val"]
            new.meta = {
                k: v
                for k, v in like.meta.items()
                if k in ("nn_module_stack", "stack_trace", "source_fn_stack")
            }
        new.meta["val"] = val
        self._set_meta(new, sharded)
        return new

    def _set_meta(self, node: Node, sharded: bool) -> None:
        if node.op == "get_attr":
            grad = node.target in self.captured.trainable
        else:
            grad = passes_gradient(node) and any(x.meta["grad"] for x in node.all_input_nodes)
        node.meta.update(unit=self.unit, grad=grad)
        node.meta[LayerAxis.TP] = NodeKind.SHARDS if sharded else NodeKind.FULL
        node.meta[LayerAxis.CP] = NodeKind.FULL

    def sum(self, node: Node) -> Node:
        return self._mark(reduce_sum, node, False)

    def stack(self, node: Node) -> Node:
        new = self._mark(stack, node, False)
        with self.mode:
            new.meta["val"] = node.meta["val"].new_empty(self.tp, *node.meta["val"].shape)
        return new

    def _mark(self, mark: Callable[[Tensor], Tensor], node: Node, sharded: bool) -> Node:
        new = self.graph.call_function(mark, (node,))
        new.meta["val"] = node.meta["val"]
        self._set_meta(new, sharded)
        return new

    def enter(self, full: Node) -> Node:
        """Mark a replicated value as an operand of sharded work; parameters need no mark, see
        ``Rewritten.partial``.
        """
        if full.op != "call_function" or not full.meta["grad"]:
            return full
        key = ("enter", full)
        if key not in self.operands:
            self.operands[key] = self._mark(copy_in, full, True)
        return self.operands[key]

    def _take_shard(self, full: Node, cut: ShardSpec) -> Node:
        key = ("take", full, cut)
        if key in self.operands:
            return self.operands[key]
        x = self.enter(full)
        if cut.repeats > 1:
            heads = (x, cut.dim, sum(cut.blocks), cut.repeats, self.rank, self.tp)
            self.operands[key] = self.call(local.take_heads, heads)
        else:
            piece = (x, cut.dim, cut.blocks, self.rank, self.tp, cut.padded)
            self.operands[key] = self.call(local.take, piece)
        if full.meta["unit"] is None and str(full.target) not in self.captured.shapes:
            self.operands[key].meta["unit"] = None
        return self.operands[key]

    def _fill(self, node: Node, shard: Node, cut: ShardSpec) -> Node:
        """Replace the padding of a shard by the value that the decision wants; one node for all
        readers in a unit.
        """
        assert self.decision is not None
        filler = self.decision.fills[node]
        key = ("fill", shard, filler, self.unit)
        if key not in self.operands:
            share = cut.padded // self.tp
            filled = min(max(sum(cut.blocks) - self.rank * share, 0), share)
            self.operands[key] = self.call(local.fill, (shard, cut.dim, filled, filler))
        return self.operands[key]

    def _gather(self, node: Node) -> Node:
        """Gather a sharded value on every rank."""
        key = ("gather", node)
        if key not in self.operands:
            split = self.sharding.layouts[node]
            assert isinstance(split, Layout)
            args = (self.new[node], split.dim, split.blocks, self.rank, self.tp)
            self.operands[key] = self.sum(self.call(local.embed_in_zeros, args, like=node))
        return self.operands[key]

    def _shard_of(self, val: Any, layout: Any) -> Any:
        if isinstance(layout, Layout):
            shape = tuple(
                layout.extent(self.tp) if d == layout.dim else n for d, n in enumerate(val.shape)
            )
            key = (shape, val.dtype, val.device)
            if key not in self.empty:
                with self.mode:
                    self.empty[key] = torch.empty(shape, dtype=val.dtype, device=val.device)
            return self.empty[key]
        if isinstance(layout, tuple):
            return type(val)(self._shard_of(v, one) for v, one in zip(val, layout, strict=True))
        return val


def _trained(graph: Graph, captured: Captured) -> list[Node]:
    """Return the parameters of a graph that take a gradient."""
    parameters = graph.find_nodes(op="get_attr")
    return [node for node in parameters if node.target in captured.trainable]


def _separate_partial(
    graph: Graph, parameters: Sequence[Node], axis: LayerAxis, rank: int, also: Collection[str]
) -> tuple[str, ...]:
    """Return the parameters that sharded work reads, and those of ``also``: their gradients are
    partial over the ranks of an axis.

    Replicated work that reads such a parameter too is made to read it through
    ``local.grad_on_rank_0``.

    parameters: those that all ranks of the axis have.
    """
    partial = []
    (other,) = (each for each in AXES if each is not axis)
    for node in parameters:
        users = list(node.users)
        replicated = [user for user in users if not kind(user, axis)]
        if len(replicated) == len(users) and node.target not in also:
            continue
        partial.append(str(node.target))
        # One node for each unit and kind of reader: none crosses between units, and its gradient
        # is partial over the other axis where that of its readers is.
        places = dict.fromkeys((user.meta["unit"], kind(user, other)) for user in replicated)
        for unit, kind_of_readers in places:
            with graph.inserting_after(node):
                owned = graph.call_function(local.grad_on_rank_0, (node, rank))
            owned.meta = dict(node.meta) | {"unit": unit, axis: NodeKind.FULL}
            owned.meta[other] = kind_of_readers
            for user in replicated:
                if (user.meta["unit"], kind(user, other)) == (unit, kind_of_readers):
                    user.replace_input_with(node, owned)
    return tuple(partial)


def _part_marks(graph: Graph) -> None:
    """Put a node between two marks that follow one another, for ranks of two axes: a value has one
    collective.
    """
    for node in list(graph.nodes):
        if node.target not in MARKS:
            continue
        before = operand(node)
        if before.target not in MARKS or over(before) is over(node):
            continue
        with graph.inserting_before(node):
            between = graph.call_function(aten.alias.default, (before,))
        between.meta = {name: before.meta[name] for name in ("val", "grad", *AXES)}
        between.meta["unit"] = node.meta["unit"]
        node.replace_input_with(before, between)
