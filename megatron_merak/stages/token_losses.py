"""Models whose loss is a sum over tokens, as samples of GPT data sets have it."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import Config, ModelConfig
from ..config.unflushed import check_unflushed
from ..optimizer.base import LocalOptimizer, Rates
from ..parallel.mesh import Mesh
from ..plan import Plan
from ..planner.cost import model_flops
from ..runtime.executor import StepLoss
from ..runtime.versions import WeightVersions
from .trained_model import TrainedModel


def check_updates(config: Config, plan: Plan, mesh: Mesh) -> None:
    """Raise ConfigError for a run that its schedule cannot update while micro-batches are in flight."""
    if plan.schedule.updates is not None:
        check_unflushed(
            plan.schedule.name,
            config.model,
            config.train,
            config.optimizer,
            checkpoint=config.checkpoint,
            tp=plan.grid.tp,
            cp=plan.grid.cp,
            replicas=mesh.replicas,
        )


class TokenLosses(TrainedModel):
    """The steps of a model whose loss is a sum over tokens.

    The loss of a step is the mean over micro-batches of their means over tokens, or with
    --calculate-per-token-loss the mean over all tokens. Subclasses set:

    shape:     of the model.
    per_token: --calculate-per-token-loss.
    """

    shape: ModelConfig
    per_token: bool
    _rates: Rates | None = None

    def targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of tokens of a micro-batch that its loss is summed over, []."""
        raise NotImplementedError

    @cached_property
    def versions(self) -> WeightVersions | None:
        """The weights that ops see where the schedule updates them on its way; else None."""
        if self.plan.schedule.updates is None:
            return None
        (stage,) = self.stages
        return WeightVersions(self.parameters, self.plan.schedule, stage, self._update_between)

    def begin_step(self, rates: Rates) -> None:
        self._rates = rates

    def _update_between(self) -> None:
        """Update the weights of this rank's stage, without a word with other ranks."""
        assert self._rates is not None and isinstance(self.optimizer, LocalOptimizer)
        self.parameters.finish_step()
        self.optimizer.apply_unseen(self._rates)
        self.parameters.start_step()

    def first_not_finite(
        self, batches: Sequence[Mapping[str, Tensor]], iteration: int | None = None
    ) -> str:
        """See `TrainedModel`; "" where the weights at the start of the step are no more."""
        if self.versions is not None:
            return ""
        return super().first_not_finite(batches, iteration)

    def backward(
        self,
        batches: Sequence[Mapping[str, Tensor]],
        weights: Sequence[float] | None = None,
        task: Any = None,
    ) -> Tensor | None:
        """See `TrainedModel`, and `CapturedModel` for the other arguments."""
        with self.mesh.pulse.in_step(self.iteration + 1):
            return self._backward(batches, weights, task)

    def _backward(
        self,
        batches: Sequence[Mapping[str, Tensor]],
        weights: Sequence[float] | None,
        task: Any,
    ) -> Tensor | None:
        self.parameters.start_step()
        executor = self.executor(len(batches))
        scale = self.optimizer.begin()
        versions = self.versions
        if versions is not None:
            versions.start()
        loss = executor.run(
            batches,
            self.iteration,
            weights=weights,
            loss_scale=scale,
            sum_losses=self.per_token,
            task=task,
            between=versions,
        )
        if versions is not None:
            versions.finish()
        self.mesh.pulse.at("gradient reduction")
        self.parameters.finish_step()
        if self.per_token:
            tokens = torch.stack([self.targets(batch) for batch in batches]).sum()
            tokens = tokens.to(self.mesh.device, non_blocking=True)
            divisor = self._over_replicas(tokens).clamp(min=1)
            for own in self.buffer.own_grads:
                own.div_(divisor)
        return self._sums(loss, len(batches))

    def loss(self, values: Sequence[float]) -> float:
        total, tokens, mean, micro_batches = values
        return total / max(tokens, 1.0) if self.per_token else mean / micro_batches

    def mean_loss(self, batches: Sequence[Mapping[str, Tensor]]) -> float | None:
        executor = self.executor(len(batches), False)
        loss = executor.run(self.from_samples(batches), self.iteration, training=False)
        sums = self._sums(loss, len(batches))
        return None if sums is None else self.loss(sums.tolist())

    def flops(self) -> float:
        return model_flops(self.shape, self.plan.global_batch_size)

    def _over_replicas(self, value: Tensor) -> Tensor:
        if self.mesh.dp is not None:
            dist.all_reduce(value, group=self.mesh.dp)
        return value

    def _sums(self, loss: StepLoss | None, micro_batches: int) -> Tensor | None:
        """Return what `loss` takes, summed over replicas: on ranks of the last stage, and on the
        last pipeline rank, which reports."""
        schedule = self.plan.schedule
        device = self.mesh.device
        elsewhere = schedule.rank_of(schedule.stages - 1) != self.mesh.grid.pp - 1
        if loss is None and not elsewhere:
            return None
        sums = torch.zeros(4, device=device)
        if loss is not None:
            count = torch.full_like(loss.mean, micro_batches)
            sums = torch.stack((loss.total, loss.tokens, loss.mean, count))
        if elsewhere:
            dist.all_reduce(sums, group=self.mesh.pp)
        return self._over_replicas(sums)
