"""A training run's directory, as ``transformers.Trainer`` lays it out, with this library's training state inside.

    output_dir/checkpoint-500/    config.json, model.safetensors, tokenizer files: from_pretrained() opens it
                                  training_state/       parameters, moments, schedule; for any layout of ranks
                                  trainer_state.json    steps done, log history, callbacks
                                  manifest.json         written last: size and digest of all of these

A checkpoint is one unit (``checkpoint/unit.py``): complete or absent, whatever is killed when. Every function is
collective over ``group``; an error on one rank is raised on all.
"""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...checkpoint import unit
from ...checkpoint.files import disk_errors
from ...checkpoint.lock import DirectoryLock
from ...checkpoint.unit_directories import Units, step_of
from ...data.files import atomic_writer
from ...errors import CheckpointError, DamagedError
from ...parallel.agree import broadcast_json, together

TRAINING_STATE = "training_state"
TRAINER_STATE = "trainer_state.json"
TRAINING_ARGUMENTS = "training_args.json"
SAVE_REMEDY = (
    "Check output_dir, its permissions and its free space; earlier checkpoints are untouched"
)
Group = dist.ProcessGroup | None
_REMEDY = "Name a complete checkpoint-N directory, or train without resuming"
_log = logging.getLogger(__name__)


class RunDirectory:
    """``output_dir`` of one run. It is locked from first use until `release`."""

    def __init__(self, output_dir: str, group: Group):
        self.root = Path(output_dir)
        self.units = Units(self.root)
        self.group = group
        self.first = group is None or dist.get_rank(group) == 0
        self._lock: DirectoryLock | None = None

    def hold(self) -> None:
        """Lock the directory, and complete what a crash of an earlier job interrupted. Raises
        CheckpointError.
        """
        if self._lock is not None:
            if self._lock.confirm_over(self.group) and self.first:
                _log.warning(
                    "%s was removed under the run, with all checkpoints in it: it is made anew",
                    self.root,
                )
            return
        self._lock = DirectoryLock(self.root, self.group)
        with self._on_first():
            if self.first:
                self.units.settle()

    def over(self, group: Group) -> "RunDirectory":
        """Return this directory, which is locked, for a thread with another group of the same
        ranks.
        """
        assert self._lock is not None, "hold it first"
        other = copy.copy(self)
        other.group = group
        return other

    def release(self) -> None:
        """Unlock the directory. Not collective."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    @contextmanager
    def _on_first(self) -> Iterator[None]:
        """Run a change of the disk on the first rank; an error is raised on all ranks."""
        with together(self.group, "cpu"), disk_errors(self.root, SAVE_REMEDY):
            yield

    def place(self, step: int) -> Path:
        return self.units.names(step).plain

    def _complete(self) -> list[int]:
        """Return the steps of the complete checkpoints that the first rank sees, newest first."""
        steps: list[int | None] = []
        with self._on_first():
            if self.first:
                steps = [step_of(path) for path in self.units.newest_first()]
        return broadcast_json(steps, self.group, "cpu")

    def _candidates(self, faults: list[str]) -> Iterator[Path]:
        """Yield the complete checkpoints, newest first; ``faults`` collects what is wrong with
        others.

        Raises CheckpointError for one that cannot be read, or that another version wrote: that is
        not damage.
        """
        errors: list[CheckpointError] = []
        paths = self.units.candidates(errors)
        while True:
            candidate = None
            with self._on_first():
                if self.first:
                    candidate = next(paths, None)
            candidate, messages = broadcast_json(
                (candidate and str(candidate), [*map(str, errors)]), self.group, "cpu"
            )
            errors.clear()
            faults += messages
            if candidate is None:
                return
            yield Path(candidate)

    def find(self, requested: str | bool) -> Path:
        """Return the checkpoint to resume from, every byte of it verified.

        requested: a directory; True: the newest undamaged one. Damaged ones are reported and
                   skipped.

        Raises CheckpointError.
        """
        named: Any = requested
        if named is not True:
            verify(Path(named), self.group)
            _need_training_state(Path(named), self.group)
            return Path(named)
        faults: list[str] = []
        for path in self._candidates(faults):
            try:
                verify(path, self.group)
            except DamagedError as error:
                faults.append(str(error))
                continue
            _need_training_state(path, self.group)
            if faults and self.first:
                _log.error(
                    "Resuming from %s; damaged checkpoints are passed over:\n%s",
                    path,
                    "\n".join(faults),
                )
            return path
        reason = "; ".join(
            ["there is no complete checkpoint", *(fault.rstrip(".") for fault in faults)]
        )
        raise CheckpointError("resume_from_checkpoint", self.root, reason, _REMEDY)

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """Yield the directory in which a checkpoint is written; it is put in place if the body ends
        without an error.

        An earlier checkpoint of the same step stays until then, and an incomplete one never counts.
        All ranks run the body, which may contain collectives; an exception is raised on every rank.
        """
        self.hold()
        fresh = self.units.names(step).fresh
        try:
            with self._on_first():
                if self.first:
                    self.units.begin(step, 0)  # what is written in it looks for room itself
            with disk_errors(fresh, SAVE_REMEDY) if self.group is None else nullcontext():
                # what a script's own code raises on one of several ranks, the others do not know
                yield fresh
            with self._on_first():
                if self.first:
                    unit.complete(fresh, step, {})
                    self.units.publish(step)
        except Exception as error:
            if self.first:
                self.units.abandon(step, error)
            raise

    def rotate(self, limit: int | None, saved: int, best: str | None) -> None:
        """Remove the oldest checkpoints beyond ``limit``, except those of step ``saved`` and the
        ``best`` one.

        Only complete checkpoints count. Nothing is removed unless every byte of the newly saved one
        is verified.
        """
        if limit is None or limit <= 0:
            return
        complete = self._complete()
        protected = {saved}
        if best is not None and Path(best).resolve().parent == self.root.resolve():
            kept = step_of(Path(best))
            protected |= set() if kept is None else {kept}
        beyond = max(0, len(complete) - max(limit, len(protected & {*complete})))
        expendable = [step for step in complete[::-1] if step not in protected][:beyond]
        self._remove(expendable, self.place(saved))

    def keep_only(self, best: Path) -> None:
        """Remove all checkpoints but this one, after verifying every byte of it; nothing if it is
        not one of them.
        """
        if best.resolve().parent != self.root.resolve():
            return
        self._remove(
            [step for step in self._complete() if self.place(step).resolve() != best.resolve()],
            best,
        )

    def _remove(self, steps: list[int], successor: Path) -> None:
        if not steps:
            return
        try:
            verify(successor, self.group)
        except DamagedError as error:
            if self.first:
                _log.error("No checkpoint is removed: %s", error)
            return
        with self._on_first():
            for step in steps if self.first else ():
                self.units.remove(step)


def exists(directory: Path, group: Group) -> bool:
    """Whether the first rank sees the directory."""
    return broadcast_json(directory.is_dir(), group, "cpu")


def verify(directory: Path, group: Group) -> None:
    """Compare every byte of a checkpoint with its manifest, each file on one rank. Raises
    CheckpointError.
    """
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    with together(group, "cpu"), disk_errors(directory, "Resume from another checkpoint"):
        if not directory.is_dir():
            raise CheckpointError(
                "checkpoint", directory, "there is no complete checkpoint here", _REMEDY
            )
        unit.verify(directory, unit.read(directory, step_of(directory)), rank, world)


def _need_training_state(directory: Path, group: Group) -> None:
    with together(group, "cpu"):
        if not (directory / TRAINING_STATE).is_dir():
            reason = "it holds a model but no training state of this library"
            remedy = "Start a new run from its weights: megatron_merak.from_pretrained(directory)"
            raise CheckpointError("resume_from_checkpoint", directory, reason, remedy)


def write_text(directory: Path, name: str, text: str, group: Group) -> None:
    """Write a file on the first rank, atomically."""
    with together(group, "cpu"), disk_errors(directory, SAVE_REMEDY):
        if group is None or dist.get_rank(group) == 0:
            directory.mkdir(parents=True, exist_ok=True)
            with atomic_writer(directory / name) as file:
                file.write(text.encode())
