"""Derive the graph parts of batches of a new length from those of two captured lengths, without
another capture.

When a third length of otherwise equal batches comes, the model is traced with a symbolic length
(``graph.capture.lengths``). If that trace equals the captured one, every later length that meets
the conditions of the trace needs no capture. All others are captured.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from ..graph.capture.captured import Captured, Origin
from ..graph.capture.lengths import Axes, Lengths
from ..graph.lowering.lengths import AnyLength, any_length
from ..graph.lowering.split import Parts

Shapes = tuple[tuple[str, tuple[int, ...], object], ...]  # of ``traced.shapes_of``
Explore = Callable[[Axes, Origin, int], Lengths | None]
KEPT = 8  # the last captures of a kind, per remainder: a new length is derived from two of these


@dataclass(frozen=True, eq=False)
class _Capture:
    shapes: Shapes
    origin: Origin
    parts: Parts


@dataclass(eq=False)
class _Kind:
    """The captures of one role.

    families: batches that differ in one length only -> how their parts are derived; None where they
              cannot be.
    """

    captures: list[_Capture] = field(default_factory=list)
    families: dict[Hashable, tuple[AnyLength, Lengths] | None] = field(default_factory=dict)


class KnownLengths:
    """The captures of a model by role: training or evaluation, outputs, stage.

    sharers: number of parts into which ranks cut sequences, if they can. Whether they can, and how
             much of one each has, follows from the remainder and the quotient of its length:
             lengths of one remainder are derived from each other, by the quotient.

    captured, derived: how many programs were.
    """

    def __init__(self, sharers: int = 1) -> None:
        self.sharers = sharers
        self._kinds: dict[Hashable, _Kind] = {}
        self.captured = self.derived = 0

    def add(self, role: Hashable, shapes: Shapes, captured: Captured, parts: Parts) -> None:
        """Record a capture."""
        self.captured += 1
        if captured.guards is None and captured.origin is not None:
            captures = self._kinds.setdefault(role, _Kind()).captures
            captures.append(_Capture(shapes, captured.origin, parts))
            del captures[: -KEPT * self.sharers]

    def parts(self, role: Hashable, shapes: Shapes, explore: Explore) -> Parts | None:
        """The parts of batches with ``shapes``, derived from those of two other lengths; None where
        they cannot be.
        """
        kind = self._kinds.get(role, _Kind())
        for one, two in combinations(kind.captures, 2):
            axes = _axes(one.shapes, two.shapes)
            if not axes or axes != _axes(one.shapes, shapes) or axes != _axes(two.shapes, shapes):
                continue
            lengths = [_extent(each, axes) for each in (one.shapes, two.shapes, shapes)]
            remainder = lengths[2] % self.sharers
            if any(length % self.sharers != remainder for length in lengths):
                continue
            family = axes, remainder, tuple(_without(shapes, axes))
            if family not in kind.families:
                kind.families[family] = self._family(one, two, lengths[:2], axes, explore=explore)
            match = kind.families[family]
            if match and match[1].hold(lengths[2]):
                self.derived += 1
                return match[0](lengths[2] // self.sharers)
        return None

    def _family(
        self, one: _Capture, two: _Capture, lengths: list[int], axes: Axes, explore: Explore
    ) -> tuple[AnyLength, Lengths] | None:
        if one.origin.attempt != two.origin.attempt:
            return None
        first, second = (length // self.sharers for length in lengths)
        derive = any_length(one.parts, first, two.parts, second)
        conditions = explore(axes, two.origin, lengths[1]) if derive else None
        if derive is None or conditions is None or not all(map(conditions.hold, lengths)):
            return None
        return derive, conditions


def _axes(one: Shapes, other: Shapes) -> tuple[tuple[str, int], ...]:
    """The (entry, dimension) pairs in which two batches differ, if all are the same two lengths;
    else ().
    """
    if [(name, len(shape), kind) for name, shape, kind in one] != [
        (n, len(s), k) for n, s, k in other
    ]:
        return ()
    axes: list[tuple[str, int]] = []
    pairs: dict[Any, None] = {}
    for (name, shape, _), (_, changed, _) in zip(one, other, strict=True):
        for dim, pair in enumerate(zip(shape, changed, strict=True)):
            if pair[0] != pair[1]:
                axes.append((name, dim))
                pairs[pair] = None
    return tuple(axes) if len(pairs) == 1 else ()


def _extent(shapes: Shapes, axes: Axes) -> int:
    (name, dim), *_ = axes
    return next(shape[dim] for entry, shape, _ in shapes if entry == name)


def _without(shapes: Shapes, axes: Axes):
    for name, shape, kind in shapes:
        yield name, tuple(0 if (name, dim) in axes else n for dim, n in enumerate(shape)), kind
