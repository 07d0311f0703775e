"""JSON from files that anybody may have written: numbers that can be computed with, text that can
be printed.
"""

import json
import math
from typing import Any

_LARGEST_INTEGER = 2**63
_LARGEST = 1e30  # of numbers with a fraction: products of several of them are finite
_SHOWN = 40


def not_text(value: str) -> str | None:
    """Return why a text cannot be a path, a message or a line of a file; None for any other."""
    if "\0" in value:
        return "holds a NUL character"
    return "is not UTF-8" if any("\ud800" <= letter <= "\udfff" for letter in value) else None


def parse(text: str, finite: bool = True) -> Any:
    """Return what a JSON text describes.

    text:   of a file.
    finite: whether NaN and Infinity, which Python writes, are mistakes.

    Raises ValueError for what is no JSON or nested too deep, for objects with a name twice, for
    numbers too large to compute with, and for strings with NUL characters or halves of surrogate
    pairs.
    """

    def number(digits: str) -> float:
        value = float(digits)
        if abs(value) > _LARGEST and (finite or math.isinf(value)):
            raise ValueError(f"{digits[:_SHOWN]} is too large a number")
        return value

    def integer(digits: str) -> int:
        value = int(digits) if len(digits) <= _SHOWN else _LARGEST_INTEGER
        if abs(value) >= _LARGEST_INTEGER:
            raise ValueError(f"{digits[:_SHOWN]} is too large a number")
        return value

    def constant(name: str) -> float:
        if finite:
            raise ValueError(f"{name} is not a number")
        return float(name)

    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_float=number,
            parse_int=integer,
            parse_constant=constant,
        )
        _check_texts(value)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; the last of two equal names would hide the first."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"{twice[:_SHOWN]!r} is there twice in one object")
    return found


def _check_texts(value: Any) -> None:
    if isinstance(value, str):
        if (reason := not_text(value)) is not None:
            raise ValueError(f"{value[:_SHOWN]!r} {reason}")
    elif isinstance(value, dict):
        for key, each in value.items():
            _check_texts(key)
            _check_texts(each)
    elif isinstance(value, list):
        for each in value:
            _check_texts(each)
