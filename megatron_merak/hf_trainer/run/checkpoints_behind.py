"""Checkpoints of a run of training that are written while it trains on (``async_save``).

    begin(...)     copies of what a checkpoint has; a thread writes them as the unit that a save is
    written()      -> the checkpoint that has become complete, on every rank at once, or None
    finish()       waits for it

``on_save`` is the loop's to call, once a checkpoint is complete, with the state that it was saved
with.
"""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from transformers import TrainerState

from ...checkpoint.behind import Behind, Staging
from ...checkpoint.full_disk import Saving
from ...checkpoint.hf_copies import HFCopies
from ...checkpoint.save import write
from ...errors import ConfigError
from ...parallel.mesh import Mesh
from ...stages.captured import StateCopies
from ..arguments.merak_arguments import MerakArguments
from .console import say, warn
from .run_directory import TRAINING_STATE, RunDirectory, write_text


@dataclass(frozen=True)
class CheckpointCopies:
    """What a checkpoint has.

    state: the training state; None where the model alone is saved.
    model: files of the model.
    texts: further files by name.
    """

    state: StateCopies | None
    model: HFCopies
    texts: Mapping[str, str]

    def write(self, directory: Path, group: dist.ProcessGroup | None) -> None:
        """Write all of it into a new directory. Collective; raises CheckpointError."""
        if self.state is not None:
            state = self.state
            place = directory / TRAINING_STATE
            write(place, state.iteration, state.kinds, state.meta, group=group, device="cpu")
        self.model.write(directory, group)
        for name, text in self.texts.items():
            write_text(directory, name, text, group)


class CheckpointsBehind:
    """Writes checkpoints of a run, one at a time; a context that ends when the last one is written.
    Collective.

    directory: of the run.
    received:  see `Saving`.
    """

    def __init__(
        self,
        args: MerakArguments,
        mesh: Mesh,
        directory: RunDirectory,
        received: Callable[[], int],
    ):
        self.staging = Staging(mesh.device)
        self._args = args
        self._directory = directory
        self._group = mesh.group_of_thread()
        # the thread prints its lines itself: training may wait for it for hours
        self._saving = Saving(
            args.on_full_disk, self._group, partial(warn, args), received, setting="on_full_disk"
        )
        self._behind = Behind(self._saving.give_up)
        self._begun: TrainerState | None = None  # of a checkpoint of which nobody was told yet

    def begin(
        self, copies: CheckpointCopies, state: TrainerState, best: str | None, began: float
    ) -> None:
        """Write a checkpoint of ``state`` in a thread; the one before is complete.

        best:  the best checkpoint of the run, which stays.
        began: when training began to wait, by ``time.perf_counter``.

        Raises CheckpointError if the directory cannot be locked.
        """
        self._directory.hold()
        directory = self._directory.over(self._group)
        self._begun = copy.copy(state)
        self._begun.log_history = [*state.log_history]
        waited = time.perf_counter() - began
        self._behind.start(
            partial(self._write, directory, copies, state.global_step, best=best, waited=waited)
        )

    def _write(
        self,
        directory: RunDirectory,
        copies: CheckpointCopies,
        step: int,
        best: str | None,
        waited: float,
    ) -> Path:
        """Write it; called in the thread."""

        def attempt() -> None:
            with directory.writing(step) as fresh:
                copies.write(fresh, self._group)

        began = time.perf_counter()
        self._saving.run(directory.root, attempt)
        place = directory.place(step)
        seconds = time.perf_counter() - began
        waits = f"beside training, which waited {waited:.2f} s"
        say(self._args, f"saved {place} in {seconds:.1f} s {waits}")
        directory.rotate(self._args.save_total_limit, step, best)
        return place

    def finish(self) -> TrainerState | None:
        """Wait until what was begun is written; return its state, None where there is none of which
        nobody was told.

        Raises on every rank what the thread raised.
        """
        self._behind.finish()
        begun = self._begun
        self._begun = None
        return begun

    def written(self) -> TrainerState | None:
        """Return what `finish` does where every rank's part is written, else None, without waiting.
        Collective; an error stays for `finish`.
        """
        if self._begun is None:
            return None
        is_written = torch.tensor(int(self._behind.succeeded), dtype=torch.int32)
        if self._group is not None:
            dist.all_reduce(is_written, dist.ReduceOp.MIN, group=self._directory.group)
        return self.finish() if is_written.item() else None

    def __enter__(self) -> Self:
        self._behind.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._behind.__exit__(kind, error, trace)
        if self._group is not None and error is None:
            dist.barrier(self._directory.group)  # others may still receive over it
            dist.destroy_process_group(self._group)


def refuse_override(trainer: object, base: type, args: MerakArguments) -> None:
    """Raise ConfigError if ``async_save`` would pass over a ``save_model`` of the script.

    base: the class whose ``save_model`` a thread stands in for.
    """
    kind = type(trainer)
    own = getattr(kind, "save_model", None) is not getattr(base, "save_model", None)
    if args.async_save and (own or "save_model" in vars(trainer)):
        reason = (
            f"{kind.__name__}.save_model is not that of {base.__name__}, and a thread would call it "
            "while training changes the weights"
        )
        remedy = "Leave async_save out, or add files to a checkpoint in the callback on_save"
        raise ConfigError("async_save", True, reason, remedy)
