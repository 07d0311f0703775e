"""A model with few of its layers that are alike, whose units say what those of all layers are."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ...plan import Unit
from ..capture.captured import Captured
from .cut import Chain

V = TypeVar("V")

_KEPT = 3  # the first and the last may differ by what is beside them
_LONGEST = 16  # units after which layers may repeat


@dataclass(frozen=True, eq=False)
class Shortened:
    """A captured model without most of its layers.

    captured: the model that is left.
    names:    of the units of the whole chain.
    unit_of:  for each of these, the unit of the shortened chain that is like it.
    """

    captured: Captured
    names: tuple[str, ...]
    unit_of: tuple[int, ...]

    def lengthened(self, units: Sequence[Unit]) -> tuple[Unit, ...] | None:
        """Return the units of the whole chain, given those of the shortened one; None where that is
        cut elsewhere.
        """
        if len(units) != self.unit_of[-1] + 1:
            return None
        return tuple(
            replace(units[place], name=name)
            for place, name in zip(self.unit_of, self.names, strict=True)
        )


@dataclass(frozen=True)
class _Repetition:
    """Units that repeat: ``count`` times ``period`` units from ``first`` on."""

    first: int
    period: int
    count: int

    @property
    def dropped(self) -> range:
        """The units that are left out: all repetitions but the first ones that are kept."""
        return range(self.first + _KEPT * self.period, self.first + self.count * self.period)


def shorten(
    captured: Captured, chain: Chain, detail: Callable[[str], Hashable] = lambda name: None
) -> Shortened | None:
    """Return the model with three of the layers that are alike; None if it has no more.

    Layers are alike if they compute the same of what crosses, with parameters of the same shapes.

    detail: what else parameters of layers that are alike have in common, by name.
    """
    run = _longest(_unit_keys(captured, chain, detail))
    if run is None:
        return None
    template = run.first + (_KEPT - 2) * run.period
    unit_of = []
    for unit in range(len(chain.units)):
        if unit in run.dropped:
            unit_of.append(template + (unit - run.first) % run.period)
        else:
            unit_of.append(unit - len(run.dropped) * (unit >= run.dropped.stop))
    return Shortened(_without(captured, chain, run.dropped), chain.names, tuple(unit_of))


def _longest(keys: Sequence[Hashable]) -> _Repetition | None:
    """Return the repetition that saves most units, None if none saves any."""
    best = None
    for period in range(1, min(_LONGEST, len(keys) // _KEPT) + 1):
        first = 0
        for unit in range(period, len(keys) + 1):
            if unit < len(keys) and keys[unit] == keys[unit - period]:
                continue
            run = _Repetition(first, period, (unit - first) // period)
            if run.dropped and (best is None or len(run.dropped) > len(best.dropped)):
                best = run
            first = unit - period + 1
    return best


def _unit_keys(
    captured: Captured, chain: Chain, detail: Callable[[str], Hashable]
) -> list[Hashable]:
    """Return a key of each unit; equal ones compute the same of what crosses to them."""
    users: dict[str, int] = {}
    for names in chain.parameters:
        for name in names:
            users[name] = users.get(name, 0) + 1
    shared = _SharedValues(captured)

    def elsewhere(node: Node) -> Hashable:
        if chain.kinds[node] != "param":
            return shared.key(node)
        name = str(node.target)
        if users.get(name, 0) > 1:
            return name  # other units have the very same
        return (
            captured.shapes[name],
            captured.dtypes[name],
            name in captured.trainable,
            name in captured.untouched,
            repr(captured.four_bit.get(name)),
            detail(name),
        )

    keys = []
    for index, nodes in enumerate(chain.units):
        before = chain.crossing[index - 1] if index else ()
        leaving = chain.crossing[index] if index < len(chain.crossing) else ()
        keys.append(_unit_key(nodes, before, leaving, elsewhere))
    return keys


def _unit_key(
    nodes: Sequence[Node],
    before: Sequence[Node],
    leaving: Sequence[Node],
    elsewhere: Callable[[Node], Hashable],
) -> Hashable:
    """Return a key of a unit.

    before:    what enters it.
    leaving:   what it passes on.
    elsewhere: a key of whatever is none of its nodes and does not enter it.
    """
    entering = {node: place for place, node in enumerate(before)}
    own = {node: place for place, node in enumerate(nodes)}
    others: dict[Node, int] = {}

    def value(node: Node) -> Hashable:
        if node in own:
            return "own", own[node]
        if node in entering:
            return "entering", entering[node]
        # which of the unit's it is, and what it is like
        return others.setdefault(node, len(others)), elsewhere(node)

    return tuple(_node_key(node, value) for node in nodes), tuple(map(value, leaving))


def _node_key(node: Node, value: Callable[[Node], Hashable]) -> Hashable:
    def named(x: Node) -> Any:
        return _Value(value(x))

    arguments = map_arg((node.args, node.kwargs), named)
    return node.op, node.target, repr(arguments), _described(node.meta.get("val"))


class _Value:
    """A key in the place of a node, which prints as it."""

    def __init__(self, key: Hashable):
        self._key = key

    def __repr__(self) -> str:
        return repr(self._key)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.stride()} {value.dtype}"
    if isinstance(value, (tuple, list)):
        return repr([_described(each) for each in value])
    return repr(value)


class _SharedValues:
    """Values that every stage computes by itself; equal ones have the same number."""

    def __init__(self, captured: Captured):
        self._module = captured.module
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[Node, int] = {}

    def key(self, node: Node) -> int:
        if node not in self._known:
            made: Hashable
            if node.op == "get_attr":
                made = self._constant(node)
            elif node.op == "placeholder":
                made = node.target
            else:
                made = _node_key(node, self.key)
            self._known[node] = self._numbers.setdefault(made, len(self._numbers))
        return self._known[node]

    def _constant(self, node: Node) -> Hashable:
        value: Any = self._module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        # a fake tensor, or one of a class of its own, has no bytes to compare
        if type(value) is torch.Tensor and not value.is_meta:
            flat = value.detach().cpu().contiguous().flatten()
            return (
                "constant",
                tuple(value.shape),
                value.dtype,
                flat.view(torch.uint8).numpy().tobytes(),
            )
        return "constant", str(node.target)


def _without(captured: Captured, chain: Chain, dropped: range) -> Captured:
    """Return the model without some units, of which the ones before and the last are alike."""
    left_out = {node for unit in dropped for node in chain.units[unit]}
    copies: dict[Node, Node] = {}
    instead = dict(
        zip(chain.crossing[dropped.stop - 1], chain.crossing[dropped.start - 1], strict=True)
    )

    def copy_of(node: Node) -> Node:
        return copies[instead.get(node, node) if node in left_out else node]

    graph = Graph()
    for node in captured.module.graph.nodes:
        if node not in left_out:
            copies[node] = graph.node_copy(node, copy_of)
    # what only these read: parameters, and masks or tables that each layer makes for itself
    for node in reversed(graph.nodes):
        if not node.users and node.op in ("get_attr", "call_function") and not node.is_impure():
            graph.erase_node(node)
    read = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    return replace(
        captured,
        module=GraphModule(captured.module, graph),
        shapes=_of(captured.shapes, read),
        dtypes=_of(captured.dtypes, read),
        trainable=captured.trainable & read,
        untouched=captured.untouched & read,
        four_bit=_of(captured.four_bit, read),
        aliases={name: own for name, own in captured.aliases.items() if own in read},
        buffers=tuple(name for name in captured.buffers if name in read),
        guards=None,
        origin=None,
    )


def _of(values: Mapping[str, V], names: set[str]) -> dict[str, V]:
    return {name: value for name, value in values.items() if name in names}
