"""What the checkpoints of a run have, and how they are written: while the run waits, or behind it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from transformers import TrainerState

from ...checkpoint.behind import Staging
from . import callbacks, run_directory, trainer_state
from .checkpoints_behind import CheckpointCopies, CheckpointsBehind
from .console import saving_of
from .progress import RunPosition
from .recapture import check_model
from .run_directory import RunDirectory
from .trainer_of_run import TrainerOfRun


class RunSaves:
    """Writes checkpoints of a run. Collective over all ranks.

    directory: of the run.
    position:  returns where the run is.
    received:  see `Saving`.

    ``behind`` writes them in a thread (``async_save``); None: the run waits for them.
    """

    def __init__(
        self,
        trainer: TrainerOfRun,
        directory: RunDirectory,
        position: Callable[[], RunPosition],
        received: Callable[[], int],
    ):
        self._trainer = trainer
        self._directory = directory
        self._position = position
        self._received = received
        self.behind: CheckpointsBehind | None = None
        if trainer.args.async_save:
            self.behind = CheckpointsBehind(trainer.args, trainer.mesh, directory, received)

    @property
    def _state(self) -> TrainerState:
        return self._trainer.state

    def writing(self) -> AbstractContextManager[object]:
        """Return the context in which checkpoints are written."""
        return nullcontext() if self.behind is None else self.behind

    def exists(self, directory: str | Path) -> bool:
        """Whether there is a checkpoint, as the first rank sees it."""
        return run_directory.exists(Path(directory), self._trainer.control_group)

    def save(self) -> None:
        """Write a checkpoint of the last step; the one before is complete."""
        trainer = self._trainer
        args = trainer.args
        check_model(trainer, saves=True)
        trainer.store_flos()
        saving = saving_of(args, trainer.control_group)
        saving.received = self._received
        saving.run(self._directory.root, self._write)
        state = self._state
        self._directory.rotate(
            args.save_total_limit, state.global_step, state.best_model_checkpoint
        )

    def begin(self, behind: CheckpointsBehind, began: float) -> None:
        """Copy what a checkpoint of the last step has, for a thread to write; the one before is
        complete.

        began: when training began to wait, by ``time.perf_counter``.
        """
        trainer = self._trainer
        check_model(trainer, saves=True)
        trainer.store_flos()
        # of a tokenizer's files, for a moment
        saving = saving_of(trainer.args, trainer.control_group)
        saving.received = self._received
        copies = saving.run(self._directory.root, lambda: self._copies(behind.staging))
        behind.begin(copies, self._state, self._state.best_model_checkpoint, began)

    def _copies(self, staging: Staging) -> CheckpointCopies:
        trainer = self._trainer
        engine = trainer.engine
        state = None
        if trainer.args.save_only_model:
            engine.check_finite()
        else:  # checks the same
            state = engine.copied(staging, self._position().to_json())
        model = engine.copied_hf(staging, trainer.feed.tokenizer, trainer.beside)
        self._complete_state()
        texts = {
            run_directory.TRAINING_ARGUMENTS: trainer.args.to_json_string() + "\n",
            run_directory.TRAINER_STATE: trainer_state.text_of(self._state),
        }
        return CheckpointCopies(state, model, texts)

    def _write(self) -> None:
        trainer = self._trainer
        with self._directory.writing(self._state.global_step) as directory:
            if trainer.args.save_only_model:
                trainer.engine.check_finite()
            else:  # checks the same
                trainer.engine.save(
                    directory / run_directory.TRAINING_STATE, self._position().to_json()
                )
            trainer.save_model(str(directory), _internal_call=True)
            self._complete_state()
            trainer_state.write(directory, self._state, trainer.control_group)

    def _complete_state(self) -> None:
        """Add to the state what a checkpoint says beside it: the best one, and of callbacks."""
        trainer = self._trainer
        state = self._state
        if state.best_global_step:
            best = self._directory.place(state.best_global_step)
            if state.best_global_step == state.global_step or self.exists(best):
                state.best_model_checkpoint = str(best)
        callbacks.export(state, trainer.callback_handler, trainer.control)
