"""What a rank trains as shards of HuggingFace tensors, to be saved and loaded.

A checkpoint does not show whether data-parallel ranks share state, or what they share of it.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ..checkpoint.store import Kind, Shard, Turn
from ..config import OptimizerConfig
from ..optimizer.adamw import AdamW
from ..optimizer.base import LocalOptimizer, Optimizer
from ..optimizer.lion import Lion
from ..optimizer.loss_scale import LossScaler
from ..optimizer.recipe import Recipe
from ..optimizer.torch_optimizer import TorchOptimizer
from ..parallel.buffers import Bucket, Flat
from ..parallel.scattered import Scattered
from ..runtime.parameters import RankParameters
from ..runtime.shards import ShardGatherer

# The shards that a flat tensor [buffer.size] holds of the parameters of these names.
Parts = Callable[[Flat, Collection[str]], Iterable[Shard]]
Step = Callable[[Sequence[Bucket]], object]
_GROUPS = 4  # of a run, at most, see `groups_of_run`
# Makes the optimizer of a rank's parameters.
OptimizerOf = Callable[[RankParameters, OptimizerConfig, LossScaler | None], Optimizer]


def adamw_of(held: RankParameters, config: OptimizerConfig, scaler: LossScaler | None) -> AdamW:
    """The optimizer whose state ranks keep themselves."""
    return AdamW(held.buffer, config, held.mesh.model, held.mesh.shard_group, scaler)


def torch_optimizer_of(recipe: Recipe) -> OptimizerOf:
    """That whose steps are those of ``recipe``."""

    def make(held: RankParameters, config: OptimizerConfig, scaler: LossScaler | None) -> TorchOptimizer:
        return TorchOptimizer(held.buffer, config, recipe, held.mesh, held.tensors, scaler)

    return make


def optimizer_of_run(config: OptimizerConfig) -> OptimizerOf:
    """That of --optimizer, for the groups of parameters that each step has rates of."""
    if config.optimizer == "adam":
        return adamw_of
    groups = [{"params": [nn.Parameter(torch.empty((1,) * dims)) for dims in range(1, 6)]} for _ in range(_GROUPS)]
    if config.optimizer == "sgd":
        made: torch.optim.Optimizer = torch.optim.SGD(groups, lr=config.lr or 0.0, momentum=config.sgd_momentum)
    else:
        made = Lion(groups, lr=config.lr or 0.0, betas=(config.lion_beta1, config.lion_beta2))
    named = [(f"{number} {p.dim()}", p) for number, group in enumerate(groups) for p in group["params"]]
    return torch_optimizer_of(Recipe(made, named, "cpu"))


def weights_kind(gatherer: ShardGatherer, parts: Parts, others: Sequence[Shard] = ()) -> Kind:
    """The parameters that are trained, and others, which are always there."""
    buffer = gatherer.buffer
    turns = _turns(gatherer, buffer.data, parts, gatherer.gather, buffer.seal)
    return Kind([Turn(others), *turns] if others else turns)


def optimizer_kinds(optimizer: LocalOptimizer, gatherer: ShardGatherer, parts: Parts) -> dict[str, Kind]:
    """What is saved of ``optimizer`` beside the weights, by kind. What does not lie in one flat tensor, or is shared by
    data-parallel ranks, is gathered into the gradient's memory, one kind, or one unit of a kind, at a time."""
    buffer, kinds = optimizer.buffer, {}
    for name, state in optimizer.state().items():
        if isinstance(state, Scattered):
            flat, names, keep = buffer.main_grad, state.names, state.take
        else:
            flat, names = buffer.main_grad if buffer.sharded else state, buffer.slots
            keep = partial(buffer.take, state, flat)
        kinds[name] = Kind(_turns(gatherer, flat, _only(parts, names), partial(gatherer.full, state), keep))
    for name, tensors in optimizer.other_state().items():
        kinds[name] = Kind.of([whole(each, tensor, optimizer.writes(each)) for each, tensor in tensors.items()])
    return kinds


def whole(name: str, tensor: Tensor, owner: bool) -> Shard:
    """Of state that has not the shape of its parameter, which every rank that needs it has all of."""
    return Shard(name, tuple(tensor.shape), None, (), tensor, owner)


def _only(parts: Parts, chosen: Collection[str]) -> Parts:
    return lambda flat, names: parts(flat, dict.fromkeys(name for name in names if name in chosen))


def _turns(gatherer: ShardGatherer, flat: Flat, parts: Parts, bring: Step, keep: Step) -> list[Turn]:
    buffer, found = gatherer.buffer, []
    for buckets in buffer.turns(flat):
        buffer.allocate(flat, buckets)  # views can be made of what has memory
        names = dict.fromkeys(name for bucket in buckets for name in bucket.names)
        found.append(Turn(list(parts(flat, names)), partial(bring, buckets=buckets), partial(keep, buckets=buckets)))
    buffer.allocate(flat, ())
    return found
