"""Parts of batches of further lengths, made from those of two that were captured instead of another capture.

The third length of otherwise equal batches is traced with the length as a symbol (``graph.capture.lengths``). Where
that trace is the captured one, each later length that meets its conditions costs no trace. Any other is captured.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import combinations

from ..graph.capture.captured import Captured, Origin
from ..graph.capture.lengths import Axes, Lengths
from ..graph.lowering.lengths import AnyLength, any_length
from ..graph.lowering.split import Parts

Shapes = tuple[tuple[str, tuple[int, ...], object], ...]  # of ``traced.shapes_of``
Explore = Callable[[Axes, Origin, int], Lengths | None]
KEPT = 8  # captures of a kind, the last ones, that another length is compared with


@dataclass(frozen=True, eq=False)
class _Known:
    shapes: Shapes
    origin: Origin
    parts: Parts


@dataclass(eq=False)
class _Kind:
    """Batches that differ in shapes only, in one role. families: those that differ in one length -> how these are made,
    None where they are not."""

    known: list[_Known] = field(default_factory=list)
    families: dict[Hashable, tuple[AnyLength, Lengths] | None] = field(default_factory=dict)


class KnownLengths:
    """What was captured of a model, by role: training or evaluation, its outputs, the stage."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}
        self.captured = self.made = 0

    def add(self, role: Hashable, shapes: Shapes, captured: Captured, parts: Parts) -> None:
        self.captured += 1
        if captured.guards is None and captured.origin is not None:
            known = self._kinds.setdefault(role, _Kind()).known
            known.append(_Known(shapes, captured.origin, parts))
            del known[:-KEPT]

    def parts(self, role: Hashable, shapes: Shapes, explore: Explore) -> Parts | None:
        """The parts of batches with ``shapes``, where those of two other lengths tell them."""
        kind = self._kinds.get(role, _Kind())
        for one, two in combinations(kind.known, 2):
            axes = _axes(one.shapes, two.shapes)
            if not axes or axes != _axes(one.shapes, shapes) or axes != _axes(two.shapes, shapes):
                continue
            family = axes, tuple(_without(shapes, axes))
            lengths = [_extent(each, axes) for each in (one.shapes, two.shapes, shapes)]
            if family not in kind.families:
                kind.families[family] = _family(one, two, lengths, axes, explore)
            if (found := kind.families[family]) and found[1].hold(lengths[2]):
                self.made += 1
                return found[0](lengths[2])
        return None


def _family(one: _Known, two: _Known, lengths: list[int], axes: Axes, explore: Explore):
    if one.origin.attempt != two.origin.attempt:
        return None
    made = any_length(one.parts, lengths[0], two.parts, lengths[1])
    holds = explore(axes, two.origin, lengths[1]) if made else None
    if made is None or holds is None or not all(map(holds.hold, lengths[:2])):
        return None
    return made, holds


def _axes(one: Shapes, other: Shapes) -> tuple[tuple[str, int], ...]:
    """Where two batches differ, if that is one length in all places; () else."""
    if [(name, len(shape), kind) for name, shape, kind in one] != [(n, len(s), k) for n, s, k in other]:
        return ()
    found, pairs = [], {}
    for (name, shape, _), (_, changed, _) in zip(one, other, strict=True):
        for dim, pair in enumerate(zip(shape, changed, strict=True)):
            if pair[0] != pair[1]:
                found.append((name, dim))
                pairs[pair] = None
    return tuple(found) if len(pairs) == 1 else ()


def _extent(shapes: Shapes, axes: Axes) -> int:
    (name, dim), *_ = axes
    return next(shape[dim] for entry, shape, _ in shapes if entry == name)


def _without(shapes: Shapes, axes: Axes):
    for name, shape, kind in shapes:
        yield name, tuple(0 if (name, dim) in axes else n for dim, n in enumerate(shape)), kind
