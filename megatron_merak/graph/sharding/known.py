"""What a walk over a graph knows so far, and what rules ask of it and find out."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod

from torch.fx import Node
from torch.fx.node import map_arg

from ..capture.captured import Captured
from ..ir.nodes import constant, op_name, operand, values
from .assumptions import Assumptions
from .derived import chain_to_parameter, unread_functions
from .history import Table, UndoLog
from .placement import CannotShard, Decision, Layout, NeedsBlocks, NodeLayout, ShardSpec

# a value of at most 1/4 of its weight's output is all-gathered rather than banning the weight
GATHER_SHARE = 4
VOCABULARY_ROWS = 64  # tables with fewer rows are not worth an all-reduce

ALIKE = "sharded like the value that it is combined with"

Rule = Callable[["Known", Node], Decision | None]


class Known:
    """What a walk knows: layouts and decisions of the nodes that it has seen. Rules read it, and
    may shard a parameter.

    rules, starters: by operator, see rules.py.

    history:            of all tables here, to undo what an attempt changed.
    layouts:            by node.
    decisions:          by node; one without a decision is computed as captured, by every rank.
    sharded_parameters: name -> layout.
    reasons:            sharded parameter -> why it is sharded so.
    replicated:         name -> why a parameter is not sharded although nothing banned it.
    output_features:    column-parallel weight -> number of its output features.
    output_sizes:       column-parallel weight -> number of elements of its output.
    common:             nodes that do not depend on a parameter.
    sharded_on_demand:  values for which a rule sharded a parameter.
    gathered:           operands that are all-gathered for the node that is decided about.
    refuse_costly:      whether rules refuse to shard that node where this costs more than it saves.
    """

    def __init__(
        self,
        captured: Captured,
        tp: int,
        rules: Mapping[str, Rule],
        starters: Mapping[str, Rule],
        assumptions: Assumptions,
        vocabulary_multiple: int = 1,
    ):
        self.captured = captured
        self.tp = tp
        self.rules = rules
        self.starters = starters
        self.assumptions = assumptions
        self.vocabulary_multiple = vocabulary_multiple
        graph = captured.module.graph
        self.parameter_names = {
            node: str(node.target)
            for node in graph.nodes
            if node.op == "get_attr" and node.target in captured.shapes
        }
        self.vocabularies = _vocabularies(captured)
        self.history = UndoLog()
        self.layouts: Table[Node, NodeLayout] = Table(self.history)
        self.decisions: Table[Node, Decision] = Table(self.history)
        self.sharded_parameters: Table[str, Layout] = Table(self.history)
        self.reasons: Table[str, str] = Table(self.history)
        self.replicated: Table[str, str] = Table(self.history)
        self.output_features: Table[str, int] = Table(self.history)
        self.output_sizes: Table[str, int] = Table(self.history)
        self.common: Table[Node, None] = Table(self.history)
        self.sharded_on_demand: Table[Node, None] = Table(self.history)
        self.gathered: Mapping[Node, None] = {}
        self.refuse_costly = True
        for name, spec in assumptions.pins.items():
            if spec is not None:
                self.sharded_parameters[name] = Layout(spec.dim, spec.blocks, (name,), spec.padded)

    def shape(self, node: Node) -> tuple[int, ...]:
        """Return the full shape of a node's (first) tensor."""
        return tuple(values(node)[0].shape)

    def layout(self, node: object) -> Layout | None:
        """Return how an operand is sharded; None if it is replicated, or all-gathered for the
        current node.
        """
        if not isinstance(node, Node) or node in self.gathered:
            return None
        layout = self.layouts[node]
        if isinstance(layout, tuple):
            raise CannotShard(node, (node,), "returns several sharded values at once")
        return layout

    def sharded_layout(self, node: Node) -> Layout:
        """Return how an operand is sharded which is known to be."""
        layout = self.layout(node)
        assert layout is not None
        return layout

    def input_layout(self, node: Node) -> Layout:
        """Return how a node's first operand is sharded. Raises CannotShard if another operand is
        sharded instead.
        """
        layout = self.layout(node.args[0])
        if layout is None:
            raise self.cannot_shard(node, "takes a sharded operand besides its first")
        return layout

    def sharded(self, nodes: Sequence[Node]) -> list[Node]:
        return [x for x in nodes if self.layout(x) is not None]

    def cannot_shard(self, node: Node, why: str, culprits: Sequence[Node] = ()) -> CannotShard:
        """Return the error to raise if a node cannot work on shards of ``culprits``, by default of
        any operand.
        """
        operands = dict.fromkeys(
            x for x in culprits or node.all_input_nodes if x not in self.gathered
        )
        return CannotShard(node, tuple(x for x in operands if self.layouts[x] is not None), why)

    def origins(self, nodes: Sequence[Node]) -> tuple[str, ...]:
        """Return the names of the parameters whose sharding led to that of the operands, each once,
        in order.
        """
        return tuple(
            dict.fromkeys(o for x in nodes if (layout := self.layout(x)) for o in layout.origins)
        )

    def padded_extent(self, extent: int) -> int | None:
        """Return the extent to pad a dimension to: 0 if it needs no padding, None if it cannot be
        sharded, since only vocabularies are padded."""
        step = self.tp * (self.vocabulary_multiple if extent in self.vocabularies else 1)
        if extent % step == 0:
            return 0
        return -(-extent // step) * step if extent >= VOCABULARY_ROWS else None

    def shard_operand(
        self, to_shard: dict[Node, ShardSpec], node: Node, spec: ShardSpec, why: str = ALIKE
    ) -> None:
        """Shard a replicated operand: a parameter itself, with ``why`` as its reason, else by an
        entry in ``to_shard``.

        to_shard: that of the decision which the rule is making.
        """
        if not self.shard_parameter(node, spec, why):
            to_shard[node] = spec

    def is_small(self, node: Node) -> bool:
        """Whether a sharded value is small compared with the outputs of its origins."""
        layout = self.layouts[node]
        assert layout is not None
        if isinstance(layout, tuple) or layout.padded or node in self.parameter_names:
            return False
        if not values(node)[0].is_floating_point():
            return False
        smallest = min((self.output_sizes.get(origin, 0) for origin in layout.origins), default=0)
        return prod(self.shape(node)) * GATHER_SHARE <= smallest

    def parameter_of(self, node: Node) -> str | None:
        """Return the name of the parameter that a value is, or is computed from and from nothing
        else.
        """
        chain = chain_to_parameter(node, self.parameter_names, self.layouts)
        return self.parameter_names[chain[-1]] if chain else None

    def record_column(self, name: str, extent: int, node: Node) -> None:
        """Record that ``node`` computes with a weight that is sharded by its ``extent`` output
        features.
        """
        self.output_features[name] = extent
        self.output_sizes[name] = prod(self.shape(node))

    def explain_pin(self, node: Node, why: str) -> None:
        """Record how the pinned parameter that ``node`` is, or is computed from, is sharded; its
        first use counts.
        """
        name = self.parameter_of(node)
        if name is not None and name in self.assumptions.pins and name not in self.reasons:
            self.reasons[name] = why

    def row_requested(self, node: Node) -> bool:
        """Whether the user asked for this weight to be sharded by its input features."""
        return bool(self.assumptions.row) and self.parameter_of(node) in self.assumptions.row

    def note_replicated(self, name: str, why: str) -> None:
        """Record why a weight stays replicated; its first use counts."""
        if name not in self.replicated:
            self.replicated[name] = why

    def shard_parameter(self, node: Node, spec: ShardSpec, why: str) -> bool:
        """Shard the parameter that ``node`` is, or is a function of, such that ``node`` is sharded
        by ``spec``.

        Returns False, with nothing changed, if there is no such parameter, it is banned, or it is
        read replicated elsewhere.
        """
        chain = chain_to_parameter(node, self.parameter_names, self.layouts)
        name = self.parameter_names.get(chain[-1]) if chain else None
        if name is None or self.assumptions.ban_reason(name) or name in self.sharded_parameters:
            return False
        functions = unread_functions(chain[-1], self.layouts)
        if functions is None or node is not chain[-1] and node not in functions:
            return False
        shape = self.captured.shapes[name]
        full = sum(spec.blocks)
        for dim in [spec.dim] if node is chain[-1] else range(len(shape)):
            if shape[dim] != full:
                continue
            start = self.history.mark()
            layout = Layout(dim, spec.blocks, (name,), spec.padded)
            self.sharded_parameters[name] = layout
            self.layouts[chain[-1]] = layout
            if (
                self._decide_again(functions)
                and (result := self.layout(node))
                and result.spec() == spec
            ):
                self.reasons[name] = why
                self.sharded_on_demand[node] = None
                return True
            self.history.undo(start)
        return False

    def _decide_again(self, functions: list[Node]) -> bool:
        """Decide again about functions of a parameter that is sharded now; False if one of them
        cannot shard.
        """
        try:
            for node in functions:
                self.decide(node)
        except CannotShard:
            return False
        return True

    def needs_blocks(self, node: Node, layout: Layout, edges: Sequence[int]) -> CannotShard:
        """Return the error to raise if a node cuts the sharded dimension at ``edges``.

        It names the blocks that the origins of ``layout`` need so that they end there too, unless
        they have these blocks already, or the ranks cannot share them evenly.
        """
        blocks_needed = {}
        if any(origin in self.assumptions.pins for origin in layout.origins):
            return self.cannot_shard(
                node, "takes other pieces of the sharded dimension than its blocks"
            )
        for origin in layout.origins:
            extent = self.output_features.get(origin, 0)
            key = (self.assumptions.role(origin), extent)
            blocks = self.assumptions.blocks.get(key, (extent,))
            first, per_entry = layout.features or (0, 0)
            block_ends = {sum(blocks[:k]) for k in range(len(blocks) + 1)}
            ends = sorted(block_ends | {first + per_entry * edge for edge in edges})
            new = tuple(b - a for a, b in zip(ends, ends[1:], strict=False))
            if (
                not extent
                or not layout.features
                or new == blocks
                or any(block % self.tp for block in new)
            ):
                return self.cannot_shard(
                    node, "takes pieces of the sharded dimension that ranks cannot share evenly"
                )
            blocks_needed[key] = new
        if not blocks_needed:
            return self.cannot_shard(node, "takes pieces of the sharded dimension")
        return NeedsBlocks(node, blocks_needed)

    def decide(self, node: Node) -> None:
        """Decide about a node by its rule. Raises CannotShard if it cannot work on the shards of
        its operands.
        """
        inputs = node.all_input_nodes
        if node.target is operator.getitem and isinstance(
            layouts := self.layouts[inputs[0]], tuple
        ):
            layout = layouts[constant(node, 1)]
            self._settle(node, layout, Decision(layout) if layout else None)
            return
        before = [self.layouts[x] for x in inputs]
        decision = self._by_rule(node)
        for x, layout_before in zip(inputs, before, strict=True):
            changed = self.layouts[x] is not layout_before
            if changed and (x not in self.sharded_on_demand or _occurrences(node, x) > 1):
                raise self.cannot_shard(node, "reads one weight in two ways", (x,))
        if decision is None and self._has_shards(inputs, before):
            raise self.cannot_shard(node, "needs replicated operands")
        if decision is None and not self.gathered:
            self._settle(node, None, None)
            return
        decision = decision or Decision(None)
        if decision.common:
            self.common[node] = None
        if self.gathered:
            decision = replace(decision, gathered=tuple(self.gathered))
        self._settle(node, decision.layout, decision)

    def _by_rule(self, node: Node) -> Decision | None:
        inputs = node.all_input_nodes
        name = op_name(node)
        starter = self.starters.get(name)
        if starter is not None:
            return starter(self, node)
        if not self._has_shards(inputs, [self.layouts[x] for x in inputs]):
            return None
        overload = f"{name}.{getattr(node.target, '_overloadname', '')}"
        rule = self.rules.get(overload) or self.rules.get(name)
        if rule is None:
            raise self.cannot_shard(node, "has no rule for a sharded value")
        return rule(self, node)

    def _has_shards(self, inputs: Sequence[Node], layouts: Sequence[NodeLayout]) -> bool:
        """Whether an operand with one of these layouts is sharded and not all-gathered."""
        return any(
            layout is not None and x not in self.gathered
            for x, layout in zip(inputs, layouts, strict=True)
        )

    def _settle(self, node: Node, layout: NodeLayout, decision: Decision | None) -> None:
        self.layouts[node] = layout
        if decision is not None:
            self.decisions[node] = decision
        elif node in self.decisions:
            del self.decisions[node]


def _vocabularies(captured: Captured) -> dict[int, None]:
    """Return the extents that are vocabulary sizes: numbers of rows of embedding tables."""
    shapes = captured.shapes
    lookups = [node for node in captured.module.graph.nodes if op_name(node) == "embedding"]
    tables = [str(operand(node).target) for node in lookups]
    rows = [shapes[name][0] for name in tables if name in shapes]
    return dict.fromkeys(extent for extent in rows if extent >= VOCABULARY_ROWS)


def _occurrences(node: Node, x: Node) -> int:
    """Return how often ``x`` is among the arguments of ``node``."""
    arguments: list[Node] = []
    map_arg((node.args, node.kwargs), arguments.append)
    return arguments.count(x)
