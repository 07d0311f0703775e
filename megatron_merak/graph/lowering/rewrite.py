"""The captured graph as one tensor-parallel rank computes it: local shapes, and marks where collectives belong."""

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
from .collectives import move

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Rewritten:
    """One rank's graph.

    Every node but the output has ``meta["val"]`` (fake or real, of the local shape), ``meta["unit"]`` (its index in the
    chain; None for what is common to all, parameters and constants), ``meta["sharded"]`` (its value is a part, a
    partial sum, or on its way into such work: its randomness, and the gradients that it gives, differ per rank) and
    ``meta["grad"]`` (a gradient may flow to it).
    ``constants``: what get_attr nodes that are no parameters read. ``outputs``: replicated values named ``names``.
    ``partial``: parameters that every rank holds but whose gradient must be summed over the ranks. ``trainable``:
    parameters that take a gradient.
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
    """Apply the decisions of ``sharding`` for one rank. The captured graph stays as it is.

    ``partial``: parameters, whole on every rank, whose gradient shall be one to sum over the ranks even if it need not.
    """
    assert sharding.tp == tp and 0 <= tp_rank < tp
    writer = Writer(captured, chain, sharding, tp_rank)
    outputs = writer.run()
    move(writer.graph, tp)
    summed = _settle_parameters(writer.graph, captured, sharding, tp_rank, partial) if tp > 1 else ()
    writer.graph.eliminate_dead_code()
    constants = {
        str(node.target): _attribute(captured, str(node.target))
        for node in writer.graph.nodes
        if node.op == "get_attr" and node.target not in captured.shapes
    }
    return Rewritten(writer.graph, constants, outputs, captured.outputs, summed, captured.trainable)


def _attribute(captured: Captured, path: str) -> Any:
    value: Any = captured.module
    for name in path.split("."):
        value = getattr(value, name)
    return value


class Writer:
    """Writes the graph of one rank, node by node; what ``Decision.write`` functions build with."""

    def __init__(self, captured: Captured, chain: Chain, sharding: Sharding, rank: int):
        self.captured, self.chain, self.sharding = captured, chain, sharding
        self.rank, self.tp = rank, sharding.tp
        self.graph = Graph()
        self.new: dict[Node, Node] = {}
        self.made: dict[Any, Node] = {}  # what sharded work takes of whole values, once each
        self.units = {node: index for index, unit in enumerate(chain.units) for node in unit}
        self.empty: dict[Any, Tensor] = {}
        self.mode = next((v.fake_mode for n in captured.module.graph.nodes for v in values(n) if _fake(v)), None)
        self.mode = self.mode or FakeTensorMode(allow_non_fake_inputs=True)
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
        made = self._copy(node, self.operand, decision.layout, decision)
        if not decision.reduce:
            return made
        if decision.scale != 1:
            made = self.call(aten.mul.Tensor, (made, decision.scale), like=node)
        return self.sum(made)

    def _copy(self, node: Node, operand: Callable[[Node], Node], layout: Any, decision: Decision | None = None) -> Node:
        """The node with operands replaced, its value's shape that of a part."""
        args = node.args if decision is None or decision.args is None else decision.args
        made = self.graph.create_node(
            node.op,
            node.target if decision is None or decision.target is None else decision.target,
            map_arg(args, operand),
            {} if decision is not None and decision.target is not None else map_arg(node.kwargs, operand),
            name=node.name,
        )
        made.meta = dict(node.meta)
        sharded = layout is not None and (not isinstance(layout, tuple) or any(layout))
        self._note(made, sharded or bool(decision and decision.reduce))
        if sharded:
            made.meta["val"] = self._part(node.meta["val"], layout)
        return made

    # ---- what decisions build with --------------------------------------------------------------------------------
    def get(self, node: Node) -> Node:
        """A value as it is."""
        return self.new[node]

    def operand(self, node: Node) -> Node:
        """A value as sharded work takes it: the part that the rank has or needs, or all of it."""
        assert self.decision is not None
        split = self.sharding.layouts.get(node)
        if split is not None and node not in self.decision.gathered:
            return self._fill(node, self.new[node], split.spec()) if node in self.decision.fills else self.new[node]
        whole = self._gather(node) if node in self.decision.gathered else self.new[node]
        cut = self.decision.to_shard.get(node)
        if cut is None:
            return self.enter(whole)
        part = self._take(whole, cut)
        return self._fill(node, part, cut) if node in self.decision.fills else part

    def call(
        self,
        target: Any,
        args: tuple[Any, ...],
        like: Node | None = None,
        sharded: bool = True,
        kwargs: dict[str, Any] | None = None,
    ) -> Node:
        """A new node; its value is like that of a captured node, or found by calling ``target`` on fake values."""
        made = self.graph.call_function(target, args, kwargs)
        if like is None:
            with torch.no_grad(), self.mode:
                fakes = map_arg(args, lambda x: x.meta["val"])
                val = target(*fakes)
        else:
            val = like.meta["val"]
            made.meta = {
                k: v for k, v in like.meta.items() if k in ("nn_module_stack", "stack_trace", "source_fn_stack")
            }
        made.meta["val"] = val
        self._note(made, sharded)
        return made

    def _note(self, made: Node, sharded: bool) -> None:
        """What a node is, in its meta."""
        if made.op == "get_attr":
            grad = made.target in self.captured.trainable
        else:
            grad = passes_gradient(made) and any(x.meta["grad"] for x in made.all_input_nodes)
        made.meta.update(unit=self.unit, sharded=sharded, grad=grad)

    def sum(self, node: Node) -> Node:
        """A partial sum, added up over the ranks."""
        return self._mark(reduce_sum, node, False)

    def stack(self, node: Node) -> Node:
        """All ranks' values of a node, [tp, ...]."""
        made = self._mark(stack, node, False)
        with self.mode:
            made.meta["val"] = node.meta["val"].new_empty(self.tp, *node.meta["val"].shape)
        return made

    def _mark(self, mark: Callable[[Tensor], Tensor], node: Node, sharded: bool) -> Node:
        made = self.graph.call_function(mark, (node,))
        made.meta["val"] = node.meta["val"]
        self._note(made, sharded)
        return made

    def enter(self, whole: Node) -> Node:
        """A whole value enters sharded work. A parameter does so without a mark: see ``Rewritten.partial``."""
        if whole.op != "call_function" or not whole.meta["grad"]:
            return whole
        key = ("enter", whole)
        if key not in self.made:
            self.made[key] = self._mark(copy_in, whole, True)
        return self.made[key]

    def _take(self, whole: Node, cut: ShardSpec) -> Node:
        key = ("take", whole, cut)
        if key in self.made:
            return self.made[key]
        x = self.enter(whole)
        if cut.repeats > 1:
            target, args = local.take_heads, (x, cut.dim, sum(cut.blocks), cut.repeats, self.rank, self.tp)
        else:
            target, args = local.take, (x, cut.dim, cut.blocks, self.rank, self.tp, cut.padded)
        self.made[key] = self.call(target, args)
        if whole.meta["unit"] is None and str(whole.target) not in self.captured.shapes:
            self.made[key].meta["unit"] = None
        return self.made[key]

    def _fill(self, node: Node, part: Node, cut: ShardSpec) -> Node:
        """A part whose padding the decision replaces, one for all that read it in a unit."""
        filler = self.decision.fills[node]
        key = ("fill", part, filler, self.unit)
        if key not in self.made:
            share = cut.padded // self.tp
            held = min(max(sum(cut.blocks) - self.rank * share, 0), share)
            self.made[key] = self.call(local.fill, (part, cut.dim, held, filler))
        return self.made[key]

    def _gather(self, node: Node) -> Node:
        """All of a divided value, on every rank."""
        key = ("gather", node)
        if key not in self.made:
            split = self.sharding.layouts[node]
            args = (self.new[node], split.dim, split.blocks, self.rank, self.tp)
            self.made[key] = self.sum(self.call(local.embed_in_zeros, args, like=node))
        return self.made[key]

    def _part(self, val: Any, layout: Any) -> Any:
        if isinstance(layout, Layout):
            shape = tuple(layout.extent(self.tp) if d == layout.dim else n for d, n in enumerate(val.shape))
            key = (shape, val.dtype, val.device)
            if key not in self.empty:
                with self.mode:
                    self.empty[key] = torch.empty(shape, dtype=val.dtype, device=val.device)
            return self.empty[key]
        if isinstance(layout, tuple):
            return type(val)(self._part(v, one) for v, one in zip(val, layout, strict=True))
        return val


def _fake(value: Tensor) -> bool:
    return isinstance(value, FakeTensor)


def _settle_parameters(
    graph: Graph, captured: Captured, sharding: Sharding, rank: int, also: Collection[str]
) -> tuple[str, ...]:
    """The parameters that every rank holds and sharded work reads: their gradients are partial; those of ``also`` too.

    Where replicated work reads such a parameter too, it does so through ``grad_on_rank_0``.
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
        inside = [user for user in users if user.meta.get("sharded")]
        outside = [user for user in users if not user.meta.get("sharded")]
        if not inside and node.target not in also:
            continue
        partial.append(str(node.target))
        for unit in dict.fromkeys(user.meta["unit"] for user in outside):  # one each: none crosses from unit to unit
            with graph.inserting_after(node):
                owned = graph.call_function(local.grad_on_rank_0, (node, rank))
            owned.meta = dict(node.meta) | {"unit": unit, "sharded": False}
            for user in outside:
                if user.meta["unit"] == unit:
                    user.replace_input_with(node, owned)
    return tuple(partial)
