"""Checkpoints of a pretraining job that are written while it trains on (--async-save)."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..checkpoint import store
from ..checkpoint.behind import Behind, Staging
from ..checkpoint.full_disk import Saving
from ..checkpoint.save import check_finite, write
from ..checkpoint.shard import StateKind
from .trainer import Trainer


class SavesBehind:
    """Saves a trainer's state: `save` copies it, a thread writes the copies. Collective.

    confirm:  called before each attempt with the group of the thread and what says a line: makes the
              directory anew where it was removed.
    received: see `Saving`.
    tell:     see `Behind`.

    ``behind`` is the context in which they are written; ``behind.lines`` is what the thread says.
    """

    def __init__(
        self,
        trainer: Trainer,
        confirm: Callable[[dist.ProcessGroup | None, Callable[[str], object]], None],
        received: Callable[[], int],
        tell: Callable[[], object],
    ):
        mesh = trainer.mesh
        self._trainer = trainer
        self._confirm = confirm
        self._staging = Staging(mesh.device)
        self._group = mesh.group_of_thread()
        self.behind = Behind(self._give_up, tell)
        self._saving = Saving(
            trainer.config.checkpoint.on_full_disk, self._group, self.behind.lines.put, received
        )

    def save(self, root: str) -> None:
        """Begin a checkpoint of this iteration under ``root``, once the one before is written.

        Raises on every rank CheckpointError where that one failed, NumericsError for numbers that
        are not finite, and Interrupted for a signal while it waited for space.
        """
        trainer = self._trainer
        control = trainer.mesh.control
        began = time.perf_counter()
        self.behind.finish()
        kinds = trainer.saved_kinds()
        check_finite(kinds, control, "cpu")
        staged = self._staging.copies(kinds, control, "cpu")
        waited = time.perf_counter() - began
        meta = trainer.meta()
        self.behind.start(partial(self._write, root, trainer.iteration, staged, meta, waited))

    def _write(
        self,
        root: str,
        iteration: int,
        staged: Mapping[str, StateKind],
        meta: dict[str, Any],
        waited: float,
    ) -> Path:
        """Write it; called in the thread."""

        def attempt() -> Path:
            self._confirm(self._group, self.behind.lines.put)
            return write(root, iteration, staged, meta, group=self._group, device="cpu")

        began = time.perf_counter()
        path = self._saving.run(root, attempt)
        seconds = time.perf_counter() - began
        self.behind.lines.put(
            f"saved {path} in {seconds:.1f} s beside training, which waited {waited:.2f} s"
        )
        if retain := self._trainer.config.checkpoint.save_retain_interval:
            store.prune(root, retain, self._group, saved=iteration)
        return path

    def _give_up(self) -> None:
        self._saving.give_up()
