"""Axes of charts: labelled values, and positions of values."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

_STEPS = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True)
class Axis:
    """From ``low`` to ``high``; ``log``: logarithmic."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def around(cls, values: Iterable[float], log: bool = False, zero: bool = False) -> "Axis":
        """Return an axis with margins around ``values``. zero: start at 0 if no value is below."""
        shown = [value for value in values if value > 0] if log else list(values)
        low = min(shown, default=0.0)
        high = max(shown, default=1.0)
        if log:
            room = max(high / low, 1.5) ** 0.04
            return cls(low / room, high * room, True)
        if zero and low >= 0:
            return cls(0.0, high * 1.06 or 1.0)
        room = (high - low or abs(high) or 1.0) * 0.05
        return cls(low - room, high + room)

    def place(self, value: float) -> float:
        """Return the position of a value, from 0 (low) to 1 (high)."""
        if self.log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low or 1.0)

    def ticks(self, most: int = 5) -> list[tuple[float, str]]:
        """Return labelled values and their labels, ascending."""
        values = self._decades(most) if self.log else []
        if len(values) > 1:
            return [(value, short(value)) for value in values]
        step = self._step(most)
        first = math.ceil(self.low / step)
        last = math.floor(self.high / step)
        return [(n * step, short(n * step, step)) for n in range(first, last + 1)]

    def _step(self, most: int) -> float:
        raw = (self.high - self.low) / most or 1.0
        scale = 10.0 ** math.floor(math.log10(raw))
        return next(step * scale for step in (*_STEPS, 20) if step * scale >= raw * 0.999)

    def _decades(self, most: int) -> list[float]:
        exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            values = [factor * 10.0**exponent for exponent in exponents for factor in factors]
            values = [value for value in values if self.low <= value <= self.high]
            if len(values) <= most + 1:
                return values
        return values[:: -(-len(values) // most)]


def whole_ticks(low: int, high: int, most: int = 6) -> list[int]:
    """Return iterations to label, from ``low`` to ``high``."""
    axis = Axis(float(low), float(max(high, low + 1)))
    step = max(1, round(axis._step(most)))
    return list(range(-(-low // step) * step, high + 1, step))


def short(value: float, step: float = 0.0) -> str:
    """Return a value as an axis shows it: "0.25", "12k", "3.4M", "4e-4". step: to the next
    label.
    """
    size = abs(value)
    if size < 1e-12 or (step and size < step * 1e-6):
        return "0"
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            unit = 1e3 if letter == "k" else unit
            return f"{_digits(value / unit, step / unit)}{letter}"
    if size < 1e-2 or (step and step < 1e-3):
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return _digits(value, step)


def _digits(value: float, step: float) -> str:
    decimals = 0 if step >= 1 else min(6, max(0, -math.floor(math.log10(step)) + 1)) if step else 3
    text = f"{value:.{max(decimals, 1 if step and step % 1 else 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
