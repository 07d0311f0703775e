"""One call of ``MerakTrainer.train``: epochs, steps, and what callbacks decide to log, evaluate and
save.

The order of events, the keys of logs and the arithmetic of steps are those of
``transformers.Trainer``.
"""

import logging
import signal
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NoReturn

from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import (
    SaveStrategy,
    TrainOutput,
    compare_trainer_and_checkpoint_args,
    speed_metrics,
)

from ...errors import CheckpointError, DoubtfulResultError, UnexpectedResultError
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
from .best_model import metric_of, note_best
from .captures import Captures
from .console import say, warn
from .decisions import Decisions
from .progress import DataPlace, RunPosition
from .rates import extent
from .recapture import check_model
from .resumption import RunIdentity
from .run_directory import RunDirectory
from .saves import RunSaves
from .step_losses import StepLosses
from .trainer_of_run import TrainerOfRun


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
        self.loading = trainer.callback_handler.train_dataloader
        division = self.loading.division
        examples = None if division is None else len(self.loading.dataset)
        batches = None if division is None else division.batches
        self.extent = extent(self.args, batches, examples, self.loading.replicas)
        self.rate = trainer.learning_rate(self.extent.steps)
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
        self.decisions = Decisions(trainer)
        self.decisions.used_rates = self.rate.groups.rates()
        self.losses = StepLosses(self.args.logging_nan_inf_filter)
        self.place = DataPlace()
        # the last step was to be followed by one, and the run was interrupted
        self.owes_evaluation = False
        self.saves = RunSaves(trainer, directory, self._run_position, self._received)
        self.identity = self._identity()
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
            stateful_callbacks=callbacks.exportable(self.trainer.callback_handler, trainer.control)
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

    def _identity(self) -> RunIdentity:
        """Return what the run trains on, before an epoch may change what a dataset yields.

        Raises DataError on every rank if ranks have different datasets.
        """
        return RunIdentity(
            seeds=[self.args.seed, self.args.data_seed],
            global_batch=self.loading.samples_per_batch * self.args.gradient_accumulation_steps,
            dataset=fingerprint.agreed(self.loading.dataset, self.trainer.control_group),
            model=resumption.describe(self.trainer.model),
        )

    def _resume(self, directory: Path) -> None:
        trainer = self.trainer
        args = self.args
        trainer.state = trainer_state.read(directory, trainer.control_group)
        best = self.state.best_model_checkpoint
        if best is not None and not self.saves.exists(best):
            self.state.best_model_checkpoint = None
        if args.restore_callback_states_from_checkpoint:
            trainer.control = callbacks.restore(
                self.state, self.trainer.callback_handler, trainer.control
            )
        self._refer()
        path = directory / run_directory.TRAINING_STATE

        def progress_of(extra: dict) -> RunPosition:
            return RunPosition.of_json(extra, path, self.rate.state())

        # All of the directory was verified when it was found.
        extra = self.engine.load(
            path, verify=False, check=lambda extra: self._check_alike(directory, progress_of(extra))
        )
        progress = progress_of(extra)
        self.place = DataPlace(*progress.position)
        self.place.first_epoch = self.place.epoch
        if not args.ignore_data_skip:
            self.place.skipped_batches = self._batches_in(self.place.samples)
        self._extend(progress)
        self.rate.load(progress.rate)
        self.losses.pending = progress.pending_loss
        self.losses.last_logged = progress.last_logged
        self.owes_evaluation = progress.owes_evaluation
        self.losses.grad_norm = progress.grad_norm
        self.losses.used_rate = progress.used_rate
        order = self.loading.order
        # the rest of the epoch is what its order left
        if self.place.skipped_batches and isinstance(order, LengthOrder):
            order.begun = self.place.first_epoch, progress.grouped_by or progress.global_batch

    def _extend(self, saved: RunPosition) -> None:
        """Give a run that goes on with other batches the steps that the rest of its epochs has."""
        trainer = self.trainer
        accumulation = self.args.gradient_accumulation_steps
        done = self.state.global_step
        place = self.place
        if self.loading.streamed:  # which ends by itself, and not behind a number of batches
            rest = place.skipped_batches + (self.extent.steps - done) * accumulation
            self.extent = replace(self.extent, batches=max(self.extent.batches, rest))
            return
        place.more_steps = saved.more_steps
        if saved.global_batch != self.identity.global_batch:
            left = -(-(self.extent.batches - place.skipped_batches) // accumulation)
            place.more_steps = done + left - (place.first_epoch + 1) * self.extent.updates
        if place.more_steps:
            self.extent = self.extent.resumed(self.args, place.more_steps)
            self.rate = trainer.learning_rate(self.extent.steps)
            self._refer()

    def _check_alike(self, directory: Path, saved: RunPosition) -> None:
        """Refuse another model, dataset or seed than the checkpoint's; report other differences."""
        notes = self.identity.compare(saved, self.args.ignore_data_skip)
        compare_trainer_and_checkpoint_args(self.args, self.state)
        if self.trainer.is_world_process_zero():
            resumption.say(
                directory, notes + resumption.argument_changes(directory, self.args.to_dict())
            )

    def _batches_in(self, samples: int) -> int:
        """Return the number of this replica's batches in the first ``samples`` of an epoch, maybe
        run under another layout.
        """
        per_batch = self.loading.samples_per_batch
        if samples % per_batch:
            reason = f"the checkpoint was saved after {samples} samples of an epoch"
            remedy = "Choose per_device_train_batch_size x data-parallel size to divide them"
            raise CheckpointError("batches of samples", per_batch, reason, remedy)
        return samples // per_batch

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
            with self.saves.writing():
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
        for epoch in range(self.place.first_epoch, self.extent.epochs):
            self._tell("on_epoch_begin")
            check_model(trainer)
            self._epoch(epoch)
            if trainer.control.should_training_stop:
                break

    def _tell(self, event: str) -> None:
        trainer = self.trainer
        trainer.control = getattr(self.trainer.callback_handler, event)(
            self.args, self.state, trainer.control
        )

    def _epoch(self, epoch: int) -> None:
        place = self.place
        skip = place.skipped_batches if epoch == place.first_epoch else 0
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
            before = place.now()
            place.move(epoch, done * self.loading.samples_per_batch)
            try:
                updated = self._step(group, epoch + done / total)
            except (UnexpectedResultError, DoubtfulResultError):  # nothing was updated
                place.move(*before)
                self._save_after_all()
                raise
            if not updated:
                done -= len(group)
                place.move(*before)
                break
            if self.trainer.control.should_epoch_stop or self.trainer.control.should_training_stop:
                break
        if done == 0:
            self.trainer.control.should_training_stop = True
        # else a resumed run goes on where this one stopped
        if done == total or not self._is_over():
            place.move(epoch + 1, 0)
        self._tell("on_epoch_end")
        self._log_evaluate_save()

    def _save_after_all(self) -> None:
        """Save the run as of the last step, unless that was saved."""
        self._finish_saves()
        place = self.directory.place(self.state.global_step)
        if self.args.save_strategy != SaveStrategy.NO and not self.saves.exists(place):
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
        frozen = self.rate.groups.frozen()
        self.engine.freeze(frozen)
        self.decisions.freeze(frozen)
        prepared = trainer.prepare_step(batches)
        reduced = self.rerun.backward(prepared)
        self.captures.look()
        trainer.note_reports(batches, prepared)
        for _ in batches[1:]:
            self._tell("on_substep_end")
        if len(batches) > 1 and self.decisions.stops_midway():
            return False
        self.decisions.check_frozen(self.rate.groups.frozen(), frozen)
        self._tell("on_pre_optimizer_step")
        self.decisions.used_rates = self.rate.groups.rates()
        result = self.engine.update(self.rate.groups.of_engine(), reduced)
        assert result.loss is not None, "all ranks learn it"
        self.losses.add(result.loss, state.global_step)
        self._tell("on_optimizer_step")
        self.losses.grad_norm = result.grad_norm
        self.losses.used_rate = self.rate.logged
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

    def _agree(self) -> None:
        """Let all ranks do what the callbacks of any rank decide; see `Decisions.agree`."""
        self.decisions.agree(self.rate)

    def _log(self) -> None:
        """Log the steps since the last log, if a callback decided so."""
        trainer = self.trainer
        step = self.state.global_step
        if trainer.control.should_log and step > self.losses.last_logged:
            logs = self.losses.log(step, self.rate.logged)
            trainer.store_flos()
            trainer.log(logs, self.began)
            self._agree()

    def _log_evaluate_save(self) -> None:
        trainer = self.trainer
        self._agree()
        self._log()
        if trainer.control.should_evaluate:
            better = note_best(self.args, self.state, self._evaluate())
            self._agree()
            if self.args.save_strategy == SaveStrategy.BEST:
                trainer.control.should_save = better
        if trainer.control.should_save:
            behind = self.saves.behind
            if behind is None:
                self._save()
                self._tell("on_save")
            else:
                began = time.perf_counter()
                self._finish_saves()
                self.saves.begin(behind, began)
                # which the handler does where it calls on_save
                trainer.control.should_save = False
            self._agree()
        if self.saves.behind is not None:
            self._tell_saved(self.saves.behind.written())

    def _evaluate(self, moves_rate: bool = True) -> dict[str, float]:
        metrics = self.trainer.evaluate(ignore_keys=self.ignored_outputs)
        if self.rate.follows_metric and moves_rate:
            self.rate.follow(metric_of(self.args, metrics))
        return metrics

    def _tell_saved(self, state: TrainerState | None) -> None:
        """Call ``on_save`` for a checkpoint that a thread has completed.

        state: that was saved; None: there is none.
        """
        trainer = self.trainer
        if state is not None:
            # the handler takes it back, and it may be of another step
            wanted = trainer.control.should_save
            trainer.control = self.trainer.callback_handler.on_save(
                self.args, state, trainer.control
            )
            trainer.control.should_save |= wanted
            self._agree()

    def _finish_saves(self) -> None:
        """Wait for the checkpoint that a thread writes, if any, and call ``on_save``. Raises what
        it raised.
        """
        if self.saves.behind is not None:
            self._tell_saved(self.saves.behind.finish())

    def _save(self) -> None:
        self._finish_saves()
        self.saves.save()

    def _received(self) -> int:
        """Return a signal because of which a save does not wait for space, 0 for none."""
        return 0 if self.interruption.agreed else self.interruption.received

    def _run_position(self) -> RunPosition:
        order = self.loading.order
        grouped = order.group_of(self.place.epoch) if isinstance(order, LengthOrder) else None
        return RunPosition(
            rate=self.rate.state(),
            pending_loss=self.losses.pending,
            last_logged=self.losses.last_logged,
            seeds=self.identity.seeds,
            position=list(self.place.now()),
            global_batch=self.identity.global_batch,
            dataset=self.identity.dataset,
            model=self.identity.model,
            owes_evaluation=self.owes_evaluation,
            grad_norm=self.losses.grad_norm,
            used_rate=self.losses.used_rate,
            grouped_by=grouped,
            more_steps=self.place.more_steps,
        )

    def _finish(self) -> TrainOutput:
        trainer = self.trainer
        args = self.args
        state = self.state
        group = self.trainer.control_group
        steps = state.global_step - self.first_step
        loss = self.losses.run / steps if steps else 0.0
        share = steps / max(state.max_steps, 1)
        metrics = speed_metrics("train", self.began, self.extent.samples * share, steps)
        trainer.store_flos()
        metrics |= {"total_flos": state.total_flos, "train_loss": loss}
        trainer.log(metrics)
        best = state.best_model_checkpoint
        if args.load_best_model_at_end and best is not None and not self.saves.exists(best):
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
