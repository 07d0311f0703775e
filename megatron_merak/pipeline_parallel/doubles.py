"""Which numbers the compiled cores add up just as Python does: theirs are doubles."""

from collections.abc import Iterable
from math import inf

_LARGEST, _LARGEST_INT = 1e200, 2**40


def are_doubles(values: Iterable[object], unbounded: bool = False) -> bool:
    """Whether these are floats whose sums stay finite, or ints whose sums are doubles. `unbounded`: or infinity."""
    most = inf if unbounded else _LARGEST
    return all(
        abs(value) <= most if isinstance(value, float) else isinstance(value, int) and abs(value) <= _LARGEST_INT
        for value in values
    )
