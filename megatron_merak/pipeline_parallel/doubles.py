"""Which numbers the compiled code, which uses doubles, adds up exactly like Python."""

from collections.abc import Iterable
from math import inf

_LARGEST = 1e200
_LARGEST_INT = 2**40


def are_doubles(values: Iterable[object], unbounded: bool = False) -> bool:
    """Whether these are floats with finite sums, or ints whose sums are doubles. unbounded:
    infinity is accepted.
    """
    most = inf if unbounded else _LARGEST
    return all(
        abs(value) <= most
        if isinstance(value, float)
        else isinstance(value, int) and abs(value) <= _LARGEST_INT
        for value in values
    )
