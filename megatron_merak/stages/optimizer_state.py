"""The optimizer's state as shards of HuggingFace tensors, whether ranks have all of theirs or share it."""

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor

from ..checkpoint.store import Kind, Shard
from ..optimizer.adamw import AdamW
from ..runtime.shards import ShardGatherer

Parts = Callable[[Tensor], Iterable[Shard]]


def optimizer_kinds(optimizer: AdamW, gatherer: ShardGatherer, parts: Parts) -> dict[str, Kind]:
    """What is saved of ``optimizer`` beside the weights, by kind.

    parts: a flat tensor [buffer.size] -> the shards that it holds. Where data-parallel ranks share the state, one kind
    at a time is gathered into the gradient's memory, so that a checkpoint does not show how it was shared.
    """
    buffer, kinds = optimizer.buffer, {}
    for name, state in optimizer.state().items():
        flat = buffer.main_grad if buffer.sharded else state
        kinds[name] = Kind(list(parts(flat)), partial(gatherer.full, state), partial(gatherer.take, state, flat))
    return kinds
