"""Sharding propagation: one walk over the graph decides, by a rule per operator, which parameters
are sharded and how.

A linear layer whose input is replicated shards its output features (column parallel). The operators
that follow work on shards as long as their rules allow. A linear layer whose input features are
sharded shards its weight likewise and ends in an all-reduce (row parallel).

An operator that cannot take a sharded value bans the sharding of the parameters that led to it; one
that takes pieces of the sharded dimension asks for blocks. Bans and blocks hold for all layers
(roles.py). So the walk goes back to the first node that sharded such a parameter, and forgets what
it decided since.

Parameters that a plan has decided about ("pins") are sharded, or replicated, from the start. An
operator that cannot take shards of these gets all-gathered operands.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property

from torch.fx import Node

from ..capture.captured import Captured
from ..ir.aliases import changing
from ..ir.names import place
from ..ir.nodes import op_name, values
from .assumptions import Assumptions
from .history import Table
from .known import ALIKE, Known, Rule
from .placement import CannotShard, Decision, Layout, NeedsBlocks, PlanConflict

RETURNS_PER_WEIGHT = 4  # each return bans a weight, or finds that one needs another block

Gathered = Mapping[Node, None]  # operands that are all-gathered for one node


def propagated(
    captured: Captured,
    tp: int,
    rules: Mapping[str, Rule],
    starters: Mapping[str, Rule],
    assumptions: Assumptions,
    vocabulary_multiple: int = 1,
) -> Known:
    """Return what a walk over a captured graph decides.

    rules, starters: by operator, see rules.py.
    assumptions:     about parameters; the walk corrects those that it finds wrong.

    Raises PlanConflict.
    """
    known = Known(
        captured,
        tp,
        rules,
        starters,
        assumptions=assumptions,
        vocabulary_multiple=vocabulary_multiple,
    )
    _Walk(known).run()
    return known


class _Walk:
    """A walk over the nodes of a graph, forwards and back."""

    def __init__(self, known: Known):
        self.known = known
        self.assumptions = known.assumptions
        self.nodes = list(known.captured.module.graph.nodes)
        # parameter -> position of the node that sharded it
        self.sharded_at: Table[str, int] = Table(known.history)

    def run(self) -> None:
        history = self.known.history
        starts = [0] * len(self.nodes)
        most = RETURNS_PER_WEIGHT * len(self.known.captured.shapes) + 1
        returns = 0
        position = 0
        while position < len(self.nodes):
            starts[position] = history.mark()
            back = self._visit(position)
            if back is None:
                position += 1
                continue
            returns += 1
            assert returns <= most, f"propagation did not settle in {most} returns"
            history.undo(starts[back])
            position = back

    def _visit(self, position: int) -> int | None:
        """Decide about a node; return the position to go on from, if that is an earlier one."""
        node = self.nodes[position]
        known = self.known
        before = len(known.sharded_parameters)
        if node not in known.parameter_names and all(
            x in known.common for x in node.all_input_nodes
        ):
            known.common[node] = None
        if node.op == "output":
            self._output(node)
        elif node.op == "call_function":
            back = self._decide(node, position)
            if back is not None:
                return back
        else:
            name = known.parameter_names.get(node)
            known.layouts[node] = None if name is None else known.sharded_parameters.get(name)
        for name in list(known.sharded_parameters)[before:]:
            self.sharded_at[name] = position
        return None

    def _decide(self, node: Node, position: int) -> int | None:
        """Decide about a node, by all-gathering operands if need be; else ban, and return where to
        go on.
        """
        error = self._attempt([(node, {})])
        if error is None:
            return None
        if steps := self._steps_with_small_gathered(error):
            second = self._attempt(steps)
            if second is None:
                self._explain_small(error.node, steps)
                return None
            if isinstance(second, NeedsBlocks):
                error = second
        if isinstance(error, NeedsBlocks):
            return self._take_blocks(error, position)
        roles = self._ban(error)
        return self._first(roles, position) if roles else self._follow_plan(node, error, position)

    def _attempt(
        self, steps: Iterable[tuple[Node, Gathered]], refuse_costly: bool = True
    ) -> CannotShard | None:
        """Decide about nodes, each with some of its operands all-gathered.

        Returns the error of one that cannot work so, after all of it was undone.
        """
        known = self.known
        start = known.history.mark()
        known.refuse_costly = refuse_costly
        try:
            for node, gathered in steps:
                known.gathered = gathered
                known.decide(node)
        except CannotShard as error:
            error.origins = self._origins(error.operands)
            known.history.undo(start)
            return error
        finally:
            known.gathered = {}
            known.refuse_costly = True
        return None

    def _first(self, roles: Iterable[str], position: int) -> int:
        """Return the position of the first node that sharded a parameter of these roles,
        or names.
        """
        chosen = frozenset(roles)
        at = [
            where
            for name, where in self.sharded_at.items()
            if name in chosen or self.assumptions.role(name) in chosen
        ]
        return min(at, default=position)

    def _take_blocks(self, error: NeedsBlocks, position: int) -> int:
        self.assumptions.blocks.update(error.blocks)
        return self._first((role for role, _ in error.blocks), position)

    def _ban(self, error: CannotShard) -> list[str]:
        """Ban the roles of an error's origins, and return them; none if all are pinned or banned
        already.
        """
        pins = self.assumptions.pins
        new = [o for o in error.origins if o not in pins and not self.assumptions.ban_reason(o)]
        pinned = any(origin in pins for origin in error.origins)
        assert new or pinned, f"{error.node} {error.node.target} has no way out: {error.why}"
        roles = [self.assumptions.role(name) for name in new]
        for role in roles:
            self.assumptions.banned[role] = (
                f"{op_name(error.node)} in {place(error.node)} {error.why}"
            )
        return roles

    # ---- operands that are all-gathered ----------------------------------------------------------
    def _steps_with_small_gathered(self, error: CannotShard) -> list[tuple[Node, Gathered]]:
        """Return what to decide again, with the operands all-gathered, or what these are views of,
        if that is small.

        Returns nothing if one of them is not, or was sharded by the attempt that failed.
        """
        if any(self.known.layouts[x] is None for x in error.operands):
            return []
        gathers: dict[Node, dict[Node, None]] = {}  # node -> operands of it that are all-gathered
        last = error.node
        for x in error.operands:
            chain = [last]
            while not self.known.is_small(x):
                sharded = [y for y in x.all_input_nodes if self.known.layouts[y] is not None]
                if len(sharded) != 1 or len(x.users) != 1 or x.op != "call_function":
                    return []
                chain.append(x)
                x = sharded[0]
            for node in reversed(chain):
                gathered = gathers.setdefault(node, {})
                if x in node.all_input_nodes:
                    gathered[x] = None
        if not gathers:
            return []
        of_last = gathers.pop(last)
        return [*gathers.items(), (last, of_last)]

    def _explain_small(self, node: Node, steps: Iterable[tuple[Node, Gathered]]) -> None:
        gathered = dict.fromkeys(x for _, operands in steps for x in operands)
        for origin in (o for x in gathered for o in self._origins((x,))):
            self._append_reason(
                origin, f"a small piece of its output is all-gathered for {op_name(node)}"
            )

    def _follow_plan(self, node: Node, error: CannotShard, position: int) -> int | None:
        """Decide about a node whose operands are sharded by a plan, whatever that costs, with as
        few of them all-gathered as it takes. Raises PlanConflict if it cannot be."""
        inputs = dict.fromkeys((*error.operands, *node.all_input_nodes))
        gatherable = [x for x in inputs if self._gatherable(x)]
        origins = error.origins
        alone = [(x,) for x in gatherable if len(gatherable) > 1]
        for chosen in ((), *alone, tuple(gatherable)):
            failed = self._attempt([(node, dict.fromkeys(chosen))], refuse_costly=False)
            if failed is None:
                self._explain_plan(node, chosen)
                return None
            if isinstance(failed, NeedsBlocks):
                return self._take_blocks(failed, position)
            error = failed
            origins = failed.origins or origins
        raise PlanConflict(node, origins, error.why)

    def _explain_plan(self, node: Node, gathered: Iterable[Node]) -> None:
        for origin in self._origins(gathered):
            if ";" not in self.known.reasons.get(origin, ""):
                self._append_reason(
                    origin, f"its output is all-gathered for {op_name(node)} in {place(node)}"
                )

    def _append_reason(self, origin: str, text: str) -> None:
        reasons = self.known.reasons
        reasons[origin] = f"{reasons.get(origin, ALIKE)}; {text}"

    def _gatherable(self, node: Node) -> bool:
        """Whether a value is sharded and may be all-gathered: it is no weight, and nothing writes
        into it.
        """
        known = self.known
        activation = isinstance(known.layouts[node], Layout) and known.parameter_of(node) is None
        return activation and values(node)[0].is_floating_point() and node not in self._written

    @cached_property
    def _written(self) -> set[Node]:
        """The values whose storage something writes to in place."""
        return changing(self.known.captured.module.graph)

    def _origins(self, nodes: Iterable[Node]) -> tuple[str, ...]:
        """Return the parameters whose sharding led to that of some values, each once, in order."""
        found: dict[str, None] = {}
        for x in nodes:
            layout = self.known.layouts[x]
            for one in layout if isinstance(layout, tuple) else (layout,):
                if one is not None:
                    found |= dict.fromkeys(one.origins)
        return tuple(found)

    def _output(self, node: Node) -> None:
        """Outputs such as logits are all-gathered."""
        known = self.known
        known.layouts[node] = None
        sharded = [x for x in node.all_input_nodes if known.layouts[x] is not None]
        known.decisions[node] = Decision(None, gathered=tuple(sharded))
