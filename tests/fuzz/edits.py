"""Plans that shard a module otherwise than propagation would."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

from megatron_merak.plan import TensorSharding

MOST = 4  # parameters that differ


def edited(tensors: Mapping[str, TensorSharding], tp: int, seed: int) -> dict[str, TensorSharding]:
    """The tensors, of which a few are sharded otherwise, in ways that the ranks share evenly."""
    draw = random.Random(seed)
    found = dict(tensors)
    for name in draw.sample(list(found), min(draw.randint(1, MOST), len(found))):
        found[name] = draw.choice(list(ways_of(found[name], tp)))
    return found


def ways_of(tensor: TensorSharding, tp: int) -> Iterator[TensorSharding]:
    """Every other way in which a tensor may be sharded: replicated, along each dimension in some
    blocks, padded.
    """
    ways = [replace(tensor, dim=None, blocks=1, padded=None)]
    for dim, extent in enumerate(tensor.shape):
        pieces = [blocks for blocks in (1, 2, 3) if extent % (blocks * tp) == 0]
        ways += [replace(tensor, dim=dim, blocks=blocks, padded=None) for blocks in pieces]
        ways += [replace(tensor, dim=dim, blocks=1, padded=(extent // tp + 2) * tp)]
    yield from (way for way in ways if way != tensor)
