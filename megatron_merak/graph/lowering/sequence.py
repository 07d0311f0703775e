"""Sequence parallelism: replicated work is sharded along the sequence, as in Megatron-LM.

Between two sharded regions a tensor-parallel graph has replicated values: norms, dropout,
residuals. An all-reduced value is reduce-scattered along its sequence instead, what follows is
computed on parts, and sharded work that reads it gets it all-gathered. So one all-reduce becomes
two collectives that send half as much each:

    before:   product -- reduce_sum ------ add -- norm -- copy_in --------------- product
    after:    product -- reduce_scatter -- add -- norm -- all_gather -- copy_in -- product

An operator computes on parts if its sharding rule allows a value that is sharded along that
dimension. One that has no such rule computes with full values on every rank, which are gathered for
it. So nothing depends on what the dimension means: whatever is sharded is computed as before.
"""

from collections.abc import Container, Iterator, Mapping
from math import prod

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from ...errors import PlanError
from ...segment import LayerAxis
from ..capture.captured import Captured
from ..ir.aliases import changing
from ..ir.kinds import NodeKind, is_mark_over, kind
from ..ir.marks import MARKS, reduce_scatter, reduce_sum
from ..ir.nodes import is_random, op_name, operand, values
from ..sharding.assumptions import Assumptions
from ..sharding.known import Known
from ..sharding.placement import CannotShard, Decision, Layout, ShardSpec
from ..sharding.rules import RULES, STARTERS
from ..sharding.rules_local import LOCAL_RULES
from .collectives import hoist_copies
from .experts import ExpertRanks, divide_experts
from .routed import Routed, RoutedKind
from .sequence_writer import SequenceWriter, parts_of


def shard_sequences(
    graph: Graph,
    captured: Captured,
    rank: int,
    tp: int,
    mode: FakeTensorMode,
    routed: Mapping[Node, Routed],
    divided: Container[str] = (),
    room: float | None = None,
) -> None:
    """Shard replicated work of one rank's graph along the sequence, where there is any.

    mode:    of the fake values in the graph.
    routed:  routed experts, by their sort.
    divided: names of the weights of which a rank has those of its experts, among others.
    room:    see ``Sharding``.
    """
    parts = _parts(graph, captured, tp, routed)
    if parts is not None:
        SequenceWriter(
            graph,
            parts.layouts,
            parts.decisions,
            parts.starts,
            axis=LayerAxis.TP,
            parameters=captured.shapes,
            rank=rank,
            tp=tp,
            mode=mode,
        ).run()
    divide_experts(graph, routed, divided, ExpertRanks(rank, tp, room=room), mode)
    if parts is not None:
        finish_parts(graph, LayerAxis.TP, parts.decisions)


def finish_parts(graph: Graph, axis: LayerAxis, decided: Container[Node]) -> None:
    """Move marks, and work on parameters alone, to where they cost least.

    axis:    of the ranks that have parts.
    decided: nodes that compute on parts because an operand is one.
    """
    graph.eliminate_dead_code()
    hoist_copies(graph, axis)
    _move_parameter_work(graph, axis, decided)


def check_sequences(graph: Graph, tp: int) -> None:
    """Raise PlanError if nothing of a graph is sharded along a sequence."""
    if any(is_mark_over(node, reduce_scatter, LayerAxis.TP) for node in graph.nodes):
        return
    lengths = [layout.blocks[0] for layout in _candidates(graph).values()]
    odd = next((length for length in lengths if length % tp), None)
    if odd is None:
        reason = "this model computes nothing between its sharded layers that can be sharded"
        remedy = "Leave it out"
    else:
        reason = (
            f"sequences of {odd} positions cannot be shared evenly by {tp} tensor-parallel ranks"
        )
        remedy = f"Pad them to a multiple of {tp}, or leave it out"
    raise PlanError("--sequence-parallel", True, reason, remedy)


class OnParts(Known):
    """What computes on parts of sequences, by the rules of sharding.

    axis:   of the ranks that have parts.
    starts: the all-reduced values that are reduce-scattered, and how they are then sharded.
    routed: routed experts, by their sort.
    """

    def __init__(
        self,
        graph: Graph,
        captured: Captured,
        axis: LayerAxis,
        tp: int,
        starts: Mapping[Node, Layout],
        routed: Mapping[Node, Routed],
    ):
        super().__init__(captured, tp, RULES, STARTERS, assumptions=Assumptions())
        self.refuse_costly = False
        self.axis = axis
        self.starts = starts
        self._add_tables()
        changed = changing(graph)
        for node in graph.nodes:
            if node not in self.layouts:  # of several, the first may have decided
                self.layouts[node] = starts.get(node)
            if node.op != "call_function":
                continue
            if node.meta["unit"] is None:
                self.common[node] = None
            elif not kind(node, axis) and node not in changed and node not in starts:
                if node in self.decisions or node in routed and self._route(routed[node]):
                    continue
                self._visit(node)

    def shard_parameter(self, node: Node, spec: ShardSpec, why: str) -> bool:
        """Parameters stay as they are: a rank takes its part of their values."""
        return False

    def is_small(self, node: Node) -> bool:
        return False

    def _by_rule(self, node: Node) -> Decision | None:
        """Marks and functions of a rank's program have rules of their own."""
        rule = LOCAL_RULES.get(node.target)
        if rule is not None and self.sharded(node.all_input_nodes):
            return rule(self, node)
        return super()._by_rule(node)

    def _add_tables(self) -> None:
        """Make what else a walk knows, before it begins."""

    def _route(self, routed: Routed) -> bool:
        """Let routed experts compute with a rank's own rows, if it has them."""
        if any(kind(node, self.axis) for node in routed.roles):
            return False
        layout = self.layout(operand(routed.sort))
        if layout is None:
            return False
        for x, rows_per_entry in routed.reads.items():
            own = self.layouts.get(x)
            blocks = tuple(block // rows_per_entry for block in layout.blocks)
            if not isinstance(own, Layout) or own.dim or own.blocks != blocks:
                return False
        for node in (routed.sort, *routed.roles):
            own_counts = routed.roles.get(node) is RoutedKind.COUNTS
            kept = tuple(
                Layout(0, (value.shape[0],) * self.tp) if own_counts else layout
                for value in values(node)
            )
            result = kept[0] if isinstance(node.meta["val"], Tensor) else kept
            self._settle(node, result, Decision(result))
        return True

    def _visit(self, node: Node) -> None:
        """Decide about a replicated node; it stays so where it cannot compute on parts."""
        if all(self.layouts[x] is None for x in node.all_input_nodes):
            return
        if is_random(node) and op_name(node) != "dropout":
            return
        start = self.history.mark()
        try:
            self.decide(node)
        except CannotShard:
            self.history.undo(start)
            return
        decision = self.decisions.get(node)
        if decision and (decision.write or decision.fills or not self.shares_evenly(node)):
            self.history.undo(start)

    def shares_evenly(self, node: Node) -> bool:
        """Whether all parts of the results of a node are of one length."""
        layout = self.layouts[node]
        layouts = layout if isinstance(layout, tuple) else (layout,)
        for value, each in zip(values(node), layouts, strict=True):
            if each is None:
                continue
            parts = parts_of(value.shape, each)
            if parts is None or parts.length % self.tp:
                return False
        return True


def _parts(
    graph: Graph, captured: Captured, tp: int, routed: Mapping[Node, Routed]
) -> OnParts | None:
    """Return what computes on parts of the values that replicated work reads; None without any."""
    candidates = _candidates(graph)
    starts = {node: layout for node, layout in candidates.items() if layout.blocks[0] % tp == 0}
    while starts:
        found = OnParts(graph, captured, LayerAxis.TP, tp, starts=starts, routed=routed)
        read = [node for node in starts if any(user in found.decisions for user in node.users)]
        if len(read) == len(starts):
            return found
        starts = {node: starts[node] for node in read}
    return None


def _candidates(graph: Graph) -> dict[Node, Layout]:
    """Return the all-reduced values that have a sequence and features, and the layout of its parts.

    The sequence is their second dimension, or the first of two is batch x sequence.
    """
    samples = samples_of(graph)
    changed = changing(graph)
    found = {}
    for node in graph.find_nodes(op="call_function", target=reduce_sum):
        if not is_mark_over(node, reduce_sum, LayerAxis.TP):
            continue
        shape = tuple(node.meta["val"].shape)
        if not node.meta["grad"] or node.meta["unit"] is None or node in changed:
            continue
        if len(shape) > 2:
            layout = Layout(1, (shape[1],))
        elif len(shape) == 2 and shape[0] > samples and shape[0] % samples == 0:
            layout = Layout(0, (shape[0] // samples,) * samples)
        elif len(shape) == 2:
            layout = Layout(0, (shape[0],))
        else:
            continue
        if prod(shape[layout.dim + 1 :]) > 1:
            found[node] = layout
    return found


def samples_of(graph: Graph) -> int:
    """Return the number of samples of the batch: the first extent of its first tensor."""
    shapes: Iterator[tuple[int, ...]] = (
        tuple(value.shape) for node in graph.find_nodes(op="placeholder") for value in values(node)
    )
    return next((shape[0] for shape in shapes if len(shape) > 1), 1)


def _move_parameter_work(graph: Graph, axis: LayerAxis, decided: Container[Node]) -> None:
    """Let what is computed from parameters, for work on parts alone, belong to that work."""
    free: dict[Node, bool] = {}
    for node in graph.nodes:
        free[node] = node.op != "call_function" or node.meta["unit"] is None
        if node in decided or free[node] or not kind(node, axis):
            continue
        if node.target not in MARKS:
            free[node] = all(free[x] for x in node.all_input_nodes)
    for node in reversed(list(graph.nodes)):
        if free[node] and node.op == "call_function" and kind(node, axis) and node.users:
            on_parts = all(_on_parts(user, axis) for user in node.users)
            node.meta[axis] = NodeKind.PARTS if on_parts else NodeKind.SHARDS


def _on_parts(node: Node, axis: LayerAxis) -> bool:
    return kind(node, axis) is NodeKind.PARTS and node.target not in MARKS
