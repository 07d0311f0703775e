"""Measured times of messages and collectives by size, and the link that explains them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from megatron_merak.cluster.device import Link
from megatron_merak.errors import ConfigError

INSIDE = "inside"
BETWEEN = "between"
ALL_REDUCE = "all-reduce"
ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
MESSAGE = "message"
_CHOICES = {
    "where": (INSIDE, BETWEEN),
    "what": (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, MESSAGE),
}
_REMEDY = "Measure it again by merak-probe"
_ROUNDS = 12  # of least squares, each with the weights that the one before says


@dataclass(frozen=True)
class LinkTime:
    """One collective, or one message, of one size.

    where:   "inside" a node, or "between" nodes with one rank in each.
    what:    "all-reduce", "all-gather", "reduce-scatter" or "message".
    ranks:   of the group.
    size:    bytes: all of an all-reduce and of a message, one rank's shard of the others.
    seconds: on the slowest rank.
    """

    where: str
    what: str
    ranks: int
    size: float
    seconds: float

    @property
    def parts(self) -> tuple[float, float]:
        """How many latencies of a link it has, and how many bytes pass it, as the cost table counts."""
        others = self.ranks - 1
        if self.what == MESSAGE:
            return 1, self.size
        if self.what == ALL_REDUCE:
            return 2 * others, 2 * others / self.ranks * self.size
        return others, others * self.size


def fitted(times: Sequence[LinkTime], where: str) -> Link | None:
    """Return the link with which the cost table comes nearest to what was measured there; None where
    nothing was.
    """
    rows = [(*time.parts, time.seconds) for time in times if time.where == where]
    if not rows:
        return None
    latency, each = explained(rows)
    return Link(f"measured {where}", latency, 1 / each)


def explained(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the seconds of one thing, 0 or more, and of another, more than 0, whose sums come
    nearest to measured times: twice as long is as far off as half as long.

    rows: how many there are of the one, and of the other, and the time that both took.
    """
    predicted = [took for _, _, took in rows]
    first, second = 0.0, 0.0
    for _ in range(_ROUNDS):
        weights = [_weight(now, took) for now, (_, _, took) in zip(predicted, rows, strict=True)]
        first, second = _least_squares(rows, weights)
        predicted = [one * first + other * second for one, other, _ in rows]
    return first, second


def _weight(predicted: float, took: float) -> float:
    """Return the weight with which a square of seconds counts as that of a logarithm's difference."""
    apart = predicted - took
    close = abs(apart) < 1e-6 * took
    return 1 / took**2 if close else math.log(predicted / took) / (apart * predicted)


def _least_squares(
    rows: Sequence[tuple[float, float, float]], weights: Sequence[float]
) -> tuple[float, float]:
    weighted = [(*row, weight) for row, weight in zip(rows, weights, strict=True)]
    xx = sum(weight * one * one for one, _, _, weight in weighted)
    xy = sum(weight * one * other for one, other, _, weight in weighted)
    yy = sum(weight * other * other for _, other, _, weight in weighted)
    x = sum(weight * one * took for one, _, took, weight in weighted)
    y = sum(weight * other * took for _, other, took, weight in weighted)
    determinant = xx * yy - xy * xy
    if determinant > 1e-9 * xx * yy:
        first = (x * yy - y * xy) / determinant
        second = (y * xx - x * xy) / determinant
        if first >= 0 and second > 0:
            return first, second
    return 0.0, y / yy


def link_times_of(content: Any, where: str) -> tuple[LinkTime, ...]:
    """Parse times from JSON. ``where`` names them in errors. Raises ConfigError."""
    if not isinstance(content, list):
        raise ConfigError(where, repr(content)[:60], "it is not a list", _REMEDY)
    names = [field.name for field in fields(LinkTime)]
    for place, row in enumerate(content):
        own = f"{where}: row {place}"
        if not isinstance(row, dict) or row.keys() != {*names}:
            reason = f"it has not the keys {', '.join(names)}"
            raise ConfigError(own, repr(row)[:60], reason, _REMEDY)
        for name, value in row.items():
            if reason := _mistake(name, value):
                raise ConfigError(f"{own}: {name}", repr(value), reason, _REMEDY)
    return tuple(LinkTime(**row) for row in content)


def _mistake(name: str, value: Any) -> str:
    """Return what is wrong with a value of a row; empty: nothing."""
    if name in _CHOICES:
        known = _CHOICES[name]
        return "" if value in known else f"it is none of {', '.join(known)}"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "ranks":
        whole = number and value == int(value) and value >= 2
        return "" if whole else "it is not a whole number of at least 2"
    return "" if number and 0 < value < math.inf else "it is not a finite number above 0"
