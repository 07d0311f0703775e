"""One call of ``MerakTrainer.train``: epochs, steps, and what callbacks decide to log, evaluate and
save.

The order of events, the keys of logs and the arithmetic of steps are those of
``transformers.Trainer``.
"""

import logging
import math
import signal
import sys
import time
import zlib
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import (
    SaveStrategy,
    TrainOutput,
    compare_trainer_and_checkpoint_args,
    speed_metrics,
)

from ...checkpoint.behind import Staging
from ...errors import CheckpointError, ConfigError, DoubtfulResultError, UnexpectedResultError
from ...parallel.agree import raise_together
from ...parallel.interruption import Interrupted, Interruption
from ...parallel.launch import end_interrupted
from ...parallel.position import tell
from ...stages.rerun import Rerun
from ...stages.unexpected import checks_of
from ...training.skips import SkippedSteps
from ..batches import fingerprint
from ..batches.order import Batch
from ..batches.same_batches import check_everywhere
from ..batches.samplers import LengthOrder
from . import callbacks, resumption, run_directory, trainer_state
from .captures import Captures
from .checkpoints_behind import CheckpointCopies, CheckpointsBehind
from .console import saving_of, say, warn
from .progress import RunPosition
from .rates import extent
from .recapture import check_model, lost_writes
from .run_directory import RunDirectory
from .trainer_of_run import TrainerOfRun

DECISIONS = (
    "should_training_stop",
    "should_epoch_stop",
    "should_save",
    "should_evaluate",
    "should_log",
)


def saves_for_signals(args: TrainingArguments) -> bool:
    """Whether a signal lets a run save before it ends: not where it saves nothing, unless that was
    asked for.
    """
    return args.save_strategy != SaveStrategy.NO or args.enable_jit_checkpoint


class TrainingLoop:
    """One training run. Collective over all ranks.

    trainer: whose state, control and engine this loop drives.
    """

    def __init__(
        self,
        trainer: TrainerOfRun,
        directory: RunDirectory,
        resume: Path | None,
        ignored_outputs: list[str] | None = None,
    ):
        self.directory = directory
        self.ignored_outputs = ignored_outputs
        self.trainer = trainer
        self.args = trainer.args
        self.engine = trainer.engine
        self.handler = trainer.callback_handler
        self.loading = trainer.callback_handler.train_dataloader
        division = self.loading.division
        examples = None if division is None else len(self.loading.dataset)
        batches = None if division is None else division.batches
        self.samples_per_batch = self.loading.batch_size * self.loading.replicas
        self.extent = extent(self.args, batches, examples, self.loading.replicas)
        self.rate = trainer.learning_rate(self.extent.steps)
        self.rates = self.rate.groups.rates()
        limit = self.args.max_consecutive_skipped_steps
        argument = "max_consecutive_skipped_steps"
        engine = self.engine
        control = trainer.control_group
        self.skips = SkippedSteps(limit, engine.buffer, control, argument, scaler=engine.scaler)
        self.rerun = Rerun(
            engine,
            checks_of(self.args),
            self._say,
            self._warn,
            name="rerun_mode",
            seed=self.args.seed,
        )
        self.captures = Captures(engine, trainer.is_world_process_zero())
        self.frozen = 0  # a checksum of the names that were frozen in the last step
        self.fault: ConfigError | None = None
        self.run_loss = self.pending_loss = 0.0
        self.last_logged = 0
        self.grad_norm: float | None = None
        self.used_rate: float | None = None
        self.first_epoch = self.skipped_batches = 0
        self.more_steps = 0  # see RunPosition
        self.position = (0, 0)  # epoch, samples of it that are used
        # the last step was to be followed by one, and the run was interrupted
        self.owes_evaluation = False
        self.behind: CheckpointsBehind | None = None
        if self.args.async_save:
            self.behind = CheckpointsBehind(self.args, trainer.mesh, directory, self._received)
        self.dataset = self._fingerprint()
        self.described = resumption.describe(trainer.model)
        self._begin_state()
        if resume is not None:
            self._resume(resume)
        self.first_step = self.state.global_step

    @property
    def state(self) -> TrainerState:
        return self.trainer.state

    def _begin_state(self) -> None:
        trainer = self.trainer
        trainer.state = TrainerState(
            stateful_callbacks=callbacks.exportable(self.handler, trainer.control)
        )
        trainer.state.train_batch_size = self.args.train_batch_size
        trainer.state.compute_steps(self.args, self.extent.steps)
        self._refer()

    def _refer(self) -> None:
        state = self.state
        state.max_steps = self.extent.steps
        state.num_train_epochs = self.extent.epochs
        state.is_local_process_zero = self.trainer.is_local_process_zero()
        state.is_world_process_zero = self.trainer.is_world_process_zero()

    def _fingerprint(self) -> dict:
        """Return the fingerprint of the training dataset, before an epoch may change what it
        yields.

        Raises DataError on every rank if ranks have different ones.
        """
        return fingerprint.agreed(self.loading.dataset, self.trainer.control_group)

    def _resume(self, directory: Path) -> None:
        trainer = self.trainer
        args = self.args
        trainer.state = trainer_state.read(directory, trainer.control_group)
        best = self.state.best_model_checkpoint
        if best is not None and not run_directory.exists(Path(best), trainer.control_group):
            self.state.best_model_checkpoint = None
        if args.restore_callback_states_from_checkpoint:
            trainer.control = callbacks.restore(self.state, self.handler, trainer.control)
        self._refer()
        path = directory / run_directory.TRAINING_STATE

        def progress_of(extra: dict) -> RunPosition:
            return RunPosition.of_json(extra, path, self.rate.state())

        # All of the directory was verified when it was found.
        extra = self.engine.load(
            path, verify=False, check=lambda extra: self._check_alike(directory, progress_of(extra))
        )
        progress = progress_of(extra)
        self.first_epoch, samples = progress.position
        self.position = (self.first_epoch, samples)
        if not args.ignore_data_skip:
            self.skipped_batches = self._batches_in(samples)
        self._extend(progress)
        self.rate.load(progress.rate)
        self.pending_loss = progress.pending_loss
        self.last_logged = progress.last_logged
        self.owes_evaluation = progress.owes_evaluation
        self.grad_norm = progress.grad_norm
        self.used_rate = progress.used_rate
        order = self.loading.order
        # the rest of the epoch is what its order left
        if self.skipped_batches and isinstance(order, LengthOrder):
            order.begun = self.first_epoch, progress.grouped_by or progress.global_batch

    def _extend(self, saved: RunPosition) -> None:
        """Give a run that goes on with other batches the steps that the rest of its epochs has."""
        trainer = self.trainer
        accumulation = self.args.gradient_accumulation_steps
        done = self.state.global_step
        if self.loading.streamed:  # which ends by itself, and not behind a number of batches
            rest = self.skipped_batches + (self.extent.steps - done) * accumulation
            self.extent = replace(self.extent, batches=max(self.extent.batches, rest))
            return
        self.more_steps = saved.more_steps
        if saved.global_batch != self._global_batch():
            left = -(-(self.extent.batches - self.skipped_batches) // accumulation)
            self.more_steps = done + left - (self.first_epoch + 1) * self.extent.updates
        if self.more_steps:
            self.extent = self.extent.resumed(self.args, self.more_steps)
            self.rate = trainer.learning_rate(self.extent.steps)
            self._refer()

    def _check_alike(self, directory: Path, saved: RunPosition) -> None:
        """Refuse another model, dataset or seed than the checkpoint's; report other differences."""
        if saved.seeds != self._seeds():
            remedy = (
                "Give the seed and the data_seed of the checkpoint's run, or start a new "
                "run from its weights"
            )
            raise CheckpointError(
                "seed, data_seed", self._seeds(), f"the checkpoint's run has {saved.seeds}", remedy
            )
        notes = resumption.check_model(saved.model, self.described)
        if reason := fingerprint.difference(saved.dataset, self.dataset):
            if not self.args.ignore_data_skip:
                remedy = (
                    "Pass the dataset of that run, or set ignore_data_skip=True to start an "
                    "epoch of this one"
                )
                raise CheckpointError(
                    "train_dataset", f"(length {self.dataset['length']})", reason, remedy
                )
            notes.append(f"train_dataset: {reason}")
        if saved.global_batch != self._global_batch():
            notes.append(
                f"samples of a step: {self._global_batch()} != {saved.global_batch} (of the "
                "checkpoint)"
            )
        compare_trainer_and_checkpoint_args(self.args, self.state)
        if self.trainer.is_world_process_zero():
            resumption.say(
                directory, notes + resumption.argument_changes(directory, self.args.to_dict())
            )

    def _batches_in(self, samples: int) -> int:
        """Return the number of this replica's batches in the first ``samples`` of an epoch, maybe
        run under another layout.
        """
        per_batch = self.samples_per_batch
        if samples % per_batch:
            reason = f"the checkpoint was saved after {samples} samples of an epoch"
            remedy = "Choose per_device_train_batch_size x data-parallel size to divide them"
            raise CheckpointError("batches of samples", per_batch, reason, remedy)
        return samples // per_batch

    def _seeds(self) -> list:
        return [self.args.seed, self.args.data_seed]

    def _global_batch(self) -> int:
        return self.samples_per_batch * self.args.gradient_accumulation_steps

    def run(self) -> TrainOutput:
        trainer = self.trainer
        began = time.time()
        trainer.first_tokens = self.state.num_input_tokens_seen
        self.began = began
        saves = saves_for_signals(self.args)
        with Interruption(
            trainer.control_group, end_interrupted, active=saves
        ) as self.interruption:
            for name in self.interruption.kept:
                say(self.args, f"{name} has a handler of its own, so it does not save the run")
            with nullcontext() if self.behind is None else self.behind:
                self._epochs()
                self._finish_saves()
        return self._finish()

    def _epochs(self) -> None:
        trainer = self.trainer
        self._tell("on_train_begin")
        if self.args.eval_on_start:
            self._evaluate(moves_rate=False)
        if self.owes_evaluation:
            self.owes_evaluation = False
            trainer.control.should_evaluate = True
            self._log_evaluate_save()
            if trainer.control.should_training_stop:
                return
        for epoch in range(self.first_epoch, self.extent.epochs):
            self._tell("on_epoch_begin")
            check_model(trainer)
            self._epoch(epoch)
            if trainer.control.should_training_stop:
                break

    def _tell(self, event: str) -> None:
        trainer = self.trainer
        trainer.control = getattr(self.handler, event)(self.args, self.state, trainer.control)

    def _epoch(self, epoch: int) -> None:
        skip = self.skipped_batches if epoch == self.first_epoch else 0
        done = skip
        total = self.extent.batches
        batches = self.loading.epoch(epoch, skip) if done < total else iter(())
        while done < total and self.state.global_step < self.extent.steps:
            group = list(islice(batches, min(self.args.gradient_accumulation_steps, total - done)))
            if self.loading.streamed:
                check_everywhere(group, len(group), self.trainer.mesh)
            if not group:  # a stream that ended early
                break
            done += len(group)
            before = self.position
            self.position = (epoch, done * self.samples_per_batch)
            try:
                updated = self._step(group, epoch + done / total)
            except (UnexpectedResultError, DoubtfulResultError):  # nothing was updated
                self.position = before
                self._save_after_all()
                raise
            if not updated:
                done -= len(group)
                self.position = before
                break
            if self.trainer.control.should_epoch_stop or self.trainer.control.should_training_stop:
                break
        if done == 0:
            self.trainer.control.should_training_stop = True
        # else a resumed run goes on where this one stopped
        if done == total or not self._is_over():
            self.position = (epoch + 1, 0)
        self._tell("on_epoch_end")
        self._log_evaluate_save()

    def _save_after_all(self) -> None:
        """Save the run as of the last step, unless that was saved."""
        self._finish_saves()
        place = self.directory.place(self.state.global_step)
        if self.args.save_strategy != SaveStrategy.NO and not run_directory.exists(
            place, self.trainer.control_group
        ):
            self._save()

    def _say(self, text: str) -> None:
        if self.trainer.is_world_process_zero():
            logging.getLogger(__name__).warning("%s", text)

    def _warn(self, text: str) -> None:
        logging.getLogger(__name__).warning("%s", text)

    def _is_over(self) -> bool:
        return (
            self.trainer.control.should_training_stop or self.state.global_step >= self.extent.steps
        )

    def _step(self, batches: list[Batch], epoch: float) -> bool:
        """Return whether weights were updated: not where a callback ended training between
        micro-batches.
        """
        trainer = self.trainer
        state = self.state
        self._tell("on_step_begin")
        self.interruption.before_step()
        self.engine.freeze(frozen := self.rate.groups.frozen())
        self.frozen = zlib.crc32(" ".join(frozen).encode())
        prepared = trainer.prepare_step(batches)
        reduced = self.rerun.backward(prepared)
        self.captures.look()
        trainer.note_reports(batches, prepared)
        for _ in batches[1:]:
            self._tell("on_substep_end")
        if len(batches) > 1 and self._stops_midway():
            return False
        if self.rate.groups.frozen() != frozen:
            self.fault = _frozen_midway(self.rate.groups.frozen(), frozen)
        self._tell("on_pre_optimizer_step")
        self.rates = self.rate.groups.rates()
        result = self.engine.update(self.rate.groups.of_engine(), reduced)
        assert result.loss is not None, "all ranks learn it"
        self._count_loss(result.loss)
        self._tell("on_optimizer_step")
        self.grad_norm, self.used_rate = result.grad_norm, self.rate.logged
        if not result.skipped:
            self.rate.advance()
        state.global_step += 1
        state.epoch = epoch
        number = self.interruption.after_step()
        self._tell("on_step_end")
        if number:
            self._end_interrupted(number)
        self._log_evaluate_save()
        told = self.skips.count(result.skipped, lambda: self.engine.first_not_finite(prepared))
        if told:
            self._say(f"Step {state.global_step}: {told}.")
        return True

    def _stops_midway(self) -> bool:
        """Whether a callback of any rank has ended training between two micro-batches: transformers
        discards their gradient.

        Raises ConfigError on every rank if it has ended the epoch: transformers adds that gradient
        to the next epoch's first step.
        """
        group = self.trainer.control_group
        control = self.trainer.control
        wishes = torch.tensor([int(control.should_training_stop), int(control.should_epoch_stop)])
        if group is not None:
            dist.all_reduce(wishes, dist.ReduceOp.MAX, group=group)
        control.should_training_stop, control.should_epoch_stop = map(bool, wishes.tolist())
        if control.should_epoch_stop and not control.should_training_stop:
            reason = (
                "a callback set it between micro-batches of a step, whose gradient would "
                "belong to no epoch"
            )
            raise ConfigError("should_epoch_stop", True, reason, "Set it in on_step_end")
        return control.should_training_stop

    def _end_interrupted(self, number: int) -> NoReturn:
        """Save and raise Interrupted on every rank. There may be little time: an evaluation is left
        to the next run.
        """
        trainer = self.trainer
        state = self.state
        self._agree()
        self._log()
        self.owes_evaluation = trainer.control.should_evaluate
        self._save()
        self._tell("on_save")
        text = ""
        if trainer.is_world_process_zero():
            saved = "which was saved in"
            again = "to go on, train(resume_from_checkpoint=True)"
            if self.args.save_only_model:
                saved = "whose model was saved in"
                again = "without the state to go on from (save_only_model)"
            name = signal.Signals(number).name
            text = f"interrupted by {name} after step {state.global_step:,}, {saved} "
            text += f"{self.directory.place(state.global_step)}; {again}"
            tell(f"{Path(sys.argv[0]).name}: {text}")
        trainer.control.should_training_stop = True
        self._tell("on_train_end")
        raise Interrupted(number, text)

    def _count_loss(self, loss: float) -> None:
        if self.args.logging_nan_inf_filter and not math.isfinite(loss):
            loss = self.pending_loss / (1 + self.state.global_step - self.last_logged)
        self.pending_loss += loss
        self.run_loss += loss

    def _agree(self) -> None:
        """Let all ranks do what the callbacks of any rank decide; else some would wait in a
        collective forever.

        Called after every event whose decisions are read before the next one. Raises ConfigError on
        every rank for a change of the optimizer's groups that is not supported, or that other ranks
        did not make.
        """
        group = self.trainer.control_group
        control = self.trainer.control
        fault = self.fault or self.rate.groups.fault() or lost_writes(self.trainer)
        if group is None:
            if fault is not None:
                raise fault
            return
        rates = [rate if math.isfinite(rate) else -1.0 for rate in self.rates]
        decisions = [getattr(control, name) for name in DECISIONS]
        compared = [*rates, float(self.frozen)]
        own_values = [*decisions, fault is not None, *compared, *(-each for each in compared)]
        wishes = torch.tensor(own_values, dtype=torch.float64)
        dist.all_reduce(wishes, dist.ReduceOp.MAX, group=group)
        values = wishes.tolist()
        for name, wish in zip(DECISIONS, values, strict=False):
            setattr(control, name, bool(wish))
        if values[len(DECISIONS)]:
            raise_together(fault, group, "cpu")
        count = len(compared)
        most = values[-2 * count : -count]
        least = [-value for value in values[-count:]]
        if most[-1] != least[-1]:
            reason = "callbacks froze other parameters on other ranks"
            raise ConfigError(
                "requires_grad",
                "(set)",
                reason,
                "Let them freeze the same on every rank: seed the choice",
            )
        if most != least:
            reason = f"ranks used rates up to {most}"
            raise ConfigError(
                "optimizer.param_groups", least, reason, "Let callbacks set them on every rank"
            )

    def _log(self) -> None:
        """Log the steps since the last log, if a callback decided so."""
        trainer = self.trainer
        if trainer.control.should_log and self.state.global_step > self.last_logged:
            steps = self.state.global_step - self.last_logged
            logs = {"loss": self.pending_loss / steps}
            if self.grad_norm is not None:
                logs["grad_norm"] = self.grad_norm
            logs["learning_rate"] = self.rate.logged if self.used_rate is None else self.used_rate
            self.pending_loss, self.last_logged = 0.0, self.state.global_step
            trainer.store_flos()
            trainer.log(logs, self.began)
            self._agree()

    def _log_evaluate_save(self) -> None:
        trainer = self.trainer
        self._agree()
        self._log()
        if trainer.control.should_evaluate:
            better = self._is_better(self._evaluate())
            self._agree()
            if self.args.save_strategy == SaveStrategy.BEST:
                trainer.control.should_save = better
        if trainer.control.should_save:
            if self.behind is None:
                self._save()
                self._tell("on_save")
            else:
                self._save_behind(self.behind)
                # which the handler does where it calls on_save
                trainer.control.should_save = False
            self._agree()
        self._tell_saved(None if self.behind is None else self.behind.written())

    def _evaluate(self, moves_rate: bool = True) -> dict[str, float]:
        metrics = self.trainer.evaluate(ignore_keys=self.ignored_outputs)
        if self.rate.follows_metric and moves_rate:
            self.rate.follow(self._metric(metrics))
        return metrics

    def _metric(self, metrics: dict[str, float]) -> float:
        name = self.args.metric_for_best_model
        assert name is not None, "transformers sets it where something follows a metric"
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            remedy = f"Choose one of {', '.join(metrics)}"
            raise ConfigError(
                "metric_for_best_model", name, "the evaluation has no such metric", remedy
            )
        return metrics[name]

    def _is_better(self, metrics: dict[str, float]) -> bool:
        """Whether the model is the best so far; if so, record it."""
        args = self.args
        state = self.state
        if args.metric_for_best_model is None:
            return False
        value = self._metric(metrics)
        compare = np.greater if args.greater_is_better else np.less
        if state.best_metric is None:
            state.best_metric = -math.inf if args.greater_is_better else math.inf
        if not compare(value, state.best_metric):
            return False
        state.best_metric = value
        if args.save_strategy != SaveStrategy.NO:
            state.best_global_step = state.global_step
        return True

    def _tell_saved(self, state: TrainerState | None) -> None:
        """Call ``on_save`` for a checkpoint that a thread has completed.

        state: that was saved; None: there is none.
        """
        trainer = self.trainer
        if state is not None:
            # the handler takes it back, and it may be of another step
            wanted = trainer.control.should_save
            trainer.control = self.handler.on_save(self.args, state, trainer.control)
            trainer.control.should_save |= wanted
            self._agree()

    def _finish_saves(self) -> None:
        """Wait for the checkpoint that a thread writes, if any, and call ``on_save``. Raises what
        it raised.
        """
        if self.behind is not None:
            self._tell_saved(self.behind.finish())

    def _save_behind(self, behind: CheckpointsBehind) -> None:
        """Copy what a checkpoint has, for a thread to write, once the one before is complete."""
        trainer = self.trainer
        began = time.perf_counter()
        self._finish_saves()
        check_model(trainer, saves=True)
        trainer.store_flos()
        saving = saving_of(self.args, trainer.control_group)  # of a tokenizer's files, for a moment
        saving.received = self._received
        copies = saving.run(self.directory.root, lambda: self._copies(behind.staging))
        behind.begin(copies, self.state, self.state.best_model_checkpoint, began)

    def _copies(self, staging: Staging) -> CheckpointCopies:
        state = None
        if self.args.save_only_model:
            self.engine.check_finite()
        else:  # checks the same
            state = self.engine.copied(staging, self._progress().to_json())
        trainer = self.trainer
        model = self.engine.copied_hf(staging, trainer.feed.tokenizer, trainer.beside)
        self._prepare_state()
        texts = {
            run_directory.TRAINING_ARGUMENTS: self.args.to_json_string() + "\n",
            run_directory.TRAINER_STATE: trainer_state.text_of(self.state),
        }
        return CheckpointCopies(state, model, texts)

    def _save(self) -> None:
        trainer = self.trainer
        args = self.args
        state = self.state
        self._finish_saves()
        check_model(trainer, saves=True)
        trainer.store_flos()
        saving = saving_of(args, trainer.control_group)
        saving.received = self._received
        saving.run(self.directory.root, self._write)
        self.directory.rotate(args.save_total_limit, state.global_step, state.best_model_checkpoint)

    def _received(self) -> int:
        """Return a signal because of which a save does not wait for space, 0 for none."""
        return 0 if self.interruption.agreed else self.interruption.received

    def _write(self) -> None:
        trainer = self.trainer
        args = self.args
        with self.directory.writing(self.state.global_step) as directory:
            if args.save_only_model:
                self.engine.check_finite()
            else:  # checks the same
                self.engine.save(
                    directory / run_directory.TRAINING_STATE, self._progress().to_json()
                )
            trainer.save_model(str(directory), _internal_call=True)
            self._prepare_state()
            trainer_state.write(directory, self.state, trainer.control_group)

    def _prepare_state(self) -> None:
        """Add to the state what a checkpoint says beside it: the best one, and of callbacks."""
        trainer = self.trainer
        state = self.state
        if state.best_global_step:
            best = self.directory.place(state.best_global_step)
            if state.best_global_step == state.global_step or run_directory.exists(
                best, trainer.control_group
            ):
                state.best_model_checkpoint = str(best)
        callbacks.export(state, self.handler, trainer.control)

    def _progress(self) -> RunPosition:
        order = self.loading.order
        return RunPosition(
            self.rate.state(),
            self.pending_loss,
            self.last_logged,
            self._seeds(),
            list(self.position),
            self._global_batch(),
            self.dataset,
            self.described,
            self.owes_evaluation,
            self.grad_norm,
            self.used_rate,
            grouped_by=order.group_of(self.position[0]) if isinstance(order, LengthOrder) else None,
            more_steps=self.more_steps,
        )

    def _finish(self) -> TrainOutput:
        trainer = self.trainer
        args = self.args
        state = self.state
        group = self.trainer.control_group
        steps = state.global_step - self.first_step
        loss = self.run_loss / steps if steps else 0.0
        share = steps / max(state.max_steps, 1)
        metrics = speed_metrics("train", self.began, self.extent.samples * share, steps)
        trainer.store_flos()
        metrics |= {"total_flos": state.total_flos, "train_loss": loss}
        trainer.log(metrics)
        best = state.best_model_checkpoint
        if (
            args.load_best_model_at_end
            and best is not None
            and not run_directory.exists(Path(best), group)
        ):
            warn(
                self.args,
                f"load_best_model_at_end: {best} was removed, so the weights of the last step stay",
            )
        elif args.load_best_model_at_end and best is not None:
            run_directory.verify(Path(best), group)
            self.engine.load(Path(best) / run_directory.TRAINING_STATE, verify=False)
        if best is not None and args.save_total_limit == 1:
            self.directory.keep_only(Path(best))
        say(self.args, self.captures.summary())
        self._tell("on_train_end")
        return TrainOutput(state.global_step, loss, metrics)


def _frozen_midway(now: list[str], before: list[str]) -> ConfigError:
    name = next(name for name in (*now, *before) if (name in now) != (name in before))
    reason = (
        "it was changed between two micro-batches of a step, whose gradients are computed together"
    )
    value = f"requires_grad={name in before}"
    return ConfigError(
        name, value, reason, "Freeze and thaw in on_step_begin, on_step_end or later events"
    )
