"""Lookups of a captured graph by whole numbers of the batch: token ids in a table, targets among
the classes of a loss.

A number without a row is an error of one process's PyTorch, but a rank that has a shard of the
table takes it for a row of another rank, and trains without a word. So numbers are looked at before
a batch runs, on the CPU, where it is made.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from ..capture.captured import Captured
from ..capture.guards import value_dependencies
from ..ir.aliases import aliased, mutation_deps
from ..ir.nodes import is_random, op_name, values
from ..sharding.rules_value import argument

_TABLES = {"embedding": ("weight", "indices"), "embedding_bag": ("weight", "indices")}
_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
_MASKS = (torch.bool, torch.uint8)  # as indices, these select and do not count

Code = Callable[..., tuple[tuple[Tensor, int], ...]]


@dataclass(frozen=True)
class Lookup:
    """One operation that looks up by whole numbers.

    table:    the name of the parameter that is looked up in; "" for another value.
    entries:  of the batch, which the numbers depend on.
    classes:  whether the numbers are targets of a loss.
    ignored:  a number that the loss leaves out; None if there is none.
    negative: whether numbers below 0 count from the end.
    """

    table: str = ""
    entries: tuple[str, ...] = ()
    classes: bool = False
    ignored: int | None = None
    negative: bool = False


@dataclass(frozen=True)
class Outside:
    """A number of a batch that a lookup has no row for.

    value:  the number.
    rows:   how many there are.
    lookup: what looks it up.
    """

    value: int
    rows: int
    lookup: Lookup

    def place(self, batch: Mapping[str, Tensor]) -> tuple[str, tuple[int, ...]]:
        """Return the entry that has the number, and where; ("", ()) if the number was computed."""
        for name in self.lookup.entries:
            entry = batch[name]
            if entry.dtype != torch.bool and not entry.is_floating_point():
                places = (entry == self.value).nonzero()
                if len(places):
                    return name, tuple(places[0].tolist())
        return "", ()


def _none(*leaves: Tensor) -> tuple[tuple[Tensor, int], ...]:
    return ()


@dataclass
class Lookups:
    """The lookups whose numbers depend on the batch and constants alone; none by default.

    fixed, varying: lookups by numbers that depend on constants alone (the positions of a row), and
                    all others.
    once, then:     functions of ``constants``, and of these and the batch, that return (numbers,
                    rows) of each.
    constants:      the graph's constants that are needed.
    reads:          keys of the batch that are needed.
    writes:         whether ``once`` and ``then`` write into their arguments.
    """

    fixed: tuple[Lookup, ...] = ()
    varying: tuple[Lookup, ...] = ()
    once: Code = _none
    then: Code = _none
    constants: tuple[Tensor, ...] = ()
    reads: tuple[str, ...] = ()
    writes: bool = False
    _looked_once: bool = False

    def with_code(self, once: Code, then: Code) -> "Lookups":
        """Return lookups of the same constants and batch entries by other code."""
        return replace(self, once=once, then=then, _looked_once=False)

    @torch.no_grad()
    def outside(self, batch: Mapping[str, Tensor]) -> Outside | None:
        """Return the first number of a batch, which is on the CPU, that has no row."""
        if self.fixed and not self._looked_once:
            constants = [self._own(constant) for constant in self.constants]
            found = _first(self.fixed, self.once(*constants))
            if found is not None:
                return found
            self._looked_once = True
        if not self.varying:
            return None
        leaves = [*self.constants, *(batch[name].detach().cpu() for name in self.reads)]
        return _first(self.varying, self.then(*map(self._own, leaves)))

    def _own(self, leaf: Tensor) -> Tensor:
        return leaf.clone() if self.writes else leaf


def lookups_of(captured: Captured) -> Lookups:
    """Return the lookups of a captured graph."""
    graph = captured.module.graph
    after = mutation_deps(graph)
    fixed: list[_Found] = []
    varying: list[_Found] = []
    for node in graph.nodes:
        for lookup, numbers, rows in _lookups_of(node, captured):
            needed = value_dependencies(numbers, after)
            if all(_is_plain(each, captured) for each in needed):
                entries = tuple(str(each.target) for each in needed if each.op == "placeholder")
                group = varying if entries else fixed
                group.append(_Found(replace(lookup, entries=entries), numbers, rows, needed))
    computed = {node: None for found in (*fixed, *varying) for node in found.needed}
    leaves = [node for node in graph.nodes if node in computed]
    constants = [node for node in leaves if node.op == "get_attr"]
    inputs = [node for node in leaves if node.op == "placeholder"]
    return Lookups(
        fixed=tuple(found.lookup for found in fixed),
        varying=tuple(found.lookup for found in varying),
        once=_code(captured, constants, fixed),
        then=_code(captured, [*constants, *inputs], varying),
        constants=tuple(_constant(captured, str(node.target)) for node in constants),
        reads=tuple(str(node.target) for node in inputs),
        writes=any(aliased(node)[1] for node in computed),
    )


@dataclass(frozen=True)
class _Found:
    """A lookup of a graph: the node of its numbers, how many rows there are, and the nodes that the
    numbers need.
    """

    lookup: Lookup
    numbers: Node
    rows: int
    needed: dict[Node, None]


def _first(lookups: Sequence[Lookup], found: Sequence[tuple[Tensor, int]]) -> Outside | None:
    for lookup, (numbers, rows) in zip(lookups, found, strict=True):
        wrong = (numbers < (-rows if lookup.negative else 0)) | (numbers >= rows)
        if lookup.ignored is not None:
            wrong &= numbers != lookup.ignored
        if wrong.any():
            return Outside(int(numbers[wrong].flatten()[0]), rows, lookup)
    return None


def _lookups_of(node: Node, captured: Captured) -> list[tuple[Lookup, Node, int]]:
    """Return what a node looks up: how, by which numbers, among how many rows."""
    name = op_name(node)
    if name in _TABLES:
        table, numbers = (argument(node, each) for each in _TABLES[name])
        return [(Lookup(_parameter(table, captured)), numbers, values(table)[0].shape[0])]
    if name in _LOSSES:
        scores = argument(node, "self")
        target = argument(node, "target")
        if values(target)[0].is_floating_point():
            return []
        shape = values(scores)[0].shape
        ignored = argument(node, "ignore_index")
        return [(Lookup(classes=True, ignored=ignored), target, shape[1 if len(shape) > 1 else 0])]
    if name in ("gather", "index_select"):
        numbers = argument(node, "index")
        shape = values(argument(node, "self"))[0].shape
        rows = shape[argument(node, "dim")] if shape else 1
        return [(Lookup(_parameter(argument(node, "self"), captured)), numbers, rows)]
    if name == "index":
        table = argument(node, "self")
        pairs = zip(argument(node, "indices"), values(table)[0].shape, strict=False)
        whole = [(x, n) for x, n in pairs if isinstance(x, Node)]
        if any(values(x)[0].dtype in _MASKS for x, _ in whole):
            return []
        return [(Lookup(_parameter(table, captured), negative=True), x, n) for x, n in whole]
    return []


def _parameter(node: Node, captured: Captured) -> str:
    """Return the name of the parameter that a table is, maybe in another dtype or shape; "" for
    another value.
    """
    while (
        node.op == "call_function"
        and node.args
        and isinstance(node.args[0], Node)
        and len(node.all_input_nodes) < 2
    ):
        node = node.args[0]
    return str(node.target) if node.op == "get_attr" and node.target in captured.shapes else ""


def _is_plain(node: Node, captured: Captured) -> bool:
    """Whether a node can be computed from a batch on the CPU."""
    if node.op == "get_attr":
        return node.target not in captured.shapes and bool(values(node))
    if node.op == "placeholder":
        return True
    known = isinstance(node.target, OpOverload) or node.target is operator.getitem
    return known and not is_random(node)


def _constant(captured: Captured, path: str) -> Tensor:
    value: Any = captured.module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _code(captured: Captured, leaves: Sequence[Node], lookups: Sequence[_Found]) -> Code:
    graph = Graph()
    copies = {leaf: graph.placeholder(leaf.name) for leaf in leaves}
    needed = {node for found in lookups for node in found.needed}

    def copied(node: Node) -> Node:
        if node in copies:
            return copies[node]
        value = node.meta["val"]  # of a node of which only the shape matters
        return graph.call_function(torch.empty, (tuple(value.shape),), {"dtype": value.dtype})

    for node in captured.module.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copied)
    graph.output(tuple((copies[found.numbers], found.rows) for found in lookups))
    return GraphModule({}, graph).forward
