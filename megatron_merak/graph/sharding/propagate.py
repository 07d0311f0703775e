"""Propagation: one walk over the graph decides, from rules per op, which weights are divided and where.

A linear layer with a whole input divides its output features; what follows works on the parts as long as a rule
allows it; a linear layer whose input features are divided divides its weight alike and ends in a sum over the ranks. An
op that cannot take a divided value bans the weights it was divided by, and one that cuts it into pieces asks for
blocks: in both cases the walk starts again. Bans and blocks hold for all layers (see roles.py), so a few walks do.
Weights that a plan has decided about are divided, or whole, from the start. An op that cannot take the parts of these
works on values that are made whole for it.
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
from ..ir.nodes import op_name, values
from .choices import Choices
from .placement import Again, Cut, Decision, Layout, Split, Stuck, Unfit

GATHER_SHARE = 4  # a divided value of at most 1/4 of what its weight makes is made whole rather than banning the weight
VOCABULARY_ROWS = 64  # tables with fewer rows are not worth a sum over the ranks

ALIKE = "divided like the value that it is combined with"

Rule = Callable[["Propagation", Node], Decision | None]


class Propagation:
    """One walk. ``layouts`` and ``decisions`` by node (no decision: as captured), ``why`` by parameter divided."""

    def __init__(
        self,
        captured: Captured,
        tp: int,
        rules: Mapping[str, Rule],
        starters: Mapping[str, Rule],
        choices: Choices,
        multiple: int = 1,
    ):
        self.captured, self.tp, self.choices, self.multiple = captured, tp, choices, multiple
        self.rules, self.starters = rules, starters
        self.layouts: dict[Node, Layout] = {}
        self.decisions: dict[Node, Decision] = {}
        self.params: dict[Node, str] = {}
        self.held: dict[str, Split] = {
            name: Split(cut.dim, cut.blocks, (name,), cut.padded) for name, cut in choices.pins.items() if cut
        }
        self.why: dict[str, str] = {}
        self.extents: dict[str, int] = {}  # weight divided by its output features -> their number
        self.sizes: dict[str, int] = {}  # and the size of what it makes
        self.common: dict[Node, None] = {}  # values without a parameter behind them
        self.gathered: dict[Node, None] = {}  # operands that the current node reads whole
        self.demanded: dict[Node, None] = {}  # values that rules divided a parameter for
        self.thrifty = True  # whether the current node refuses what costs more than it saves

    def run(self) -> "Propagation":
        graph = self.captured.module.graph
        self.tables = self._tables()
        for node in graph.nodes:
            if node.op == "get_attr" and node.target in self.captured.shapes:
                self.params[node] = str(node.target)
            elif all(x in self.common for x in node.all_input_nodes):
                self.common[node] = None
            if node.op == "output":
                self._output(node)
            elif node.op == "call_function":
                self.visit(node)
            else:
                self.layouts[node] = self.held.get(self.params[node]) if node in self.params else None
        return self

    def _tables(self) -> dict[int, None]:
        """The extents that are vocabularies: rows of embedding tables."""
        shapes = self.captured.shapes
        found = [node.args[0] for node in self.captured.module.graph.nodes if op_name(node) == "embedding"]
        rows = [shapes[x.target][0] for x in found if isinstance(x, Node) and x.target in shapes]
        return dict.fromkeys(extent for extent in rows if extent >= VOCABULARY_ROWS)

    # ---- what rules ask -------------------------------------------------------------------------------------------
    def shape(self, node: Node) -> tuple[int, ...]:
        """The full shape of a node's (first) tensor."""
        return tuple(values(node)[0].shape)

    def layout(self, node: object) -> Split | None:
        """How an operand is divided; None for one that is whole, or made whole for the node being visited."""
        if not isinstance(node, Node) or node in self.gathered:
            return None
        layout = self.layouts[node]
        if isinstance(layout, tuple):
            raise Unfit(node, (node,), "hands on several divided values at once")
        return layout

    def subject(self, node: Node) -> Split:
        """How the first operand of a node is divided, which must be the divided one."""
        split = self.layout(node.args[0])
        if split is None:
            raise self.unfit(node, "takes a divided operand besides its first")
        return split

    def divided(self, nodes: Sequence[Node]) -> list[Node]:
        return [x for x in nodes if self.layout(x) is not None]

    def unfit(self, node: Node, why: str, culprits: Sequence[Node] = ()) -> Unfit:
        """The error to raise when a node cannot work on parts: those of ``culprits``, or of all its operands."""
        operands = dict.fromkeys(x for x in culprits or node.all_input_nodes if x not in self.gathered)
        return Unfit(node, tuple(x for x in operands if self.layouts[x] is not None), why)

    def origins(self, nodes: Sequence[Node]) -> tuple[str, ...]:
        """The weights that the operands were divided by, each once, in order."""
        return tuple(dict.fromkeys(o for x in nodes if (s := self.layout(x)) for o in s.origins))

    def padding(self, extent: int) -> int | None:
        """The extent to divide for a vocabulary of ``extent``: 0 without padding, None when it is no vocabulary and
        does not divide."""
        step = self.tp * (self.multiple if extent in self.tables else 1)
        if extent % step == 0:
            return 0
        return -(-extent // step) * step if extent >= VOCABULARY_ROWS else None

    def bring(self, cuts: dict[Node, Cut], node: Node, cut: Cut) -> None:
        """A whole operand of which each rank needs its part: a parameter is divided itself, anything else is cut."""
        self.bring_as(cuts, node, cut, ALIKE)

    def bring_as(self, cuts: dict[Node, Cut], node: Node, cut: Cut, why: str) -> None:
        """``bring``, with the reason to give for a parameter."""
        if not self.demand(node, cut, why):
            cuts[node] = cut

    def weight(self, node: Node) -> str | None:
        """The parameter that a value is, or is computed from and nothing else."""
        chain = self._chain(node)
        return self.params[chain[-1]] if chain else None

    def column(self, name: str, extent: int, node: Node) -> None:
        """Remember that a node divides a weight by its ``extent`` output features."""
        self.extents[name], self.sizes[name] = extent, prod(self.shape(node))

    def explain(self, node: Node, why: str) -> None:
        """How a plan divides the parameter that ``node`` is, or is computed from: its first use tells."""
        name = self.weight(node)
        if name in self.choices.pins:
            self.why.setdefault(name, why)

    def chosen_row(self, node: Node) -> bool:
        """Whether the user asked to divide the input features of this weight."""
        return bool(self.choices.row) and self.weight(node) in self.choices.row

    def note(self, name: str, why: str) -> None:
        """Remember why a weight was left whole."""
        self.choices.whole.setdefault(name, why)

    def demand(self, node: Node, cut: Cut, why: str) -> bool:
        """Divide the parameter that ``node`` is, or is a view or function of, so that ``node`` is divided by ``cut``.

        False, with nothing changed, when there is none, it is banned, or it is read whole elsewhere.
        """
        chain = self._chain(node)
        name = self.params.get(chain[-1]) if chain else None
        if name is None or self.choices.ban(name) or name in self.held:
            return False
        pending = self._pending(chain[-1])
        if pending is None or node is not chain[-1] and node not in pending:
            return False
        shape = self.captured.shapes[name]
        before = {x: (self.layouts[x], self.decisions.get(x)) for x in (chain[-1], *pending)}
        whole = sum(cut.blocks)
        for dim in [cut.dim] if node is chain[-1] else range(len(shape)):
            if shape[dim] != whole:
                continue
            self.held[name] = self.layouts[chain[-1]] = Split(dim, cut.blocks, (name,), cut.padded)
            if self._follow(pending) and (got := self.layout(node)) and got.cut() == cut:
                self.why[name] = why
                self.demanded[node] = None
                return True
            del self.held[name]
            for x, (layout, decision) in before.items():
                self.layouts[x] = layout
                self.decisions.pop(x, None)
                if decision:
                    self.decisions[x] = decision
        return False

    def _chain(self, node: Node) -> list[Node]:
        """``node`` back to the parameter that it is computed from and nothing else; [] if there is none."""
        chain = [node]
        while chain[-1] not in self.params:
            source = _source(chain[-1])
            if source is None or isinstance(self.layouts[chain[-1]], tuple):
                return []
            chain.append(source)
        return chain

    def _pending(self, parameter: Node) -> list[Node] | None:
        """The functions of a parameter alone that nothing has read yet, in graph order; None when something has read
        the parameter or one of them whole."""
        found: list[Node] = []
        todo = [parameter]
        while todo:
            node = todo.pop()
            for user in node.users:
                if user not in self.layouts or user in found:
                    continue
                if _source(user) is not node:
                    return None
                found.append(user)
                todo.append(user)
        return sorted(found)

    def _follow(self, pending: list[Node]) -> bool:
        """Visit functions of a parameter again, now that it is divided."""
        try:
            for node in pending:
                self.decisions.pop(node, None)
                self._decide(node)
        except (Unfit, Again):
            return False
        return True

    def reblock(self, node: Node, split: Split, edges: Sequence[int]) -> Exception:
        """The error to raise when a node cuts the divided dimension at ``edges``: its weights get blocks that end there
        too, unless they have them already or a rank's share would not be whole."""
        wanted = {}
        if any(origin in self.choices.pins for origin in split.origins):
            return self.unfit(node, "takes other pieces of the divided dimension than its blocks")
        for origin in split.origins:
            extent = self.extents.get(origin, 0)
            key = (self.choices.role(origin), extent)
            known = self.choices.blocks.get(key, (extent,))
            first, per = split.rows or (0, 0)
            ends = sorted({sum(known[:k]) for k in range(len(known) + 1)} | {first + per * edge for edge in edges})
            new = tuple(b - a for a, b in zip(ends, ends[1:], strict=False))
            if not extent or not split.rows or new == known or any(block % self.tp for block in new):
                return self.unfit(node, "takes pieces of the divided dimension that the ranks do not share evenly")
            wanted[key] = new
        if not wanted:
            return self.unfit(node, "takes pieces of the divided dimension")
        self.choices.blocks.update(wanted)
        return Again()

    # ---- the walk -------------------------------------------------------------------------------------------------
    def visit(self, node: Node) -> None:
        """Decide about a node; ban the weights behind its operands if it cannot work on parts."""
        try:
            self._decide(node)
        except Unfit as error:
            if self._gather(error):
                return
            if self._ban(error):
                raise Again() from error
            self._insist(node, error)

    def _decide(self, node: Node) -> None:
        inputs = node.all_input_nodes
        if node.target is operator.getitem and isinstance(pieces := self.layouts[inputs[0]], tuple):
            self.layouts[node] = pieces[node.args[1]]
            if self.layouts[node]:
                self.decisions[node] = Decision(self.layouts[node])
            return
        name = op_name(node)
        starter = self.starters.get(name)
        before = [self.layouts[x] for x in inputs]
        divided = any(self.layouts[x] is not None and x not in self.gathered for x in inputs)
        decision = None
        if starter is not None:
            decision = starter(self, node)
        elif divided:
            rule = self.rules.get(f"{name}.{getattr(node.target, '_overloadname', '')}") or self.rules.get(name)
            if rule is None:
                raise self.unfit(node, "has no rule for a divided value")
            decision = rule(self, node)
        for x, layout in zip(inputs, before, strict=True):
            if self.layouts[x] is not layout and (x not in self.demanded or _occurrences(node, x) > 1):
                raise self.unfit(node, "reads one weight in two ways", (x,))
        if decision is None and divided:
            raise self.unfit(node, "needs whole values")
        if decision is None and not self.gathered:
            self.layouts[node] = None
            return
        decision = decision or Decision(None)
        if decision.common:
            self.common[node] = None
        self.layouts[node] = decision.layout
        self.decisions[node] = replace(decision, gathered=tuple(self.gathered)) if self.gathered else decision

    def small(self, node: Node) -> bool:
        """Whether a divided value is small beside what its weights make."""
        split = self.layouts[node]
        if isinstance(split, tuple) or split.padded or node in self.params or not values(node)[0].is_floating_point():
            return False
        made = min((self.sizes.get(origin, 0) for origin in split.origins), default=0)
        return prod(self.shape(node)) * GATHER_SHARE <= made

    def _gather(self, error: Unfit) -> bool:
        """Try again with the operands made whole, where they, or what they are views of, are small beside what their
        weights make."""
        steps: list[tuple[Node, Node]] = []  # (a node to decide again, the operand that it reads whole)
        for x in error.operands:
            chain = [error.node]
            while not self.small(x):
                divided = [y for y in x.all_input_nodes if self.layouts[y] is not None]
                if len(divided) != 1 or len(x.users) != 1 or x.op != "call_function":
                    return False
                chain.append(x)
                x = divided[0]
            steps += [(node, x) for node in reversed(chain)]
        return bool(steps) and self._decide_again(error.node, steps)

    def _decide_again(self, last: Node, steps: list[tuple[Node, Node]]) -> bool:
        try:
            for node, _ in (step for step in steps if step[0] is not last):
                self.gathered = dict.fromkeys(x for other, x in steps if other is node and x in node.all_input_nodes)
                self.decisions.pop(node, None)
                self._decide(node)
            self.gathered = dict.fromkeys(x for _, x in steps if x in last.all_input_nodes)
            self._decide(last)
        except Unfit:
            return False
        finally:
            self.gathered = {}
        for x in dict.fromkeys(x for _, x in steps):
            for origin in self.layouts[x].origins:
                self._remark(origin, f"a small piece of what it makes is made whole for {op_name(last)}")
        return True

    def _remark(self, origin: str, text: str) -> None:
        self.why[origin] = f"{self.why.get(origin, ALIKE)}; {text}"

    def _insist(self, node: Node, error: Unfit) -> None:
        """Decide about a node whose operands a plan has divided: it may cost more than it saves, or take operands that
        are made whole for it. Raises Stuck."""
        inputs = dict.fromkeys((*error.operands, *node.all_input_nodes))
        found, behind = [x for x in inputs if self._gatherable(x)], self._behind(error)
        for chosen in ((), *((x,) for x in found if len(found) > 1), tuple(found)):
            self.gathered, self.thrifty = dict.fromkeys(chosen), False
            try:
                self._decide(node)
            except Unfit as again:
                error, behind = again, self._behind(again) or behind
                continue
            finally:
                self.gathered, self.thrifty = {}, True
            for origin in dict.fromkeys(o for x in chosen for o in self.layouts[x].origins):
                if ";" not in self.why.get(origin, ""):
                    self._remark(origin, f"what it makes is made whole for {op_name(node)} in {place(node)}")
            return
        raise Stuck(node, behind, error.why)

    def _gatherable(self, node: Node) -> bool:
        """Whether a value is divided and can be made whole: it is no weight, and nothing is written into it."""
        known = isinstance(self.layouts[node], Split) and self.weight(node) is None
        return known and values(node)[0].is_floating_point() and node not in self._written

    @cached_property
    def _written(self) -> set[Node]:
        """The values whose storage is written in place, before or after."""
        return changing(self.captured.module.graph)

    def _behind(self, error: Unfit) -> tuple[str, ...]:
        """The weights that the operands which a node cannot take were divided by."""
        layouts = [self.layouts[x] for x in error.operands]
        splits = [s for x in layouts for s in (x if isinstance(x, tuple) else (x,)) if s]
        return tuple(dict.fromkeys(origin for split in splits for origin in split.origins))

    def _ban(self, error: Unfit) -> bool:
        """False, with nothing changed, where a plan has decided about all weights that there are to ban."""
        behind = self._behind(error)
        new = [o for o in behind if o not in self.choices.pins and not self.choices.ban(o)]
        pinned = any(origin in self.choices.pins for origin in behind)
        assert new or pinned, f"{error.node} {error.node.target} has no way out: {error.why}"
        for name in new:
            self.choices.banned[self.choices.role(name)] = f"{op_name(error.node)} in {place(error.node)} {error.why}"
        return bool(new)

    def _output(self, node: Node) -> None:
        """Outputs are whole: logits are made whole from the ranks' parts."""
        self.layouts[node] = None
        divided = [x for x in node.all_input_nodes if self.layouts[x] is not None]
        self.decisions[node] = Decision(None, gathered=tuple(divided))


def _occurrences(node: Node, x: Node) -> int:
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found.count(x)


def _source(node: Node) -> Node | None:
    """The one value that a node is computed from, but for whole numbers that pick entries of it."""
    inputs = node.all_input_nodes
    if node.op != "call_function" or not inputs or len(inputs) > 1 and op_name(node) not in ("index", "index_select"):
        return None
    return inputs[0]
