"""Generalizes the parts of captures at two sequence lengths to any length.

The code of both is the same but for integers that differ. These become arguments, affine functions
of the length:

    length 64   view(x, [1, 64, 4, 16])   slice(table, 2, 0, 65)
    length 96   view(x, [1, 96, 4, 16])   slice(table, 2, 0, 97)
    length n    view(x, [1, n, 4, 16])    slice(table, 2, 0, n + 1)

Two lengths determine an affine function, but not that a number is one. ``capture.lengths``
determines whether all of them are, and for which other lengths the model runs the same code.
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

Affine = tuple[int, int]  # (factor, offset): factor * length + offset


class _DifferError(Exception):
    """The two graphs differ by more than integers that are affine in the length."""


class _Code:
    """One graph from two that differ only in integers, which it takes as its first arguments.

    numbers: each such integer -> its placeholder, in the order of the arguments.
    """

    def __init__(self, one: GraphModule, other: GraphModule, lengths: tuple[int, int]):
        self.lengths = lengths
        self.numbers = dict[Affine, Node]()
        self.graph = Graph()
        self._merged_nodes: dict[Node, Node] = {}
        self._counterpart: dict[Node, Node] = {}
        for a, b in zip(one.graph.nodes, other.graph.nodes, strict=True):
            _same(a.op, b.op)
            if a.op != "placeholder":
                _same(a.target, b.target)
            if a.op == "get_attr":
                self._same_region(getattr(one, str(a.target)), getattr(other, str(b.target)))
            args = self._merged(a.args, b.args)
            kwargs = self._merged(a.kwargs, b.kwargs)
            self._merged_nodes[a] = self.graph.create_node(a.op, a.target, args, kwargs, a.name)
            self._merged_nodes[a].meta = dict(a.meta)
            self._counterpart[b] = a
        self.run = GraphModule(one, self.graph).forward if self.numbers else one.forward

    def __call__(self, length: int) -> Callable:
        numbers = [factor * length + offset for factor, offset in self.numbers]
        return partial(self.run, *numbers) if numbers else self.run

    def _same_region(self, one: Any, other: Any) -> None:
        if not isinstance(one, GraphModule) or _Code(one, other, self.lengths).numbers:
            raise _DifferError

    def _merged(self, a: Any, b: Any) -> Any:
        _same(type(a), type(b))
        if isinstance(a, Node):
            _same(self._counterpart.get(b), a)
            return self._merged_nodes[a]
        if isinstance(a, list | tuple):
            merged = [self._merged(*pair) for pair in zip(a, b, strict=True)]
            if hasattr(a, "_fields"):  # a named tuple, of which an operation reads the names
                return type(a)(*merged)
            return merged if isinstance(a, list) else tuple(merged)
        if isinstance(a, dict):
            _same(a.keys(), b.keys())
            return {key: self._merged(a[key], b[key]) for key in a}
        if isinstance(a, slice):
            return slice(
                *(self._merged(getattr(a, k), getattr(b, k)) for k in ("start", "stop", "step"))
            )
        if type(a) is int and a != b:
            return self._number(_affine(a, b, self.lengths))
        _same(a, b)
        return a

    def _number(self, affine: Affine) -> Node:
        if affine not in self.numbers:
            last = next(reversed(self.numbers.values()), None)
            with self.graph.inserting_after(last) if last else self.graph.inserting_before():
                self.numbers[affine] = self.graph.placeholder(f"number_{len(self.numbers)}")
        return self.numbers[affine]


def _affine(a: int, b: int, lengths: tuple[int, int]) -> Affine:
    """Return the affine function that is ``a`` at the first length and ``b`` at the second."""
    factor, rest = divmod(b - a, lengths[1] - lengths[0])
    if rest:
        raise _DifferError
    return factor, a - factor * lengths[0]


@dataclass(frozen=True, eq=False)
class AnyLength:
    """Returns, for a sequence length, the parts of a range of units: those of ``parts`` with other
    numbers.

    codes:            the code of each part.
    first, then:      the code of the prelude.
    once, varying:    the code of the lookups.
    sources, targets: for each crossing value, its extents as functions of the length.
    """

    parts: Parts
    codes: tuple[_Code, ...]
    first: _Code
    then: _Code
    once: _Code
    varying: _Code
    sources: tuple[tuple[Affine, ...], ...]
    targets: tuple[tuple[Affine, ...], ...]

    def __call__(self, length: int) -> Parts:
        parts = tuple(
            replace(part, code=code(length))
            for part, code in zip(self.parts.parts, self.codes, strict=True)
        )
        prelude = self.parts.prelude.with_code(self.first(length), self.then(length))
        lookups = self.parts.lookups.with_code(self.once(length), self.varying(length))
        sources, targets = (
            tuple(
                replace(value, shape=tuple(factor * length + offset for factor, offset in extents))
                for value, extents in zip(*border, strict=True)
            )
            for border in ((self.parts.sources, self.sources), (self.parts.targets, self.targets))
        )
        return replace(
            self.parts,
            parts=parts,
            prelude=prelude,
            lookups=lookups,
            sources=sources,
            targets=targets,
        )


def any_length(parts: Parts, length: int, other: Parts, other_length: int) -> AnyLength | None:
    """Generalize the parts of two captures with these lengths; None if their code differs by more
    than numbers.
    """
    lengths = (length, other_length)
    one = parts.prelude
    two = other.prelude
    numbers = parts.lookups
    others = other.lookups
    try:
        for a, b in zip(parts.parts, other.parts, strict=True):
            _same(
                *(
                    [getattr(each, f.name) for f in fields(Part) if f.name != "code"]
                    for each in (a, b)
                )
            )
        _same((parts.results, parts.named), (other.results, other.named))
        _same((one.names, one.reads, one.device), (two.names, two.reads, two.device))
        _same(*((each.fixed, each.varying, each.reads) for each in (numbers, others)))
        for a, b in zip(
            (*one.constants, *numbers.constants), (*two.constants, *others.constants), strict=True
        ):
            _same_tensor(a, b)
        codes = tuple(
            _code(a.code, b.code, lengths) for a, b in zip(parts.parts, other.parts, strict=True)
        )
        return AnyLength(
            parts=parts,
            codes=codes,
            first=_code(one.first, two.first, lengths),
            then=_code(one.then, two.then, lengths),
            once=_code(numbers.once, others.once, lengths),
            varying=_code(numbers.then, others.then, lengths),
            sources=_border(parts.sources, other.sources, lengths),
            targets=_border(parts.targets, other.targets, lengths),
        )
    except (_DifferError, ValueError):  # zip raises ValueError for different counts
        return None


def _code(one: Callable, other: Callable, lengths: tuple[int, int]) -> _Code:
    """Merge two functions from ``Emitter.finish``, which are methods of graph modules."""
    return _Code(one.__self__, other.__self__, lengths)  # type: ignore[attr-defined]


def _border(
    one: tuple[Crossing, ...], other: tuple[Crossing, ...], lengths: tuple[int, int]
) -> tuple[tuple[Affine, ...], ...]:
    extents = []
    for a, b in zip(one, other, strict=True):
        _same((a.name, a.dtype, a.grad), (b.name, b.dtype, b.grad))
        extents.append(
            tuple(_affine(*pair, lengths) for pair in zip(a.shape, b.shape, strict=True))
        )
    return tuple(extents)


def _same(one: object, other: object) -> None:
    if one != other:
        raise _DifferError


def _same_tensor(one: Tensor, other: Tensor) -> None:
    if one is not other and not (one.dtype == other.dtype and torch.equal(one, other)):
        raise _DifferError
