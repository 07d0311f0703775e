"""Which sizes are measured: those of a model, or a grid of them that takes so many seconds."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import ConfigError

FLAG = "--shape"
_FORM = "TOKENS:HIDDEN:HEADS:GROUPS:FFN:VOCABULARY[:LENGTH]"
Sides = tuple[int, int, int]
_Size = TypeVar("_Size")
# rows, and output and input features: a narrow shard of a small micro-batch, up to wide layers
_ROWS = (32, 128, 512, 2048, 8192)
_FEATURES = (64, 256, 1024, 4096, 16384)
_PARTS = 3  # products of a linear layer
_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_HEADS = (16, 32, 64, 128)  # features


@dataclass(frozen=True)
class Heads:
    """Attention: so many samples of so many tokens, query heads, key heads and their features."""

    samples: int
    length: int
    heads: int
    groups: int
    features: int

    @property
    def flops(self) -> int:
        """Of the forward, for the causal half of the scores."""
        return 2 * self.samples * self.length**2 * self.heads * self.features


@dataclass(frozen=True)
class ModelShape:
    """Tokens of a micro-batch, and the widths of the model that they go through.

    length: of a sequence.
    """

    tokens: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    vocabulary: int
    length: int

    @classmethod
    def of(cls, text: str) -> "ModelShape":
        """Read ``--shape``. Raises ConfigError."""
        try:
            numbers = [int(word) for word in text.split(":")]
        except ValueError:
            numbers = []
        if len(numbers) not in (6, 7) or min(numbers) < 1 or numbers[1] % numbers[2]:
            raise ConfigError(FLAG, text, "it is no shape", f"Give {_FORM}")
        return cls(*numbers, *numbers[:1] if len(numbers) == 6 else ())

    @property
    def products(self) -> list[Sides]:
        """(m, n, k) of the products; those of query, key and value are one here and apart, and
        those of gate and up.
        """
        keys = self.hidden // self.heads * self.groups
        sides = [
            (self.hidden + 2 * keys, self.hidden),
            (self.hidden, self.hidden),
            (keys, self.hidden),
            (2 * self.ffn, self.hidden),
            (self.ffn, self.hidden),
            (self.hidden, self.ffn),
            (self.vocabulary, self.hidden),
        ]
        return [(self.tokens, *side) for side in dict.fromkeys(sides)]

    @property
    def attention(self) -> Heads:
        samples = max(self.tokens // self.length, 1)
        return Heads(
            samples, self.length, self.heads, self.groups, features=self.hidden // self.heads
        )


def product_grid(rate: float, budget: float, fewest: int) -> list[Sides]:
    """Return the smallest products of a grid, as many as are measured in ``budget`` seconds, in an
    order whose beginning has sizes of all kinds.

    rate:   FLOP per second of the device.
    fewest: calls of each that are made at least.
    """
    sides = [(m, n, k) for m in _ROWS for n in _FEATURES for k in _FEATURES]
    sides.sort(key=math.prod)
    found = []
    for each in sides:
        budget -= _PARTS * fewest * 2 * math.prod(each) / rate
        if budget < 0:
            break
        found.append(each)
    return _mixed(found)


def attention_grid(rate: float, budget: float, fewest: int, tokens: int) -> list[Heads]:
    """Return the attention that is measured in ``budget`` seconds, in such an order.

    tokens: of all samples together, where a sequence has no more.
    """
    sizes: list[Heads] = []
    for length in _LENGTHS:
        for features in _HEADS:
            samples = max(tokens // length, 1)
            heads = Heads(samples, length, 256 // features, 256 // features, features)
            budget -= 4 * fewest * heads.flops / rate
            if budget < 0:
                return _mixed(sizes)
            sizes.append(heads)
    return _mixed(sizes)


def _mixed(sizes: list[_Size]) -> list[_Size]:
    """Return sizes in an order of chance, the same on every rank."""
    return random.Random(0).sample(sizes, len(sizes))


def of_models(shapes: Sequence[ModelShape]) -> tuple[list[Sides], list[Heads]]:
    """Return the products and the attention of models."""
    products = dict.fromkeys(side for shape in shapes for side in shape.products)
    return [*products], [*dict.fromkeys(shape.attention for shape in shapes)]
