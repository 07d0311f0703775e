"""Sharding propagation: one walk over the graph decides, by a rule per operator, which parameters are sharded and how.

A linear layer whose input is replicated shards its output features (column parallel). The operators that follow work on
shards as long as their rules allow. A linear layer whose input features are sharded shards its weight likewise and ends
in an all-reduce (row parallel).

An operator that cannot take a sharded value bans the sharding of the parameters that led to it; one that takes pieces
of the sharded dimension asks for blocks. In both cases the walk starts again. Bans and blocks hold for all layers
(roles.py), so that a few walks suffice.

Parameters that a plan has decided about ("pins") are sharded, or replicated, from the start. An operator that cannot
take shards of these gets all-gathered operands.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod

from torch.fx import Node
from torch.fx.node import map_arg

from ..capture.captured import Captured
from ..ir.aliases import changing
from ..ir.names import place
from ..ir.nodes import constant, op_name, operand, values
from .assumptions import Assumptions
from .derived import chain_to_parameter, unread_functions
from .placement import CannotShard, Decision, Layout, NodeLayout, PlanConflict, Restart, ShardSpec

GATHER_SHARE = 4  # a value of at most 1/4 of its weight's output is all-gathered rather than banning the weight
VOCABULARY_ROWS = 64  # tables with fewer rows are not worth an all-reduce

ALIKE = "sharded like the value that it is combined with"

Rule = Callable[["Propagation", Node], Decision | None]


class Propagation:
    """One walk over a captured graph. rules, starters: by operator, see rules.py.

    layouts:            by node.
    decisions:          by node; one without a decision is computed as captured, by every rank.
    sharded_parameters: name -> layout.
    reasons:            sharded parameter -> why it is sharded so.
    common:             nodes that do not depend on a parameter.
    refuse_costly:      whether rules refuse to shard the current node where that costs more than it saves.
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
        self.assumptions = assumptions
        self.vocabulary_multiple = vocabulary_multiple
        self.rules = rules
        self.starters = starters
        self.layouts: dict[Node, NodeLayout] = {}
        self.decisions: dict[Node, Decision] = {}
        self.parameter_names: dict[Node, str] = {}
        self.sharded_parameters: dict[str, Layout] = {
            name: Layout(spec.dim, spec.blocks, (name,), spec.padded) for name, spec in assumptions.pins.items() if spec
        }
        self.reasons: dict[str, str] = {}
        self.output_features: dict[str, int] = {}  # column-parallel weight -> number of its output features
        self.output_sizes: dict[str, int] = {}  # column-parallel weight -> number of elements of its output
        self.common: dict[Node, None] = {}
        self.gathered: dict[Node, None] = {}  # operands that are all-gathered for the current node
        self.sharded_on_demand: dict[Node, None] = {}  # values for which a rule sharded a parameter
        self.refuse_costly = True

    def run(self) -> "Propagation":
        graph = self.captured.module.graph
        self.vocabularies = self._vocabularies()
        for node in graph.nodes:
            if node.op == "get_attr" and node.target in self.captured.shapes:
                self.parameter_names[node] = str(node.target)
            elif all(x in self.common for x in node.all_input_nodes):
                self.common[node] = None
            if node.op == "output":
                self._output(node)
            elif node.op == "call_function":
                self.visit(node)
            else:
                name = self.parameter_names.get(node)
                self.layouts[node] = None if name is None else self.sharded_parameters.get(name)
        return self

    def _vocabularies(self) -> dict[int, None]:
        """Return the extents that are vocabulary sizes: numbers of rows of embedding tables."""
        shapes = self.captured.shapes
        lookups = [node for node in self.captured.module.graph.nodes if op_name(node) == "embedding"]
        tables = [str(operand(node).target) for node in lookups]
        rows = [shapes[name][0] for name in tables if name in shapes]
        return dict.fromkeys(extent for extent in rows if extent >= VOCABULARY_ROWS)

    # ---- for rules ------------------------------------------------------------------------------------------------
    def shape(self, node: Node) -> tuple[int, ...]:
        """Return the full shape of a node's (first) tensor."""
        return tuple(values(node)[0].shape)

    def layout(self, node: object) -> Layout | None:
        """Return how an operand is sharded; None if it is replicated, or all-gathered for the current node."""
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
        """Return how a node's first operand is sharded. Raises CannotShard if another operand is sharded instead."""
        layout = self.layout(node.args[0])
        if layout is None:
            raise self.cannot_shard(node, "takes a sharded operand besides its first")
        return layout

    def sharded(self, nodes: Sequence[Node]) -> list[Node]:
        return [x for x in nodes if self.layout(x) is not None]

    def cannot_shard(self, node: Node, why: str, culprits: Sequence[Node] = ()) -> CannotShard:
        """Return the error to raise if a node cannot work on shards of ``culprits``, by default of any operand."""
        operands = dict.fromkeys(x for x in culprits or node.all_input_nodes if x not in self.gathered)
        return CannotShard(node, tuple(x for x in operands if self.layouts[x] is not None), why)

    def origins(self, nodes: Sequence[Node]) -> tuple[str, ...]:
        """Return the names of the parameters whose sharding led to that of the operands, each once, in order."""
        return tuple(dict.fromkeys(o for x in nodes if (layout := self.layout(x)) for o in layout.origins))

    def padded_extent(self, extent: int) -> int | None:
        """Return the extent to pad a dimension to: 0 if it needs no padding, None if it cannot be sharded, since only
        vocabularies are padded."""
        step = self.tp * (self.vocabulary_multiple if extent in self.vocabularies else 1)
        if extent % step == 0:
            return 0
        return -(-extent // step) * step if extent >= VOCABULARY_ROWS else None

    def shard_operand(self, to_shard: dict[Node, ShardSpec], node: Node, spec: ShardSpec, why: str = ALIKE) -> None:
        """Shard a replicated operand: a parameter itself, with ``why`` as its reason, else by an entry in ``to_shard``.

        to_shard: that of the decision which the rule is making.
        """
        if not self.shard_parameter(node, spec, why):
            to_shard[node] = spec

    def parameter_of(self, node: Node) -> str | None:
        """Return the name of the parameter that a value is, or is computed from and from nothing else."""
        chain = chain_to_parameter(node, self.parameter_names, self.layouts)
        return self.parameter_names[chain[-1]] if chain else None

    def record_column(self, name: str, extent: int, node: Node) -> None:
        """Record that ``node`` computes with a weight that is sharded by its ``extent`` output features."""
        self.output_features[name], self.output_sizes[name] = extent, prod(self.shape(node))

    def explain_pin(self, node: Node, why: str) -> None:
        """Record how the pinned parameter that ``node`` is, or is computed from, is sharded; its first use counts."""
        name = self.parameter_of(node)
        if name is not None and name in self.assumptions.pins:
            self.reasons.setdefault(name, why)

    def row_requested(self, node: Node) -> bool:
        """Whether the user asked for this weight to be sharded by its input features."""
        return bool(self.assumptions.row) and self.parameter_of(node) in self.assumptions.row

    def note_replicated(self, name: str, why: str) -> None:
        """Record why a weight stays replicated."""
        self.assumptions.replicated.setdefault(name, why)

    def shard_parameter(self, node: Node, spec: ShardSpec, why: str) -> bool:
        """Shard the parameter that ``node`` is, or is a function of, such that ``node`` is sharded by ``spec``.

        Returns False, with nothing changed, if there is no such parameter, it is banned, or it is read replicated
        elsewhere.
        """
        chain = chain_to_parameter(node, self.parameter_names, self.layouts)
        name = self.parameter_names.get(chain[-1]) if chain else None
        if name is None or self.assumptions.ban_reason(name) or name in self.sharded_parameters:
            return False
        functions = unread_functions(chain[-1], self.layouts)
        if functions is None or node is not chain[-1] and node not in functions:
            return False
        shape = self.captured.shapes[name]
        before = {x: (self.layouts[x], self.decisions.get(x)) for x in (chain[-1], *functions)}
        full = sum(spec.blocks)
        for dim in [spec.dim] if node is chain[-1] else range(len(shape)):
            if shape[dim] != full:
                continue
            layout = Layout(dim, spec.blocks, (name,), spec.padded)
            self.sharded_parameters[name] = self.layouts[chain[-1]] = layout
            if self._revisit(functions) and (result := self.layout(node)) and result.spec() == spec:
                self.reasons[name] = why
                self.sharded_on_demand[node] = None
                return True
            del self.sharded_parameters[name]
            for x, (layout_before, decision) in before.items():
                self.layouts[x] = layout_before
                self.decisions.pop(x, None)
                if decision:
                    self.decisions[x] = decision
        return False

    def _revisit(self, functions: list[Node]) -> bool:
        """Decide again about functions of a parameter that is sharded now; False if one of them cannot shard."""
        try:
            for node in functions:
                self.decisions.pop(node, None)
                self._decide(node)
        except (CannotShard, Restart):
            return False
        return True

    def needs_blocks(self, node: Node, layout: Layout, edges: Sequence[int]) -> Exception:
        """Return the error to raise if a node cuts the sharded dimension at ``edges``.

        That is Restart, once the origins of ``layout`` have blocks that end there too. It is CannotShard if they had
        these blocks already, or the ranks cannot share them evenly.
        """
        blocks_needed = {}
        if any(origin in self.assumptions.pins for origin in layout.origins):
            return self.cannot_shard(node, "takes other pieces of the sharded dimension than its blocks")
        for origin in layout.origins:
            extent = self.output_features.get(origin, 0)
            key = (self.assumptions.role(origin), extent)
            blocks = self.assumptions.blocks.get(key, (extent,))
            first, per_entry = layout.features or (0, 0)
            block_ends = {sum(blocks[:k]) for k in range(len(blocks) + 1)}
            ends = sorted(block_ends | {first + per_entry * edge for edge in edges})
            new = tuple(b - a for a, b in zip(ends, ends[1:], strict=False))
            if not extent or not layout.features or new == blocks or any(block % self.tp for block in new):
                return self.cannot_shard(node, "takes pieces of the sharded dimension that ranks cannot share evenly")
            blocks_needed[key] = new
        if not blocks_needed:
            return self.cannot_shard(node, "takes pieces of the sharded dimension")
        self.assumptions.blocks.update(blocks_needed)
        return Restart()

    # ---- the walk -------------------------------------------------------------------------------------------------
    def visit(self, node: Node) -> None:
        """Decide about a node; ban the origins of its operands' layouts if it cannot work on shards."""
        try:
            self._decide(node)
        except CannotShard as error:
            if self._gather_small(error):
                return
            if self._ban(error):
                raise Restart() from error
            self._follow_plan(node, error)

    def _decide(self, node: Node) -> None:
        inputs = node.all_input_nodes
        if node.target is operator.getitem and isinstance(layouts := self.layouts[inputs[0]], tuple):
            self.layouts[node] = layouts[constant(node, 1)]
            if self.layouts[node]:
                self.decisions[node] = Decision(self.layouts[node])
            return
        name = op_name(node)
        starter = self.starters.get(name)
        before = [self.layouts[x] for x in inputs]
        sharded = any(self.layouts[x] is not None and x not in self.gathered for x in inputs)
        decision = None
        if starter is not None:
            decision = starter(self, node)
        elif sharded:
            rule = self.rules.get(f"{name}.{getattr(node.target, '_overloadname', '')}") or self.rules.get(name)
            if rule is None:
                raise self.cannot_shard(node, "has no rule for a sharded value")
            decision = rule(self, node)
        for x, layout in zip(inputs, before, strict=True):
            if self.layouts[x] is not layout and (x not in self.sharded_on_demand or _occurrences(node, x) > 1):
                raise self.cannot_shard(node, "reads one weight in two ways", (x,))
        if decision is None and sharded:
            raise self.cannot_shard(node, "needs replicated operands")
        if decision is None and not self.gathered:
            self.layouts[node] = None
            return
        decision = decision or Decision(None)
        if decision.common:
            self.common[node] = None
        self.layouts[node] = decision.layout
        self.decisions[node] = replace(decision, gathered=tuple(self.gathered)) if self.gathered else decision

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

    def _gather_small(self, error: CannotShard) -> bool:
        """Decide again with all-gathered operands, where these, or what they are views of, are small."""
        steps: list[tuple[Node, Node]] = []  # (a node to decide about again, its operand that is all-gathered)
        for x in error.operands:
            chain = [error.node]
            while not self.is_small(x):
                sharded = [y for y in x.all_input_nodes if self.layouts[y] is not None]
                if len(sharded) != 1 or len(x.users) != 1 or x.op != "call_function":
                    return False
                chain.append(x)
                x = sharded[0]
            steps += [(node, x) for node in reversed(chain)]
        return bool(steps) and self._decide_gathered(error.node, steps)

    def _decide_gathered(self, last: Node, steps: list[tuple[Node, Node]]) -> bool:
        try:
            for node, _ in (step for step in steps if step[0] is not last):
                self.gathered = dict.fromkeys(x for other, x in steps if other is node and x in node.all_input_nodes)
                self.decisions.pop(node, None)
                self._decide(node)
            self.gathered = dict.fromkeys(x for _, x in steps if x in last.all_input_nodes)
            self._decide(last)
        except CannotShard:
            return False
        finally:
            self.gathered = {}
        for x in dict.fromkeys(x for _, x in steps):
            for origin in self._origins_of_layout(x):
                self._append_reason(origin, f"a small piece of its output is all-gathered for {op_name(last)}")
        return True

    def _append_reason(self, origin: str, text: str) -> None:
        self.reasons[origin] = f"{self.reasons.get(origin, ALIKE)}; {text}"

    def _follow_plan(self, node: Node, error: CannotShard) -> None:
        """Decide about a node whose operands are sharded by a plan, whatever that costs, with as few of them
        all-gathered as it takes. Raises PlanConflict if it cannot be."""
        inputs = dict.fromkeys((*error.operands, *node.all_input_nodes))
        gatherable = [x for x in inputs if self._gatherable(x)]
        origins = self._origins_of(error)
        for chosen in ((), *((x,) for x in gatherable if len(gatherable) > 1), tuple(gatherable)):
            self.gathered = dict.fromkeys(chosen)
            self.refuse_costly = False
            try:
                self._decide(node)
            except CannotShard as next_error:
                error = next_error
                origins = self._origins_of(next_error) or origins
                continue
            finally:
                self.gathered = {}
                self.refuse_costly = True
            for origin in dict.fromkeys(o for x in chosen for o in self._origins_of_layout(x)):
                if ";" not in self.reasons.get(origin, ""):
                    self._append_reason(origin, f"its output is all-gathered for {op_name(node)} in {place(node)}")
            return
        raise PlanConflict(node, origins, error.why)

    def _gatherable(self, node: Node) -> bool:
        """Whether a value is sharded and may be all-gathered: it is no weight, and nothing writes into it."""
        activation = isinstance(self.layouts[node], Layout) and self.parameter_of(node) is None
        return activation and values(node)[0].is_floating_point() and node not in self._written

    @cached_property
    def _written(self) -> set[Node]:
        """The values whose storage something writes to in place."""
        return changing(self.captured.module.graph)

    def _origins_of(self, error: CannotShard) -> tuple[str, ...]:
        """Return the origins of the layouts that a node cannot take."""
        return tuple(dict.fromkeys(o for x in error.operands for o in self._origins_of_layout(x)))

    def _origins_of_layout(self, node: Node) -> list[str]:
        """Return the names of the parameters whose sharding led to that of a node, or of its several tensors."""
        layout = self.layouts[node]
        each = layout if isinstance(layout, tuple) else (layout,)
        return [origin for one in each if one for origin in one.origins]

    def _ban(self, error: CannotShard) -> bool:
        """Ban the origins of an error. Returns False, with nothing changed, if all are pinned or banned already."""
        origins = self._origins_of(error)
        new = [o for o in origins if o not in self.assumptions.pins and not self.assumptions.ban_reason(o)]
        pinned = any(origin in self.assumptions.pins for origin in origins)
        assert new or pinned, f"{error.node} {error.node.target} has no way out: {error.why}"
        for name in new:
            role = self.assumptions.role(name)
            self.assumptions.banned[role] = f"{op_name(error.node)} in {place(error.node)} {error.why}"
        return bool(new)

    def _output(self, node: Node) -> None:
        """Outputs such as logits are all-gathered."""
        self.layouts[node] = None
        sharded = [x for x in node.all_input_nodes if self.layouts[x] is not None]
        self.decisions[node] = Decision(None, gathered=tuple(sharded))


def _occurrences(node: Node, x: Node) -> int:
    """Return how often ``x`` is among the arguments of ``node``."""
    arguments: list[Node] = []
    map_arg((node.args, node.kwargs), arguments.append)
    return arguments.count(x)
