"""Optimizer state on parameter servers, saved and loaded like any other: checkpoints do not differ."""

from collections.abc import Callable, Collection, Iterable
from functools import partial

from ..checkpoint.store import Kind, Shard, Turn
from ..parallel.buffers import Flat
from ..parallel.pieces import whole
from .optimizer import ServedAdamW
from .piece import KINDS

# The shards that a flat tensor [buffer.size] holds of the parameters of these names.
Parts = Callable[[Flat, Collection[str]], Iterable[Shard]]


def served_kinds(optimizer: ServedAdamW, parts: Parts) -> dict[str, Kind]:
    """Return what is saved beside the weights, by kind: each is fetched into the gradient's memory."""
    buffer = optimizer.buffer
    kinds = {}
    for kind in KINDS if buffer.rounds else KINDS[1:]:
        flat = whole(buffer.main_grad)
        shards = list(parts(flat, list(buffer.slots)))
        kinds[kind] = Kind([Turn(shards, partial(optimizer.fetch, kind, flat), partial(optimizer.store, kind, flat))])
    return kinds
