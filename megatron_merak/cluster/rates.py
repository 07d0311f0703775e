"""Measured speeds of a device: matrix products by shape, attention by size, in FLOP per second."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from megatron_merak.errors import ConfigError


@dataclass(frozen=True)
class ProductRate:
    """The three products of a linear layer at one shape: [m, k] by [n, k] transposed, and its
    gradients of input and weight.

    m:    tokens.
    n, k: output and input features.

    Each product is 2 m n k FLOPs.
    """

    m: int
    n: int
    k: int
    dtype: str
    forward: float
    input_gradient: float
    weight_gradient: float


@dataclass(frozen=True)
class AttentionRate:
    """Causal attention at one size.

    flops:    of its forward, for half of the scores; the backward counts twice these, whatever it
              recomputes.
    length:   of the sequences.
    features: of a head.
    """

    flops: float
    length: int
    features: int
    dtype: str
    forward: float
    backward: float


@dataclass(frozen=True)
class Rates:
    """The measurements of a device, and their origin."""

    products: tuple[ProductRate, ...]
    attention: tuple[AttentionRate, ...] = ()
    source: str = ""

    def product(self, m: int, n: int, k: int, dtype: str) -> ProductRate | None:
        """Return the measured product nearest in shape, by the logarithms of its sides; None
        without one of that type.
        """
        rows = [row for row in self.products if row.dtype == dtype]
        sides = [math.log(max(side, 1)) for side in (m, n, k)]

        def away(row: ProductRate) -> float:
            return math.dist(sides, [math.log(side) for side in (row.m, row.n, row.k)])

        return min(rows, key=away, default=None)

    def attend(
        self, flops: float, dtype: str, heads: tuple[int, int] = (0, 0)
    ) -> AttentionRate | None:
        """Return the measured attention nearest in size.

        flops: of its forward; decides between rows of the same heads.
        heads: length of the sequences and features of a head, which count first, by their
               logarithms; zeros where they are not known.
        """
        rows = [row for row in self.attention if row.dtype == dtype]

        def away(row: AttentionRate) -> tuple[float, float]:
            sides = zip(heads, (row.length, row.features), strict=True)
            apart = math.hypot(*(math.log(own / other) for own, other in sides if own))
            return apart, abs(math.log(row.flops / max(flops, 1.0)))

        return min(rows, key=away, default=None)


_Row = TypeVar("_Row", ProductRate, AttentionRate)


def rates_of(content: Any, where: str) -> Rates:
    """Parse rates from JSON. ``where`` names them in errors. Raises ConfigError."""
    if not isinstance(content, dict) or not {"products"} <= content.keys() <= {
        field.name for field in fields(Rates)
    }:
        raise ConfigError(
            where,
            "(keys)",
            "it is not an object of products, attention and source",
            "Measure it again",
        )
    products = _rows(ProductRate, content["products"], f"{where}: products")
    attention = _rows(AttentionRate, content.get("attention", ()), f"{where}: attention")
    return Rates(products, attention, str(content.get("source", "")))


def _rows(kind: type[_Row], content: Any, where: str) -> tuple[_Row, ...]:
    if not isinstance(content, Sequence) or isinstance(content, str):
        raise ConfigError(where, repr(content)[:60], "it is not a list", "Measure it again")
    types = {field.name: field.type for field in fields(kind)}
    for place, row in enumerate(content):
        if not isinstance(row, dict) or row.keys() != types.keys():
            reason = f"it has not the keys {', '.join(types)}"
            raise ConfigError(f"{where}: row {place}", repr(row)[:60], reason, "Measure it again")
        for name, value in row.items():
            number = (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and 0 < value < math.inf
            )
            if not (isinstance(value, str) if types[name] is str else number):
                reason = (
                    "it is not text" if types[name] is str else "it is not a finite number above 0"
                )
                raise ConfigError(
                    f"{where}: row {place}: {name}", repr(value), reason, "Measure it again"
                )
    return tuple(kind(**row) for row in content)
