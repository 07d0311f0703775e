"""Rewrites the captured graph for one tensor-parallel rank: local shapes, and marks where collectives belong."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..capture.captured import Captured
from ..ir.gradients import passes_gradient
from ..ir.marks import copy_in, reduce_sum, stack
from ..ir.nodes import values
from ..partition.cut import Chain
from ..sharding import local
from ..sharding.placement import Decision, Layout, ShardSpec
from ..sharding.shard import Sharding
from ..sharding.writer import Writer
from .collectives import move_collectives

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Rewritten:
    """The graph of one rank.

    Every node but the output has these entries in its meta:

    val:     the value, fake or real, of the local shape.
    unit:    index of its unit in the chain; None for common values, parameters and constants.
    sharded: whether the value is a shard, a partial sum, or an input of sharded work marked by ``copy_in``. Its random
             numbers, and the gradients that it passes back, differ between ranks.
    grad:    whether a gradient may flow to it.

    Attributes:

    constants: values of the get_attr nodes that are not parameters, by target.
    outputs:   the nodes returned, all replicated; ``names`` are the names of these outputs.
    partial:   replicated parameters whose gradients must be all-reduced over the tensor-parallel ranks.
    trainable: parameters that take a gradient.
    """

    graph: Graph
    constants: Mapping[str, Any]
    outputs: tuple[Node, ...]
    names: tuple[str, ...]
    partial: tuple[str, ...]
    trainable: frozenset[str]


def rewrite(
    captured: Captured, chain: Chain, sharding: Sharding, tp_rank: int, tp: int, partial: Collection[str] = ()
) -> Rewritten:
    """Apply the decisions of ``sharding`` for one rank; the captured graph is not changed.

    partial: replicated parameters whose gradients must be partial sums even where they could be complete on each rank.
    """
    assert sharding.tp == tp and 0 <= tp_rank < tp
    writer = GraphWriter(captured, chain, sharding, tp_rank)
    outputs = writer.run()
    move_collectives(writer.graph, tp)
    summed = _separate_partial_parameters(writer.graph, captured, sharding, tp_rank, also=partial) if tp > 1 else ()
    writer.graph.eliminate_dead_code()
    constants = {
        str(node.target): _attribute(captured, str(node.target))
        for node in writer.graph.nodes
        if node.op == "get_attr" and node.target not in captured.shapes
    }
    return Rewritten(writer.graph, constants, outputs, captured.outputs, partial=summed, trainable=captured.trainable)


def _attribute(captured: Captured, path: str) -> Any:
    value: Any = captured.module
    for name in path.split("."):
        value = getattr(value, name)
    return value


class GraphWriter(Writer):
    """Writes the graph of one rank node by node; ``Decision.write`` functions build new nodes with it."""

    def __init__(self, captured: Captured, chain: Chain, sharding: Sharding, rank: int):
        self.captured = captured
        self.chain = chain
        self.sharding = sharding
        self.rank = rank
        self.tp = sharding.tp
        self.graph = Graph()
        self.new: dict[Node, Node] = {}
        self.operands: dict[Any, Node] = {}  # operands of sharded work made from replicated values, to be shared
        self.units = {node: index for index, unit in enumerate(chain.units) for node in unit}
        self.empty: dict[Any, Tensor] = {}
        all_values = (value for node in captured.module.graph.nodes for value in values(node))
        mode = next((value.fake_mode for value in all_values if isinstance(value, FakeTensor)), None)
        self.mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
        self.unit: int | None = None
        self.decision: Decision | None = None

    def run(self) -> tuple[Node, ...]:
        for node in self.captured.module.graph.nodes:
            self.unit = self.units.get(node)
            self.decision = self.sharding.decisions.get(node)
            if self.decision is not None and self.decision.common:
                self.unit = None
            if node.op == "output":
                outputs = map_arg(node.args[0], self._output)
                outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
                self.graph.output(tuple(outputs))
                return tuple(outputs)
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
                node, lambda x: self._gather(x) if x in decision.gathered else self.new[x], None, decision
            )
        new = self._copy(node, self.operand, decision.layout, decision)
        if not decision.reduce:
            return new
        if decision.scale != 1:
            new = self.call(aten.mul.Tensor, (new, decision.scale), like=node)
        return self.sum(new)

    def _copy(self, node: Node, operand: Callable[[Node], Node], layout: Any, decision: Decision | None = None) -> Node:
        """Copy a node with its operands replaced; its value has the local shape that ``layout`` gives."""
        args = node.args if decision is None or decision.args is None else decision.args
        new = self.graph.create_node(
            node.op,
            node.target if decision is None or decision.target is None else decision.target,
            map_arg(args, operand),
            {} if decision is not None and decision.target is not None else map_arg(node.kwargs, operand),
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
                k: v for k, v in like.meta.items() if k in ("nn_module_stack", "stack_trace", "source_fn_stack")
            }
        new.meta["val"] = val
        self._set_meta(new, sharded)
        return new

    def _set_meta(self, node: Node, sharded: bool) -> None:
        if node.op == "get_attr":
            grad = node.target in self.captured.trainable
        else:
            grad = passes_gradient(node) and any(x.meta["grad"] for x in node.all_input_nodes)
        node.meta.update(unit=self.unit, sharded=sharded, grad=grad)

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
        """Mark a replicated value as an operand of sharded work; parameters need no mark, see ``Rewritten.partial``."""
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
        """Replace the padding of a shard by the value that the decision wants; one node for all readers in a unit."""
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
            shape = tuple(layout.extent(self.tp) if d == layout.dim else n for d, n in enumerate(val.shape))
            key = (shape, val.dtype, val.device)
            if key not in self.empty:
                with self.mode:
                    self.empty[key] = torch.empty(shape, dtype=val.dtype, device=val.device)
            return self.empty[key]
        if isinstance(layout, tuple):
            return type(val)(self._shard_of(v, one) for v, one in zip(val, layout, strict=True))
        return val


def _separate_partial_parameters(
    graph: Graph, captured: Captured, sharding: Sharding, rank: int, also: Collection[str]
) -> tuple[str, ...]:
    """Return the replicated parameters that sharded work reads, and those of ``also``: their gradients are partial.

    Replicated work that reads such a parameter too is made to read it through ``local.grad_on_rank_0``.
    """
    partial = []
    for node in list(graph.nodes):
        if (
            node.op != "get_attr"
            or node.target not in captured.trainable
            or sharding.tensors[node.target].dim is not None
        ):
            continue
        users = list(node.users)
        sharded_users = [user for user in users if user.meta.get("sharded")]
        replicated_users = [user for user in users if not user.meta.get("sharded")]
        if not sharded_users and node.target not in also:
            continue
        partial.append(str(node.target))
        # One node per unit, so that none crosses between units.
        for unit in dict.fromkeys(user.meta["unit"] for user in replicated_users):
            with graph.inserting_after(node):
                owned = graph.call_function(local.grad_on_rank_0, (node, rank))
            owned.meta = dict(node.meta) | {"unit": unit, "sharded": False}
            for user in replicated_users:
                if user.meta["unit"] == unit:
                    user.replace_input_with(node, owned)
    return tuple(partial)
