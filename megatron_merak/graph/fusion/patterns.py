"""Patterns for subgraphs, matched backwards from their last node.

A pattern is a ``Call``, a ``Var``, an ``Either``, a ``Cast``, a list of patterns, or a constant.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._ops import OpOverload
from torch.fx import Node

from ..ir.nodes import is_op, operand
from ..ir.operators import facts


@dataclass(frozen=True)
class Var:
    """Matches any value; every ``Var`` of the same name must match the same value."""

    name: str


@dataclass(frozen=True)
class Call:
    """Matches a node that calls one of ``names`` with ``args``.

    args:     patterns of the leading arguments, in the order of the operator's schema with defaults
              filled in.
    commutes: whether the first two arguments may come in either order.
    """

    names: tuple[str, ...]
    args: tuple
    commutes: bool = False


@dataclass(frozen=True)
class Either:
    """Matches what any of several patterns matches; earlier ones are tried first."""

    patterns: tuple


@dataclass(frozen=True)
class Cast:
    """Matches ``pattern`` followed by any number of floating-point casts to wider dtypes, or to
    narrower ones.

    Casts in the other direction do not match: a model that narrows a value that the fused operation
    would not narrow, such as one written for fp32 that runs in fp64, is left as it is.
    """

    pattern: Any
    widens: bool


@dataclass(frozen=True)
class Match:
    """One way in which a pattern matches.

    values: the value of each ``Var``, by name.
    nodes:  the nodes that the pattern's calls and casts match.
    """

    values: dict[str, Any] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def widened(pattern: Any) -> Cast:
    return Cast(pattern, True)


def narrowed(pattern: Any) -> Cast:
    return Cast(pattern, False)


def call(name: str, *args: Any, commutes: bool = False) -> Call:
    return Call(tuple(name.split("|")), args, commutes)


def add(a: Any, b: Any) -> Call:
    return call("add", a, b, 1, commutes=True)  # 1: alpha


def mul(a: Any, b: Any) -> Call:
    return call("mul", a, b, commutes=True)


def matches(pattern: Any, value: Any, match: Match = Match()) -> Iterator[Match]:
    """Yield every way in which ``pattern`` matches ``value``, consistent with ``match`` so far."""
    if isinstance(pattern, Var):
        if pattern.name not in match.values:
            yield Match({**match.values, pattern.name: value}, match.nodes)
        elif _same(match.values[pattern.name], value):
            yield match
    elif isinstance(pattern, Either):
        for each in pattern.patterns:
            yield from matches(each, value, match)
    elif isinstance(pattern, Cast):
        if isinstance(value, Node) and facts(value).converts and _converts(value, pattern.widens):
            yield from matches(pattern, value.args[0], Match(match.values, (*match.nodes, value)))
        yield from matches(pattern.pattern, value, match)
    elif isinstance(pattern, Call):
        if is_op(value, *pattern.names):
            yield from _match_call(pattern, value, Match(match.values, (*match.nodes, value)))
    elif isinstance(pattern, list):
        if isinstance(value, list | tuple) and len(value) == len(pattern):
            yield from _match_all(pattern, value, match)
    elif _same(pattern, value):
        yield match


def _converts(cast: Node, widens: bool) -> bool:
    before = operand(cast).meta["val"].dtype
    after = cast.meta["val"].dtype
    if not (before.is_floating_point and after.is_floating_point):
        return False
    return after.itemsize >= before.itemsize if widens else after.itemsize <= before.itemsize


def _match_call(pattern: Call, node: Node, match: Match) -> Iterator[Match]:
    args = arguments(node)[: len(pattern.args)]
    if len(args) < len(pattern.args):
        return
    yield from _match_all(pattern.args, args, match)
    if pattern.commutes:
        yield from _match_all(pattern.args, (args[1], args[0], *args[2:]), match)


def _match_all(patterns: Sequence, values: Sequence, match: Match) -> Iterator[Match]:
    if not patterns:
        yield match
        return
    for each in matches(patterns[0], values[0], match):
        yield from _match_all(patterns[1:], values[1:], each)


def arguments(node: Node) -> tuple:
    """Return all arguments of a node in the order of its operator's schema; of a function, those
    given by position.
    """
    if not isinstance(node.target, OpOverload):
        return node.args
    schema = node.target._schema.arguments
    return tuple(
        node.args[i] if i < len(node.args) else node.kwargs.get(each.name, each.default_value)
        for i, each in enumerate(schema)
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Node) or isinstance(b, Node):
        return a is b
    # True == 1: without the first half ``alpha=1`` would match a flag
    return isinstance(a, bool) == isinstance(b, bool) and a == b
