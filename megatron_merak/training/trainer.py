"""One training run on this rank: steps, evaluation, saving and resuming."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint import store
from ..config import Config
from ..errors import CheckpointError
from ..optimizer.adamw import AdamW
from ..optimizer.schedules import learning_rate, weight_decay
from ..parallel.mesh import Mesh
from ..pipeline_parallel.ops import Kind, Schedule
from ..pipeline_parallel.passes import add_communication
from ..plan import Plan
from ..runtime.executor import Executor, StepLoss
from .build import build_model


@dataclass(frozen=True)
class StepReport:
    """loss: mean token loss of the global batch, on ranks of the last stage, else None. The rest is known to all."""

    loss: float | None
    grad_norm: float
    learning_rate: float
    skipped: bool


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule, in its order."""
    return replace(
        schedule, ranks=tuple(tuple(op for op in program if op.kind is Kind.F) for program in schedule.ranks)
    )


class Trainer:
    """The model, its optimizer and the executors of a plan.

    ``iteration``: optimizer steps done. ``consumed_samples``: training samples used, over all replicas.
    """

    def __init__(self, config: Config, plan: Plan, mesh: Mesh):
        self.config, self.plan, self.mesh = config, plan, mesh
        self.model = build_model(config, plan, mesh)
        stages, per_token = {self.model.stage.index: self.model.stage}, config.train.calculate_per_token_loss
        self.executor = Executor(stages, add_communication(plan.schedule), mesh, per_token)
        forwards = add_communication(forward_only(plan.schedule))
        self.evaluator = Executor(stages, forwards, mesh, per_token, self.executor.pipes)
        self.optimizer = AdamW(self.model.buffer, config.optimizer, mesh.model)
        self.iteration = self.consumed_samples = 0

    def gradients(self, batches: Sequence[Mapping[str, Tensor]]) -> float | None:
        """One step's loss (see ``StepReport``) and, in ``main_grad``, its gradient, final on every rank."""
        held = self.model.stage.held
        held.start_step()
        loss = self.executor.run(batches, self.iteration)
        held.finish_step()
        if self.config.train.calculate_per_token_loss:
            tokens = torch.stack([batch["loss_mask"].sum() for batch in batches]).sum().to(self.mesh.device)
            self.model.buffer.main_grad.div_(self._over_replicas(tokens).clamp(min=1))
        return self._mean(loss, len(batches))

    def step(self, batches: Sequence[Mapping[str, Tensor]]) -> StepReport:
        """Train on one global batch: ``batches`` holds this replica's micro-batches, on every rank of the replica."""
        loss = self.gradients(batches)
        config = self.config.optimizer
        rate = learning_rate(config, self.iteration, self.config.train.train_iters)
        decay = weight_decay(config, self.iteration, self.config.train.train_iters)
        result = self.optimizer.step(rate, decay)
        self.iteration += 1
        self.consumed_samples += self.plan.global_batch_size
        return StepReport(loss, result.grad_norm, rate, result.skipped)

    def evaluate(self, batches: Sequence[Mapping[str, Tensor]]) -> float | None:
        """Mean token loss of one global batch without dropout, on ranks of the last stage, else None."""
        loss = self.evaluator.run(batches, self.iteration, training=False)
        return self._mean(loss, len(batches))

    def count_zeros(self) -> int:
        """Elements of the whole model's last gradient that are exactly zero. Collective over a replica's ranks."""
        buffer = self.model.buffer
        zeros = sum(
            ((buffer.grad(name) == 0).sum() for name, slot in buffer.slots.items() if slot.counted), torch.tensor(0)
        )
        zeros = zeros.to(self.mesh.device)
        if self.mesh.model is not None:
            dist.all_reduce(zeros, group=self.mesh.model)
        return int(zeros)

    def _over_replicas(self, value: Tensor) -> Tensor:
        if self.mesh.dp is not None:
            dist.all_reduce(value, group=self.mesh.dp)
        return value

    def _mean(self, loss: StepLoss | None, microbatches: int) -> float | None:
        if loss is None:
            return None
        total, tokens, mean = self._over_replicas(torch.stack((loss.total, loss.tokens, loss.mean))).tolist()
        if self.config.train.calculate_per_token_loss:
            return total / max(tokens, 1.0)
        return mean / (microbatches * self.mesh.grid.dp)

    def _shards(self, optimizer: bool) -> dict[str, list[store.Shard]]:
        kinds = {"model": self.model.buffer.data} | (self.optimizer.state() if optimizer else {})
        return {kind: list(self.model.shards(flat)) for kind, flat in kinds.items()}

    def save(self, root: str | Path) -> Path:
        """Write a checkpoint of this iteration under ``root``. Raises CheckpointError on every rank."""
        meta = {
            "consumed_samples": self.consumed_samples,
            "optimizer_steps": self.optimizer.steps,
            "config": self.config.to_dict(),
            "plan": self.plan.to_dict(),
        }
        shards = self._shards(not self.config.checkpoint.no_save_optim)
        return store.save(root, self.iteration, shards, meta, self.mesh.control, "cpu")

    def load(self, root: str | Path, iteration: int | None = None) -> None:
        """Resume from ``root``, whatever layout it was written under. Raises CheckpointError on every rank."""
        options = self.config.checkpoint
        optimizer = not (options.finetune or options.no_load_optim)
        meta = store.load(root, self._shards(optimizer), self.mesh.control, "cpu", iteration)
        if not optimizer:
            self.optimizer.refresh_master()
        if options.finetune:
            return
        if optimizer:
            self.optimizer.steps = meta["optimizer_steps"]
        self.iteration, self.consumed_samples = meta["iteration"], meta["consumed_samples"]
        seed, saved = self.config.train.seed, meta["config"]["train"]["seed"]
        if seed != saved:
            remedy = f"Give --seed {saved}, or --finetune to start a new run from these weights"
            raise CheckpointError("--seed", seed, f"the checkpoint's run has seed {saved}", remedy)
