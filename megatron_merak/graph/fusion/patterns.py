"""A small language for pieces of a graph: patterns that are matched backwards from the node that ends them.

A pattern is a ``Call``, an ``Any``, an ``Either``, a list of patterns, or a number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any as Value

from torch._ops import OpOverload
from torch.fx import Node

from ..ir.nodes import is_op

_CASTS = ("to", "_to_copy", "type_as")


@dataclass(frozen=True)
class Any:
    """Any value; where the name occurs again, the same value."""

    name: str


@dataclass(frozen=True)
class Call:
    """A node that calls one of ``names`` with ``args`` (in the operator's own order, defaults filled in).

    Arguments beyond ``args`` are not looked at. ``commutes``: the first two may come in either order.
    """

    names: tuple[str, ...]
    args: tuple
    commutes: bool = False


@dataclass(frozen=True)
class Either:
    """The first of several patterns that fits."""

    patterns: tuple


@dataclass(frozen=True)
class Cast:
    """``pattern``, behind any number of conversions of floating-point type: to wider ones, or to narrower ones.

    A model that narrows what we would keep, as one written for fp32 does when it runs in fp64, is left as it is.
    """

    pattern: Value
    widens: bool


@dataclass(frozen=True)
class Found:
    """values: of the ``Any`` in the pattern, by name. nodes: those that the pattern's calls stand for."""

    values: dict[str, Value] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()

    def __getitem__(self, name: str) -> Value:
        return self.values[name]


def widened(pattern: Value) -> Cast:
    return Cast(pattern, True)


def narrowed(pattern: Value) -> Cast:
    return Cast(pattern, False)


def call(name: str, *args: Value, commutes: bool = False) -> Call:
    return Call(tuple(name.split("|")), args, commutes)


def add(a: Value, b: Value) -> Call:
    return call("add", a, b, 1, commutes=True)  # 1: what multiplies the second operand


def mul(a: Value, b: Value) -> Call:
    return call("mul", a, b, commutes=True)


def match(pattern: Value, value: Value, found: Found = Found()) -> Iterator[Found]:
    """Every way in which ``pattern`` fits ``value``."""
    if isinstance(pattern, Any):
        if pattern.name not in found.values:
            yield Found({**found.values, pattern.name: value}, found.nodes)
        elif _same(found.values[pattern.name], value):
            yield found
    elif isinstance(pattern, Either):
        for each in pattern.patterns:
            yield from match(each, value, found)
    elif isinstance(pattern, Cast):
        if is_op(value, *_CASTS) and _converts(value, pattern.widens):
            yield from match(pattern, value.args[0], Found(found.values, (*found.nodes, value)))
        yield from match(pattern.pattern, value, found)
    elif isinstance(pattern, Call):
        if is_op(value, *pattern.names):
            yield from _match_call(pattern, value, Found(found.values, (*found.nodes, value)))
    elif isinstance(pattern, list):
        if isinstance(value, list | tuple) and len(value) == len(pattern):
            yield from _match_all(pattern, value, found)
    elif _same(pattern, value):
        yield found


def _converts(cast: Node, widens: bool) -> bool:
    before, after = cast.args[0].meta["val"].dtype, cast.meta["val"].dtype
    if not (before.is_floating_point and after.is_floating_point):
        return False
    return after.itemsize >= before.itemsize if widens else after.itemsize <= before.itemsize


def _match_call(pattern: Call, node: Node, found: Found) -> Iterator[Found]:
    args = arguments(node)[: len(pattern.args)]
    if len(args) < len(pattern.args):
        return
    yield from _match_all(pattern.args, args, found)
    if pattern.commutes:
        yield from _match_all(pattern.args, (args[1], args[0], *args[2:]), found)


def _match_all(patterns: Sequence, values: Sequence, found: Found) -> Iterator[Found]:
    if not patterns:
        yield found
        return
    for each in match(patterns[0], values[0], found):
        yield from _match_all(patterns[1:], values[1:], each)


def arguments(node: Node) -> tuple:
    """All arguments of a node in the order of its operator's schema; of a plain function those given by position."""
    if not isinstance(node.target, OpOverload):
        return node.args
    schema = node.target._schema.arguments
    return tuple(
        node.args[i] if i < len(node.args) else node.kwargs.get(each.name, each.default_value)
        for i, each in enumerate(schema)
    )


def _same(a: Value, b: Value) -> bool:
    if isinstance(a, Node) or isinstance(b, Node):
        return a is b
    return isinstance(a, bool) == isinstance(b, bool) and a == b
