"""The weights and the optimizer state of a rank as shards of HuggingFace tensors, for checkpoints.

Checkpoints are the same whether or not data-parallel ranks shard this state.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..checkpoint.store import Shard, StateKind, Turn
from ..config import OptimizerConfig
from ..optimizer.adamw import AdamW
from ..optimizer.base import LocalOptimizer, Optimizer
from ..optimizer.lion import Lion
from ..optimizer.loss_scale import LossScaler
from ..optimizer.recipe import Recipe
from ..optimizer.torch_optimizer import TorchOptimizer
from ..parallel.buffers import Bucket, Flat
from ..parallel.scattered import Scattered
from ..parallel.upper_halves import upper_halves
from ..runtime.parameters import RankParameters
from ..runtime.shards import ShardGatherer

# (flat tensor [buffer.size], parameter names) -> the shards of these parameters in it.
Parts = Callable[[Flat, Collection[str]], Iterable[Shard]]
Groups = list[dict[str, Any]]  # ``param_groups`` of torch
_GROUPS = 4  # parameter groups that a run has at most, see `groups_of_run`
# Makes the optimizer of a rank's parameters.
OptimizerOf = Callable[[RankParameters, OptimizerConfig, LossScaler | None], Optimizer]


class RemoteOptimizer(Optimizer):
    """An optimizer whose state is not on the ranks that it steps."""

    def kinds(self, parts: Parts) -> dict[str, StateKind]:
        """Return the state that is saved beside the weights, by kind."""
        raise NotImplementedError


class StateMover(Protocol):
    """Fetches, or keeps, a state of an optimizer, of some buckets at a time."""

    def __call__(self, *, buckets: Sequence[Bucket]) -> object: ...


def adamw_of(
    parameters: RankParameters, config: OptimizerConfig, scaler: LossScaler | None
) -> AdamW:
    """Return this package's AdamW of the parameters."""
    return AdamW(
        parameters.buffer,
        config,
        parameters.norm_group,
        parameters.mesh.shard_group,
        scaler=scaler,
    )


def torch_optimizer_of(recipe: Recipe) -> OptimizerOf:
    """Return what makes an optimizer that steps as the torch optimizer of ``recipe`` does."""

    def make(
        parameters: RankParameters, config: OptimizerConfig, scaler: LossScaler | None
    ) -> TorchOptimizer:
        return TorchOptimizer(
            parameters.buffer,
            config,
            recipe,
            parameters.mesh,
            tensors=parameters.tensors,
            norm_group=parameters.norm_group,
            scaler=scaler,
        )

    return make


def optimizer_of_run(config: OptimizerConfig) -> OptimizerOf:
    """Return what makes the optimizer of --optimizer, with the parameter groups of
    `groups_of_run`.
    """
    return adamw_of if config.optimizer == "adam" else torch_optimizer_of(recipe_of_run(config))


def recipe_of_run(config: OptimizerConfig) -> Recipe:
    """Return the recipe of an --optimizer of ``_STEPPED``."""
    groups = [
        {"params": [nn.Parameter(torch.empty((1,) * dims)) for dims in range(1, 6)]}
        for _ in range(_GROUPS)
    ]
    named = [
        (f"{number} {p.dim()}", p) for number, group in enumerate(groups) for p in group["params"]
    ]
    optimizer = _STEPPED[config.optimizer](groups, config.lr or 0.0, config)
    return Recipe(optimizer, named, "cpu")


def _sgd(groups: Groups, lr: float, config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=lr, momentum=config.sgd_momentum)


def _lion(groups: Groups, lr: float, config: OptimizerConfig) -> torch.optim.Optimizer:
    return Lion(groups, lr=lr, betas=(config.lion_beta1, config.lion_beta2))


# The values of --optimizer, but AdamW.
_STEPPED: Mapping[str, Callable[[Groups, float, OptimizerConfig], torch.optim.Optimizer]] = (
    MappingProxyType({"sgd": _sgd, "lion": _lion})
)


def weights_kind(gatherer: ShardGatherer, parts: Parts, others: Sequence[Shard] = ()) -> StateKind:
    """The trained parameters, and the shards ``others``, whose tensors are always in memory."""
    buffer = gatherer.buffer
    turns = _turns(gatherer, buffer.data, parts, gatherer.gather, keep=buffer.seal)
    return StateKind([Turn(others), *turns] if others else turns)


def optimizer_kinds(
    optimizer: Optimizer, gatherer: ShardGatherer, parts: Parts
) -> dict[str, StateKind]:
    """The state of ``optimizer`` that is saved beside the weights, by kind.

    State that is not in one flat tensor, or is sharded over data-parallel ranks, is all-gathered
    into the gradient's memory, one kind, or one unit of a kind, at a time. bf16 state, which is fp32
    there, is saved as the upper halves of that.
    """
    if isinstance(optimizer, RemoteOptimizer):
        return optimizer.kinds(parts)
    assert isinstance(optimizer, LocalOptimizer)
    buffer = optimizer.buffer
    kinds = {}
    for name, state in optimizer.state().items():
        stored = parts
        if isinstance(state, Scattered):
            flat = buffer.main_grad
            names = state.names
            keep = state.take
        else:
            flat = buffer.main_grad if buffer.sharded else state
            if buffer.sharded and state.dtype == torch.bfloat16:
                stored = partial(_halved, parts)
            names = buffer.slots
            keep = partial(buffer.take, state, flat)
        kinds[name] = StateKind(
            _turns(gatherer, flat, _only(stored, names), partial(gatherer.full, state), keep=keep)
        )
    for name, tensors in optimizer.other_state().items():
        kinds[name] = StateKind.of(
            [replicated(each, tensor, optimizer.writes(each)) for each, tensor in tensors.items()]
        )
    return kinds


def _halved(parts: Parts, flat: Flat, names: Collection[str]) -> Iterable[Shard]:
    """Return shards of bf16 state that was spread over fp32 memory."""
    for shard in parts(flat, names):
        yield replace(shard, tensor=upper_halves(shard.tensor))


def replicated(name: str, tensor: Tensor, owner: bool) -> Shard:
    """Return the shard of a tensor that every rank that needs it has in full."""
    return Shard(name, tuple(tensor.shape), None, (), tensor=tensor, owner=owner)


def _only(parts: Parts, chosen: Collection[str]) -> Parts:
    return lambda flat, names: parts(flat, dict.fromkeys(name for name in names if name in chosen))


def _turns(
    gatherer: ShardGatherer, flat: Flat, parts: Parts, fetch: StateMover, keep: StateMover
) -> list[Turn]:
    buffer = gatherer.buffer
    turns = []
    for buckets in buffer.turns(flat):
        buffer.allocate(flat, buckets)  # views need memory
        names = dict.fromkeys(name for bucket in buckets for name in bucket.names)
        turns.append(
            Turn(
                list(parts(flat, names)),
                partial(fetch, buckets=buckets),
                partial(keep, buckets=buckets),
            )
        )
    buffer.allocate(flat, ())
    return turns
