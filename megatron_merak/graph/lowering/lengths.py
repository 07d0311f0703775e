"""Parts for batches of any length, from those of two: the same code, its numbers that differ as arguments.

    length 64   view(x, [1, 64, 4, 16])   slice(table, 2, 0, 65)
    length 96   view(x, [1, 96, 4, 16])   slice(table, 2, 0, 97)
    length n    view(x, [1, n, 4, 16])    slice(table, 2, 0, n + 1)

Two lengths tell a number that is a whole multiple of the length plus another. That all of them are, and for which other
lengths the code is the model's, ``capture.lengths`` tells.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ...segment import Crossing
from .split import Part, Parts

Line = tuple[int, int]  # (times, plus): of a length


class _UnlikeError(Exception):
    """The two programs differ by more than their numbers."""


class _Code:
    """Two graphs that are the same but for numbers, as one that takes these: ``numbers``, in the order of arguments."""

    def __init__(self, one: GraphModule, other: GraphModule, lengths: tuple[int, int]):
        self.lengths, self.numbers = lengths, dict[Line, Node]()
        self.graph = Graph()
        self._made: dict[Node, Node] = {}
        self._twin: dict[Node, Node] = {}
        for a, b in zip(one.graph.nodes, other.graph.nodes, strict=True):
            _same(a.op, b.op)
            if a.op != "placeholder":
                _same(a.target, b.target)
            if a.op == "get_attr":
                self._same_region(getattr(one, str(a.target)), getattr(other, str(b.target)))
            args, kwargs = self._merged(a.args, b.args), self._merged(a.kwargs, b.kwargs)
            self._made[a] = self.graph.create_node(a.op, a.target, args, kwargs, a.name)
            self._twin[b] = a
        self.run = GraphModule(one, self.graph).forward if self.numbers else one.forward

    def __call__(self, length: int) -> Callable:
        return partial(self.run, *(times * length + plus for times, plus in self.numbers)) if self.numbers else self.run

    def _same_region(self, one: Any, other: Any) -> None:
        if not isinstance(one, GraphModule) or _Code(one, other, self.lengths).numbers:
            raise _UnlikeError

    def _merged(self, a: Any, b: Any) -> Any:
        _same(type(a), type(b))
        if isinstance(a, Node):
            _same(self._twin.get(b), a)
            return self._made[a]
        if isinstance(a, list | tuple):
            merged = [self._merged(*pair) for pair in zip(a, b, strict=True)]
            return merged if isinstance(a, list) else tuple(merged)
        if isinstance(a, dict):
            _same(a.keys(), b.keys())
            return {key: self._merged(a[key], b[key]) for key in a}
        if isinstance(a, slice):
            return slice(*(self._merged(getattr(a, k), getattr(b, k)) for k in ("start", "stop", "step")))
        if type(a) is int and a != b:
            return self._number(_line(a, b, self.lengths))
        _same(a, b)
        return a

    def _number(self, line: Line) -> Node:
        if line not in self.numbers:
            last = next(reversed(self.numbers.values()), None)
            with self.graph.inserting_after(last) if last else self.graph.inserting_before():
                self.numbers[line] = self.graph.placeholder(f"number_{len(self.numbers)}")
        return self.numbers[line]


def _line(a: int, b: int, lengths: tuple[int, int]) -> Line:
    """What gives ``a`` for one length and ``b`` for the other."""
    times, rest = divmod(b - a, lengths[1] - lengths[0])
    if rest:
        raise _UnlikeError
    return times, a - times * lengths[0]


@dataclass(frozen=True, eq=False)
class AnyLength:
    """Makes the parts of a range of units for a length: those of ``parts`` with other numbers in their code.

    codes: of each part; first, then: of their prelude. sources, targets: of each crossing value, its extents.
    """

    parts: Parts
    codes: tuple[_Code, ...]
    first: _Code
    then: _Code
    sources: tuple[tuple[Line, ...], ...]
    targets: tuple[tuple[Line, ...], ...]

    def __call__(self, length: int) -> Parts:
        parts = tuple(replace(part, code=code(length)) for part, code in zip(self.parts.parts, self.codes, strict=True))
        prelude = self.parts.prelude.with_code(self.first(length), self.then(length))
        sources, targets = (
            tuple(
                replace(value, shape=tuple(t * length + p for t, p in lines))
                for value, lines in zip(*border, strict=True)
            )
            for border in ((self.parts.sources, self.sources), (self.parts.targets, self.targets))
        )
        return replace(self.parts, parts=parts, prelude=prelude, sources=sources, targets=targets)


def any_length(parts: Parts, length: int, other: Parts, other_length: int) -> AnyLength | None:
    """From the parts of two captures, of batches of these lengths; None where they are not the same work."""
    lengths, one, two = (length, other_length), parts.prelude, other.prelude
    try:
        for a, b in zip(parts.parts, other.parts, strict=True):
            _same(*([getattr(each, f.name) for f in fields(Part) if f.name != "code"] for each in (a, b)))
        _same((parts.results, parts.named), (other.results, other.named))
        _same((one.names, one.reads, one.device), (two.names, two.reads, two.device))
        for a, b in zip(one.constants, two.constants, strict=True):
            _same_tensor(a, b)
        codes = tuple(_code(a.code, b.code, lengths) for a, b in zip(parts.parts, other.parts, strict=True))
        prelude = _code(one.first, two.first, lengths), _code(one.then, two.then, lengths)
        sources, targets = (
            _border(parts.sources, other.sources, lengths),
            _border(parts.targets, other.targets, lengths),
        )
    except (_UnlikeError, ValueError):  # of zip, for different counts
        return None
    return AnyLength(parts, codes, *prelude, sources, targets)


def _code(one: Callable, other: Callable, lengths: tuple[int, int]) -> _Code:
    """Of two functions that an Emitter wrote, methods of graph modules."""
    return _Code(one.__self__, other.__self__, lengths)  # type: ignore[attr-defined]


def _border(
    one: tuple[Crossing, ...], other: tuple[Crossing, ...], lengths: tuple[int, int]
) -> tuple[tuple[Line, ...], ...]:
    found = []
    for a, b in zip(one, other, strict=True):
        _same((a.name, a.dtype, a.grad), (b.name, b.dtype, b.grad))
        found.append(tuple(_line(*pair, lengths) for pair in zip(a.shape, b.shape, strict=True)))
    return tuple(found)


def _same(one: object, other: object) -> None:
    if one != other:
        raise _UnlikeError


def _same_tensor(one: Tensor, other: Tensor) -> None:
    if one is not other and not (one.dtype == other.dtype and torch.equal(one, other)):
        raise _UnlikeError
