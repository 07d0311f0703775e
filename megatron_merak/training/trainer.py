"""One training run of the native model on this rank: steps and evaluation."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.store import Shard
from ..config import Config
from ..optimizer.loss_scale import scaler_of_run
from ..parallel.agree import together
from ..parallel.buffers import Flat
from ..parallel.mesh import Mesh
from ..plan import Plan
from ..runtime.executor import Executor, StepLoss
from ..runtime.executors import Executors
from ..stages.kernels import check_kernels
from ..stages.native import build_model
from ..stages.optimizer_state import OptimizerOf, adamw_of
from ..stages.replicas import Replicas
from ..stages.same_plan import check_same_plan
from ..stages.step_report import StepReport
from .state import RunState


class Trainer(RunState):
    """The native model, its optimizer and the executors of a plan."""

    def __init__(self, config: Config, plan: Plan, mesh: Mesh, optimizer_of: OptimizerOf = adamw_of):
        super().__init__(config, plan, mesh)
        with together(mesh.control, "cpu"):
            check_kernels(mesh.device)
        check_same_plan(plan, mesh.control)
        self.model = build_model(config, plan, mesh)
        self.executors = Executors(self.model.stages, plan.schedule, mesh)
        self.buffer, self.gatherer = self.model.buffer, self.model.gatherer
        scaler = scaler_of_run(config.train)
        self.optimizer = optimizer_of(self.model.parameters, config.optimizer, scaler)
        interval = config.train.check_weight_hash_across_dp_replicas_interval
        self.replicas = Replicas(mesh, self.optimizer, self.gatherer, interval)

    def executor(self, micro_batches: int) -> Executor:
        return self.executors.of(micro_batches)

    def gradients(self, batches: Sequence[Mapping[str, Tensor]]) -> float | None:
        """One step's loss (see ``StepReport``) and, in ``main_grad``, its gradient, final on every rank."""
        sums = self.backward(batches)
        self.optimizer.unscale()
        return None if sums is None else self._mean(sums.tolist(), len(batches) * self.mesh.summed)

    def backward(self, batches: Sequence[Mapping[str, Tensor]]) -> Tensor | None:
        """``gradients`` without waiting for the device: what the loss is made of, for `step` to read. In fp16 the
        gradient keeps its loss scale."""
        parameters = self.model.parameters
        parameters.start_step()
        scale = self.optimizer.begin()
        per_token = self.config.train.calculate_per_token_loss
        loss = self.executor(len(batches)).run(batches, self.iteration, loss_scale=scale, sum_losses=per_token)
        parameters.finish_step()
        if self.config.train.calculate_per_token_loss:
            tokens = torch.stack([batch["loss_mask"].sum() for batch in batches]).sum()
            tokens = tokens.to(self.mesh.device, non_blocking=True)
            divisor = self._over_replicas(tokens).clamp(min=1)
            for own in self.buffer.own_grads:
                own.div_(divisor)
        return self._sums(loss)

    def step(self, batches: Sequence[Mapping[str, Tensor]]) -> StepReport:
        sums = self.backward(batches)
        rates = self.rates()
        losses, zeros, result = self.optimizer.reduce_and_step(sums, self.local_zeros(), rates)
        loss = self._mean(losses, len(batches) * self.mesh.summed) if losses else None
        self.gatherer.launch()
        self.count(batches, result.skipped)
        self.replicas.record_norm(result.grad_norm, self.iteration)
        return self.report(loss, rates, result, *zeros)

    def evaluate(self, batches: Sequence[Mapping[str, Tensor]]) -> float | None:
        sums = self._sums(self.executors.of(len(batches), False).run(batches, self.iteration, training=False))
        return None if sums is None else self._mean(sums.tolist(), len(batches) * self.mesh.grid.dp)

    def _over_replicas(self, value: Tensor) -> Tensor:
        if self.mesh.dp is not None:
            dist.all_reduce(value, group=self.mesh.dp)
        return value

    def _sums(self, loss: StepLoss | None) -> Tensor | None:
        """What `_mean` takes: known to the ranks of the last stage, and to the last pipeline rank, which reports."""
        schedule, device = self.plan.schedule, self.mesh.device
        elsewhere = schedule.rank_of(schedule.stages - 1) != self.mesh.grid.pp - 1
        if loss is None and not elsewhere:
            return None
        sums = torch.zeros(3, device=device) if loss is None else torch.stack((loss.total, loss.tokens, loss.mean))
        if elsewhere:
            dist.all_reduce(sums, group=self.mesh.pp)
        return self._over_replicas(sums)

    def _mean(self, sums: Sequence[float], microbatches: int) -> float:
        """``microbatches``: of all replicas that ``sums`` are of."""
        total, tokens, mean = sums
        if self.config.train.calculate_per_token_loss:
            return total / max(tokens, 1.0)
        return mean / microbatches

    def parts(self, flat: Flat, names: Collection[str]) -> Iterable[Shard]:
        return self.model.shards(flat, names)
