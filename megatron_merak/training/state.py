"""What a run consists of at any moment, whatever its model: saved, and resumed under any layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint import store
from ..config import RunConfig
from ..errors import CheckpointError
from ..optimizer.adamw import AdamW
from ..parallel.buffers import ParameterBuffer
from ..parallel.mesh import Mesh
from ..plan import Plan
from ..runtime.executor import Executor


@dataclass(frozen=True)
class StepReport:
    """loss: mean token loss of the global batch, on ranks of the last stage, else None. The rest is known to all."""

    loss: float | None
    grad_norm: float
    learning_rate: float
    skipped: bool


class RunState:
    """``iteration``: optimizer steps done. ``consumed_samples``: training samples used, over all replicas.

    Subclasses set ``buffer``, ``optimizer`` and ``executor`` (of training steps), and say how the former two read as
    HuggingFace tensors.
    """

    buffer: ParameterBuffer
    optimizer: AdamW
    executor: Executor

    def __init__(self, config: RunConfig, plan: Plan, mesh: Mesh):
        self.config, self.plan, self.mesh = config, plan, mesh
        self.iteration = self.consumed_samples = 0

    def shards(self, optimizer: bool) -> dict[str, list[store.Shard]]:
        """The weights, and with ``optimizer`` its state, by kind."""
        raise NotImplementedError

    def step(self, batches: Sequence[Mapping[str, Tensor]]) -> StepReport:
        """Train on one global batch: ``batches`` holds this replica's micro-batches, on every rank of the replica."""
        raise NotImplementedError

    def evaluate(self, batches: Sequence[Mapping[str, Tensor]]) -> float | None:
        """Mean token loss of one global batch without dropout, on ranks of the last stage, else None."""
        raise NotImplementedError

    def count_zeros(self) -> int:
        """Elements of the whole model's last gradient that are exactly zero. Collective over a replica's ranks."""
        buffer = self.buffer
        zeros = sum(
            ((buffer.grad(name) == 0).sum() for name, slot in buffer.slots.items() if slot.counted), torch.tensor(0)
        )
        zeros = zeros.to(self.mesh.device)
        if self.mesh.model is not None:
            dist.all_reduce(zeros, group=self.mesh.model)
        return int(zeros)

    def save(self, root: str | Path) -> Path:
        """Write a checkpoint of this iteration under ``root``. Raises CheckpointError on every rank."""
        meta = {
            "consumed_samples": self.consumed_samples,
            "optimizer_steps": self.optimizer.steps,
            "config": self.config.to_dict(),
            "plan": self.plan.to_dict(),
        }
        shards = self.shards(not self.config.checkpoint.no_save_optim)
        return store.save(root, self.iteration, shards, meta, self.mesh.control, "cpu")

    def load(self, root: str | Path, iteration: int | None = None) -> None:
        """Resume from ``root``, whatever layout it was written under. Raises CheckpointError on every rank."""
        options = self.config.checkpoint
        optimizer = not (options.finetune or options.no_load_optim)
        meta = store.load(root, self.shards(optimizer), self.mesh.control, "cpu", iteration)
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
