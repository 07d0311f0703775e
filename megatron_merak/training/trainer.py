"""One training run on this rank, whatever its model: steps, rates, evaluation, and checkpoints for
any layout.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint import store
from ..checkpoint.increments import RUN, StepRecord
from ..checkpoint.manifest import BUFFER
from ..config import RunConfig
from ..counting import counted
from ..data.identity import difference
from ..optimizer.base import LocalOptimizer, Rates
from ..parallel.position import tell
from ..stages.constants import META, check_same_constants, constant_shards, described
from ..stages.optimizer_state import optimizer_kinds, weights_kind
from ..stages.parameter_groups import rates_of_run
from ..stages.rerun import Rerun
from ..stages.saved_run import SavedRun, check_same_optimizer
from ..stages.step_report import StepReport
from ..stages.trained_model import TrainedModel
from ..stages.unexpected import checks_of
from .changes import check, schedule_of
from .increments import IncrementsBehind
from .recovery import recovery_of
from .streamed import META as STREAM
from .streamed import Streamed


class Trainer:
    """Trains a model by the settings of a run.

    iteration:                           optimizer steps done.
    consumed_samples:                    training samples used, over all replicas.
    skipped_iterations, skipped_samples: those of them whose step was skipped; learning rates do not
                                         follow these.
    data:                                where samples come from, see ``data.identity``; set before
                                         loading and saving.
    streamed:                            how far streams are read; None: there are none.
    batch_sizes:                         samples of every step.
    iterations:                          optimizer steps of the run.
    increments:                          writes every step; None: only checkpoints are written.
    repeated:                            steps that `load` did again, from increments.
    """

    def __init__(self, config: RunConfig, model: TrainedModel):
        self.config = config
        self.model = model
        self.plan = model.plan
        self.mesh = model.mesh
        self.optimizer = model.optimizer
        self.consumed_samples = 0
        self.skipped_iterations = self.skipped_samples = 0
        self.data: dict[str, Any] = {}
        self.streamed: Streamed | None = None
        self.increments: IncrementsBehind | None = None
        self.repeated = 0
        self.batch_sizes = config.batches_over(self.mesh.replicas)
        self.iterations = config.iterations(self.batch_sizes)
        self.global_batch_size = (
            self.plan.global_batch_size * self.mesh.replicas // self.mesh.grid.dp
        )
        self.rerun = Rerun(
            model,
            checks_of(config.train),
            self.say,
            tell,
            name="--rerun-mode",
            seed=config.train.seed,
        )

    def say(self, text: str) -> None:
        """Write a line for the user, on the first rank."""
        if self.mesh.rank == 0:
            tell(f"megatron_merak: {text}")

    @property
    def iteration(self) -> int:
        return self.model.iteration

    @iteration.setter
    def iteration(self, iteration: int) -> None:
        self.model.iteration = iteration

    def rates(self) -> Rates:
        """Return learning rate and weight decay of each parameter group in the next step.

        They follow iterations, or --train-samples where given, without those of skipped steps.
        """
        done = self.iteration - self.skipped_iterations
        total = self.iterations
        if self.config.train.train_samples is not None:
            done = self.consumed_samples - self.skipped_samples
            total = self.config.train.train_samples
        return rates_of_run(self.config.optimizer, done, total)

    def phases_left(self) -> list[tuple[int, int]]:
        """Return (samples per step, steps) of what is left of a run of --train-samples."""
        samples = self.config.train.train_samples
        assert samples is not None, "asked only of such a run"
        return [*self.batch_sizes.phases(samples, self.consumed_samples)]

    def step(self, batches: Sequence[Mapping[str, Tensor]]) -> StepReport:
        """Train on one global batch.

        batches: this replica's micro-batches, on every rank of the replica.
        """
        rates = self.rates()
        self.model.begin_step(rates)
        self.model.replicas.note_samples(batches)
        sums = self.rerun.backward(self.model.from_samples(batches))
        if self.increments is not None:
            self.increments.wait()
        result = self.model.update(rates, sums, self._own_zeros())
        samples = len(batches) * self.plan.micro_batch_size * self.mesh.summed
        self.consumed_samples += samples
        self.skipped_iterations += result.skipped
        self.skipped_samples += samples * result.skipped
        if self.increments is not None:
            self.increments.put(self._record(*self.increments.taken()))
        return StepReport(
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=rates[0][0],
            skipped=result.skipped,
            zeros=self._all_zeros(result.zeros),
            loss_scale=result.loss_scale,
            staleness=result.staleness,
            late=result.late,
        )

    def _record(self, square: float | None, scaled: float, rates: Rates) -> StepRecord:
        return StepRecord(
            self.iteration,
            self.consumed_samples,
            self.skipped_iterations,
            self.skipped_samples,
            optimizer_steps=self.optimizer.steps,
            loss_scale=self.optimizer.scaler.state(),
            square=square,
            scaled=scaled,
            rates=rates,
        )

    def kinds(self, optimizer: bool) -> dict[str, store.StateKind]:
        """Return the weights, and with ``optimizer`` its state, as a checkpoint has them."""
        gatherer = self.model.gatherer
        shards = self.model.shards
        kinds = {"model": weights_kind(gatherer, shards, self.model.others())}
        if not optimizer:
            return kinds
        return kinds | optimizer_kinds(self.optimizer, gatherer, shards)

    def _own_zeros(self) -> Tensor | None:
        """Count the elements of this rank's part of the gradient that are exactly zero, without
        padding: 0-d on its device; None without --log-num-zeros-in-grad."""
        if not self.config.logging.log_num_zeros_in_grad:
            return None
        buffer = self.model.buffer
        zeros = torch.zeros((), dtype=torch.int64, device=self.mesh.device)
        gradient = buffer.own_gradient()
        for buckets in buffer.turns(buffer.main_grad):
            flat = self.model.gatherer.full(gradient, buckets)
            for shard in self.model.shards(
                flat, {name for bucket in buckets for name in bucket.names}
            ):
                if shard.owner:
                    zeros += (shard.tensor == 0).sum()
        return zeros

    def _all_zeros(self, own: int | None) -> int | None:
        """Return the sum of ``own`` over all ranks; None for None. Collective, unless None."""
        if own is None:
            return None
        zeros = torch.tensor(own)
        if self.mesh.control is not None:
            dist.all_reduce(zeros, group=self.mesh.control)
        return int(zeros)

    def save(self, root: str | Path) -> Path:
        """Write a checkpoint of this iteration under ``root`` and return its directory.

        Raises on every rank CheckpointError, and NumericsError for numbers that are not finite.
        """
        return store.save(
            root,
            self.iteration,
            self.saved_kinds(),
            self.meta(),
            group=self.mesh.control,
            device="cpu",
        )

    def saved_kinds(self) -> dict[str, store.StateKind]:
        """Return what a checkpoint of this run has."""
        constants = constant_shards(self.model.constants(), owner=self.mesh.rank == 0)
        kinds = self.kinds(not self.config.checkpoint.no_save_optim)
        return kinds | ({BUFFER: store.StateKind.of(constants)} if constants else {})

    def meta(self) -> dict[str, Any]:
        """Return what a checkpoint of this iteration says of the run. Collective, with streams."""
        run: dict[str, Any] = {} if self.increments is None else {RUN: self.increments.run}
        if self.streamed is not None:
            run[STREAM] = self.streamed.meta(self.consumed_samples, self.mesh.control)
        return run | {
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
            "model": self.model.settings(),
            META: described(self.model.constants()),
        }

    def load(
        self,
        root: str | Path,
        iteration: int | None = None,
        say: Callable[[str], object] | None = None,
        state: bool = True,
    ) -> int:
        """Resume from ``root``, written under any layout; return the iteration of what was loaded:
        a checkpoint, and the steps behind it that increments have.

        iteration: which to load; None: the newest that is undamaged.
        say:       called on every rank with each line that the user should read.
        state:     whether to load the optimizer's state; False where others do, and this rank needs
                   its steps only.

        Raises CheckpointError on every rank.
        """
        options = self.config.checkpoint
        optimizer = not (options.finetune or options.no_load_optim)
        lines: list[str] = []

        def compare(meta: Mapping[str, Any]) -> None:
            saved = SavedRun.read(meta, root)
            if optimizer:
                check_same_optimizer(meta, self.optimizer, " or --no-load-optim")
            check_same_constants(meta, self.model.constants())
            if self.streamed is not None and not options.finetune:
                self.streamed.check(meta, root)
            lines[:] = check(
                self.config,
                saved,
                self.model.settings(),
                self.data,
                batch=self.global_batch_size,
            )

        recovery = None
        if optimizer and state and isinstance(self.optimizer, LocalOptimizer):
            recovery = recovery_of(self.model, self.config, root, iteration)
        kinds = self.kinds(optimizer and state)
        if recovery is None:
            group = self.mesh.control
            meta = store.load(
                root, kinds, group, "cpu", iteration=iteration, say=say, check=compare
            )
        else:
            meta = recovery.load(kinds, compare, say)
        if say is not None:
            for line in lines:
                say(line)
        self.model.after_load()
        if not optimizer:
            self.optimizer.refresh_master()
        if recovery is not None:
            meta = recovery.repeat(meta)
            self.repeated = recovery.steps
            if say is not None and self.repeated:
                updates = counted(self.repeated, "update")
                say(f"repeated {updates} from increments in {recovery.seconds:.2f} s")
        saved = SavedRun.read(meta, root)
        if options.finetune:
            return saved.iteration
        if optimizer:
            if not self.repeated:
                self.optimizer.steps = saved.optimizer_steps
            self.optimizer.scaler.load(saved.loss_scale)
        self.iteration = saved.iteration
        self.consumed_samples = saved.consumed_samples
        self.skipped_iterations = saved.skipped_iterations
        self.skipped_samples = saved.skipped_samples
        if self.streamed is not None:
            before = None if saved.data is None else saved.data.get("train")
            same = before is not None and not difference(self.data["train"], before)
            self.streamed.restore(meta, root, saved.consumed_samples, same)
        if self.config.train.train_samples is not None:
            self.iterations = self.iteration + sum(steps for _, steps in self.phases_left())
        if options.use_checkpoint_opt_param_scheduler:
            self.config = replace(self.config, optimizer=schedule_of(saved, self.config))
        return saved.iteration
