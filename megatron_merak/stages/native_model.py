"""The native model on this rank, with its optimizer."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.store import Shard
from ..config import Config
from ..config.unflushed import check_unflushed
from ..optimizer.base import LocalOptimizer, Rates
from ..optimizer.loss_scale import scaler_of_run
from ..parallel.agree import together
from ..parallel.buffers import Flat
from ..parallel.mesh import Mesh
from ..plan import Plan
from ..planner.cost import model_flops
from ..runtime.executor import StepLoss
from ..runtime.versions import WeightVersions
from .kernels import check_kernels
from .native import build_stages
from .optimizer_state import OptimizerOf, adamw_of
from .same_plan import check_same_plan
from .trained_model import TrainedModel


class NativeModel(TrainedModel):
    """The native model of ``config``, built by ``plan``. Collective over all ranks. For the base
    see `TrainedModel`.

    layouts: per parameter, which HuggingFace tensors its storage consists of.
    shape:   of the model.
    """

    def __init__(
        self, config: Config, plan: Plan, mesh: Mesh, optimizer_of: OptimizerOf = adamw_of
    ):
        with together(mesh.control, "cpu"):
            check_kernels(mesh.device)
            if plan.schedule.updates is not None:
                check_unflushed(
                    plan.schedule.name,
                    config.model,
                    config.train,
                    config.optimizer,
                    checkpoint=config.checkpoint,
                    layer_ranks=plan.grid.layer_ranks,
                    replicas=mesh.replicas,
                )
        check_same_plan(plan, mesh.control)
        built = build_stages(config, plan, mesh)
        train = config.train
        self.shape = config.model
        self.layouts = built.layouts
        self.per_token = train.calculate_per_token_loss
        super().__init__(
            plan,
            mesh,
            built.stages,
            built.parameters,
            optimizer=config.optimizer,
            scaler=scaler_of_run(train),
            optimizer_of=optimizer_of,
            replica_check_interval=train.check_weight_hash_across_dp_replicas_interval,
        )
        self._rates: Rates | None = None
        self.versions = self._versions_of(plan)

    def _versions_of(self, plan: Plan) -> WeightVersions | None:
        if plan.schedule.updates is None:
            return None
        (stage,) = self.stages
        return WeightVersions(self.parameters, plan.schedule, stage, self._update_between)

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

    def backward(self, batches: Sequence[Mapping[str, Tensor]]) -> Tensor | None:
        with self.mesh.pulse.in_step(self.iteration + 1):
            return self._backward(batches)

    def _backward(self, batches: Sequence[Mapping[str, Tensor]]) -> Tensor | None:
        self.parameters.start_step()
        executor = self.executor(len(batches))
        scale = self.optimizer.begin()
        versions = self.versions
        if versions is not None:
            versions.start()
        loss = executor.run(
            batches,
            self.iteration,
            loss_scale=scale,
            sum_losses=self.per_token,
            between=versions,
        )
        if versions is not None:
            versions.finish()
        self.mesh.pulse.at("gradient reduction")
        self.parameters.finish_step()
        if self.per_token:
            tokens = torch.stack([batch["loss_mask"].sum() for batch in batches]).sum()
            tokens = tokens.to(self.mesh.device, non_blocking=True)
            divisor = self._over_replicas(tokens).clamp(min=1)
            for own in self.buffer.own_grads:
                own.div_(divisor)
        return self._sums(loss, len(batches))

    def loss(self, values: Sequence[float]) -> float:
        total, tokens, mean, micro_batches = values
        return total / max(tokens, 1.0) if self.per_token else mean / micro_batches

    def mean_loss(self, batches: Sequence[Mapping[str, Tensor]]) -> float | None:
        loss = self.executor(len(batches), False).run(batches, self.iteration, training=False)
        sums = self._sums(loss, len(batches))
        return None if sums is None else self.loss(sums.tolist())

    def flops(self) -> float:
        return model_flops(self.shape, self.plan.global_batch_size)

    def shards(self, flat: Flat, names: Collection[str] | None = None) -> Iterator[Shard]:
        """See `TrainedModel`. Exactly one rank owns each shard: in the first replica, on the first
        stage that has it, and on tensor-parallel rank 0 if it is replicated."""
        mesh = self.mesh
        tp = self.mesh.grid.tp
        for name, layout in self.layouts.items():
            if names is not None and name not in names:
                continue
            owner = mesh.dp_rank == 0 and self.buffer.slots[name].counted
            for piece, view in layout.views(self.buffer.view(flat, name), mesh.tp_rank, tp):
                tensor = piece.sharding
                yield Shard(
                    tensor.name,
                    tensor.shape,
                    tensor.dim,
                    tensor.intervals(mesh.tp_rank, tp),
                    tensor=view,
                    owner=owner,
                )

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
