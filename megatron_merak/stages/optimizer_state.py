"""What a rank trains as shards of HuggingFace tensors, to be saved and loaded.

A checkpoint does not show whether data-parallel ranks share state, or what they share of it.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from ..checkpoint.store import Kind, Shard, Turn
from ..config import OptimizerConfig
from ..optimizer.adamw import AdamW, Optimizer
from ..optimizer.loss_scale import LossScaler
from ..parallel.buffers import Bucket, Flat
from ..runtime.parameters import RankParameters
from ..runtime.shards import ShardGatherer

# The shards that a flat tensor [buffer.size] holds of the parameters of these names.
Parts = Callable[[Flat, Collection[str]], Iterable[Shard]]
Step = Callable[[Sequence[Bucket]], object]
# Makes the optimizer of a rank's parameters.
OptimizerOf = Callable[[RankParameters, OptimizerConfig, LossScaler | None], Optimizer]


def adamw_of(held: RankParameters, config: OptimizerConfig, scaler: LossScaler | None) -> AdamW:
    """The optimizer whose state ranks keep themselves."""
    return AdamW(held.buffer, config, held.mesh.model, held.mesh.sharing, scaler)


def weights_kind(gatherer: ShardGatherer, parts: Parts, others: Sequence[Shard] = ()) -> Kind:
    """The parameters that are trained, and others, which are always there."""
    buffer = gatherer.buffer
    turns = _turns(gatherer, buffer.data, parts, gatherer.bring, buffer.seal)
    return Kind([Turn(others), *turns] if others else turns)


def optimizer_kinds(optimizer: AdamW, gatherer: ShardGatherer, parts: Parts) -> dict[str, Kind]:
    """What is saved of ``optimizer`` beside the weights, by kind. Where data-parallel ranks share the state, it is
    gathered into the gradient's memory, one kind, or one unit of a kind, at a time."""
    buffer, kinds = optimizer.buffer, {}
    for name, state in optimizer.state().items():
        flat = buffer.main_grad if buffer.sharded else state
        bring, keep = partial(gatherer.full, state), partial(buffer.take, state, flat)
        kinds[name] = Kind(_turns(gatherer, flat, parts, bring, keep))
    return kinds


def _turns(gatherer: ShardGatherer, flat: Flat, parts: Parts, bring: Step, keep: Step) -> list[Turn]:
    buffer, found = gatherer.buffer, []
    for buckets in buffer.turns(flat):
        buffer.allocate(flat, buckets)  # views can be made of what has memory
        names = {name for bucket in buckets for name in bucket.names}
        found.append(Turn(list(parts(flat, names)), partial(bring, buckets=buckets), partial(keep, buckets=buckets)))
    buffer.allocate(flat, ())
    return found
