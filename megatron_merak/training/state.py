"""What a run consists of at any moment, whatever its model: saved, and resumed under any layout."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint import store
from ..config import RunConfig
from ..optimizer.base import Optimizer, Rates, StepResult
from ..parallel.buffers import Flat, ParameterBuffer
from ..parallel.mesh import Mesh
from ..parameter_server.kinds import served_kinds
from ..parameter_server.optimizer import ServedAdamW
from ..plan import Plan
from ..runtime.executor import Executor
from ..runtime.shards import ShardGatherer
from ..stages.optimizer_state import optimizer_kinds, weights_kind
from ..stages.parameter_groups import rates_of_run
from ..stages.saved_run import SavedRun, check_same_optimizer
from ..stages.step_report import StepReport
from .changes import check, schedule_of


class RunState:
    """``iteration``: optimizer steps done. ``consumed_samples``: training samples used, over all replicas.
    ``skipped_iterations``, ``skipped_samples``: those of them whose step was skipped; rates do not follow these.
    ``data``: what samples come from, see ``data.identity``; set it before loading and saving.

    ``batch_sizes``: samples of every step. ``iterations``: optimizer steps of the whole run.

    Subclasses set ``buffer``, ``gatherer`` and ``optimizer``, and say what runs steps (``executor``) and how flat
    tensors read as HuggingFace tensors (``parts``).
    """

    buffer: ParameterBuffer
    gatherer: ShardGatherer
    optimizer: Optimizer

    def __init__(self, config: RunConfig, plan: Plan, mesh: Mesh):
        self.config, self.plan, self.mesh = config, plan, mesh
        self.iteration = self.consumed_samples = 0
        self.skipped_iterations = self.skipped_samples = 0
        self.data: dict[str, Any] = {}
        ranks = mesh.grid.size * mesh.workers + config.parallel.num_parameter_servers
        self.batch_sizes, self.iterations = config.batches(ranks), config.iterations(ranks)
        self.global_batch_size = plan.global_batch_size * mesh.workers

    def executor(self, micro_batches: int) -> Executor:
        """What runs training steps of so many micro-batches."""
        raise NotImplementedError

    def rates(self) -> Rates:
        """Learning rate and weight decay of each group in the next step; they follow iterations, or --train-samples
        where given, without those of skipped steps."""
        done, total = self.iteration - self.skipped_iterations, self.iterations
        if self.config.train.train_samples is not None:
            done, total = self.consumed_samples - self.skipped_samples, self.config.train.train_samples
        return rates_of_run(self.config.optimizer, done, total)

    def phases_left(self) -> list[tuple[int, int]]:
        """(samples per step, steps) of what is left of a run of --train-samples."""
        return [*self.batch_sizes.phases(self.config.train.train_samples, self.consumed_samples)]

    def count(self, batches: Sequence[Mapping[str, Tensor]], skipped: bool) -> None:
        """A step is done, or was ``skipped``."""
        samples = len(batches) * self.plan.micro_batch_size * self.mesh.summed
        self.iteration += 1
        self.consumed_samples += samples
        self.skipped_iterations += skipped
        self.skipped_samples += samples * skipped

    def report(self, loss: float | None, rates: Rates, result: StepResult, zeros: float | None = None) -> StepReport:
        """Of a step that is counted; zeros: see `all_zeros`."""
        rate, all_zeros = rates[0][0], self.all_zeros(zeros)
        age = (result.staleness, result.late)
        return StepReport(loss, result.grad_norm, rate, result.skipped, all_zeros, result.loss_scale, *age)

    def parts(self, flat: Flat, names: Collection[str]) -> Iterable[store.Shard]:
        """``flat`` ([buffer.size]: values, gradients, optimizer state) as shards of HuggingFace tensors, of the
        parameters ``names`` of the buffer."""
        raise NotImplementedError

    def others(self) -> Sequence[store.Shard]:
        """What is saved beside the parameters that are trained."""
        return ()

    def kinds(self, optimizer: bool) -> dict[str, store.Kind]:
        """The weights, and with ``optimizer`` its state."""
        kinds = {"model": weights_kind(self.gatherer, self.parts, self.others())}
        if not optimizer:
            return kinds
        if isinstance(self.optimizer, ServedAdamW):
            return kinds | served_kinds(self.optimizer, self.parts)
        return kinds | optimizer_kinds(self.optimizer, self.gatherer, self.parts)

    def step(self, batches: Sequence[Mapping[str, Tensor]]) -> StepReport:
        """Train on one global batch: ``batches`` holds this replica's micro-batches, on every rank of the replica."""
        raise NotImplementedError

    def evaluate(self, batches: Sequence[Mapping[str, Tensor]]) -> float | None:
        """Mean token loss of one global batch without dropout, on ranks of the last stage, else None."""
        raise NotImplementedError

    def local_zeros(self) -> Tensor | None:
        """Elements of this rank's part of the gradient that are exactly zero, padding excluded, 0-d on its device;
        None where nobody asked."""
        if not self.config.logging.log_num_zeros_in_grad:
            return None
        gradient, zeros = self.buffer.own_gradient(), torch.zeros((), dtype=torch.int64, device=self.mesh.device)
        for buckets in self.buffer.turns(self.buffer.main_grad):
            flat = self.gatherer.full(gradient, buckets)
            for part in self.parts(flat, {name for bucket in buckets for name in bucket.names}):
                if part.owner:
                    zeros += (part.tensor == 0).sum()
        return zeros

    def all_zeros(self, local: float | None = None) -> int | None:
        """The sum of `local_zeros`, which was read, over all ranks. Collective, unless None."""
        if local is None:
            return None
        zeros = torch.tensor(int(local))
        if self.mesh.control is not None:
            dist.all_reduce(zeros, group=self.mesh.control)
        return int(zeros)

    def described(self) -> dict[str, Any] | None:
        """The model's own settings, JSON-safe, where the configuration only says where they are."""
        return None

    def save(self, root: str | Path) -> Path:
        """Write a checkpoint of this iteration under ``root``. Raises CheckpointError on every rank, and NumericsError
        for numbers that are not finite."""
        meta = {
            "consumed_samples": self.consumed_samples,
            "skipped_iterations": self.skipped_iterations,
            "skipped_samples": self.skipped_samples,
            "optimizer_steps": self.optimizer.steps,
            "loss_scale": self.optimizer.scaler.state(),
            "optimizer": self.optimizer.name,
            "global_batch_size": self.global_batch_size,
            "config": self.config.to_dict(),
            "plan": self.plan.to_dict(),
            "data": self.data,
            "model": self.described(),
        }
        kinds = self.kinds(not self.config.checkpoint.no_save_optim)
        return store.save(root, self.iteration, kinds, meta, self.mesh.control, "cpu")

    def load(self, root: str | Path, iteration: int | None = None, say: Callable[[str], object] | None = None) -> int:
        """Resume from ``root``, written under any layout: its newest undamaged checkpoint, or that of ``iteration``.
        Returns the iteration of the one that was loaded.

        ``say`` is called on every rank with each line that the user has to know. Raises CheckpointError on every rank.
        """
        options = self.config.checkpoint
        optimizer = not (options.finetune or options.no_load_optim)
        lines: list[str] = []

        def compare(meta: Mapping[str, Any]) -> None:
            saved = SavedRun.read(meta, root)
            if optimizer:
                check_same_optimizer(meta, self.optimizer, " or --no-load-optim")
            lines[:] = check(self.config, saved, self.described(), self.data, self.global_batch_size)

        control = self.mesh.control
        kinds = self.kinds(optimizer and self.mesh.worker == 0)  # what servers keep, one worker brings
        meta = store.load(root, kinds, control, "cpu", iteration, say=say, check=compare)
        for line in lines if say is not None else ():
            say(line)
        if not optimizer:
            self.optimizer.refresh_master()
        saved = SavedRun.read(meta, root)
        if options.finetune:
            return saved.iteration
        if optimizer:
            self.optimizer.steps = saved.optimizer_steps
            self.optimizer.scaler.load(saved.loss_scale)
        self.iteration, self.consumed_samples = saved.iteration, saved.consumed_samples
        self.skipped_iterations, self.skipped_samples = saved.skipped_iterations, saved.skipped_samples
        if self.config.train.train_samples is not None:
            self.iterations = self.iteration + sum(steps for _, steps in self.phases_left())
        if options.use_checkpoint_opt_param_scheduler:
            self.config = replace(self.config, optimizer=schedule_of(saved, self.config))
        return saved.iteration
