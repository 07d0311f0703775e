"""A training run's directory, as ``transformers.Trainer`` lays it out, with this library's training state inside.

    output_dir/checkpoint-500/    config.json, model.safetensors, tokenizer files: from_pretrained() opens it
                                  training_state/       parameters, moments, schedule; for any layout of ranks
                                  trainer_state.json    steps done, log history, callbacks
                                  manifest.json         written last: size and digest of all of these

A checkpoint is one unit (``checkpoint/unit.py``): it is there whole or not at all, whatever is killed when. Every
function is collective over ``group``; what fails on one rank raises on all.
"""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from ...checkpoint import places, unit
from ...checkpoint.files import disk_errors
from ...checkpoint.lock import DirectoryLock
from ...data.files import atomic_writer
from ...errors import CheckpointError, DamagedError
from ...parallel.agree import broadcast_json, together

TRAINING_STATE, TRAINER_STATE = "training_state", "trainer_state.json"
SAVE_REMEDY = "Check output_dir, its permissions and its free space; earlier checkpoints are untouched"
Group = dist.ProcessGroup | None
_REMEDY = "Name a complete checkpoint-N directory, or train without resuming"
_log = logging.getLogger(__name__)


class RunDirectory:
    """``output_dir`` of one run. Its lock is taken when it is first needed, and kept until `release`."""

    def __init__(self, output_dir: str, group: Group):
        self.root, self.group = Path(output_dir), group
        self.first = group is None or dist.get_rank(group) == 0
        self._lock: DirectoryLock | None = None

    def hold(self) -> None:
        """Keep other jobs out, and finish what a crash of an earlier one interrupted. Raises CheckpointError."""
        if self._lock is not None:
            self._lock.confirm()
            return
        self._lock = DirectoryLock(self.root, self.group)
        with self._on_first():
            if self.first:
                places.settle(self.root)

    def release(self) -> None:
        """Let other jobs in. Not collective."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    @contextmanager
    def _on_first(self) -> Iterator[None]:
        """What the first rank does to the disk; no rank goes on when it failed."""
        with together(self.group, "cpu"), disk_errors(self.root, SAVE_REMEDY):
            yield

    def place(self, step: int) -> Path:
        return places.plain(self.root, step)

    def _complete(self) -> list[int]:
        """The steps of the complete checkpoints that the first rank sees, newest first."""
        steps: list[int | None] = []
        with self._on_first():
            if self.first:
                steps = [places.step_of(path) for path in places.newest_first(self.root)]
        return broadcast_json(steps, self.group, "cpu")

    def _candidates(self, faults: list[str]) -> Iterator[Path]:
        """The complete checkpoints, newest first; ``faults`` receives what is wrong with others.

        Raises CheckpointError for one that cannot be read, or that another version wrote: that is no damage.
        """
        errors: list[CheckpointError] = []
        paths = places.newest_first(self.root, errors)
        while True:
            candidate = None
            with self._on_first():
                if self.first:
                    candidate = next(paths, None)
                    for error in errors:
                        if not isinstance(error, DamagedError):
                            raise error
            candidate, messages = broadcast_json((candidate and str(candidate), [*map(str, errors)]), self.group, "cpu")
            errors.clear()
            faults += messages
            if candidate is None:
                return
            yield Path(candidate)

    def find(self, requested: str | bool) -> Path:
        """The checkpoint to resume from, every byte of it verified: the one asked for, or with True the newest good
        one.

        With True, a damaged one is passed over for an older one, which is said. Raises CheckpointError.
        """
        if requested is not True:
            verify(Path(requested), self.group)
            _need_training_state(Path(requested), self.group)
            return Path(requested)
        faults: list[str] = []
        for path in self._candidates(faults):
            try:
                verify(path, self.group)
            except DamagedError as error:
                faults.append(str(error))
                continue
            _need_training_state(path, self.group)
            if faults and self.first:
                _log.error("Resuming from %s; damaged checkpoints are passed over:\n%s", path, "\n".join(faults))
            return path
        reason = "; ".join(["there is no complete checkpoint", *(fault.rstrip(".") for fault in faults)])
        raise CheckpointError("resume_from_checkpoint", self.root, reason, _REMEDY)

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """The directory in which a checkpoint is written; it takes its place when the body has ended without an error.

        An earlier checkpoint of the same step stays until then, and what is incomplete never counts. The body is run
        by all ranks and may hold collectives; what it raises, it raises on every rank.
        """
        self.hold()
        fresh = places.fresh(self.root, step)
        try:
            with self._on_first():
                if self.first:
                    places.settle(self.root)
                    fresh.mkdir()
            yield fresh
            with self._on_first():
                if self.first:
                    unit.complete(fresh, step, {})
                    places.publish(self.root, step)
        except Exception:
            if self.first:
                shutil.rmtree(fresh, ignore_errors=True)  # the next save would remove what is left
            raise

    def rotate(self, limit: int | None, saved: int, best: str | None) -> None:
        """Remove the oldest checkpoints beyond ``limit``, by step; never that of step ``saved``, nor the ``best`` one.

        Only complete checkpoints count, and nothing is removed unless every byte of the one just saved is as it was
        written.
        """
        if limit is None or limit <= 0:
            return
        complete = self._complete()
        protected = {saved}
        if best is not None and Path(best).resolve().parent == self.root.resolve():
            protected.add(places.step_of(Path(best)))
        beyond = max(0, len(complete) - max(limit, len(protected & {*complete})))
        expendable = [step for step in complete[::-1] if step not in protected][:beyond]
        self._remove(expendable, self.place(saved))

    def keep_only(self, best: Path) -> None:
        """Remove all checkpoints but this one, if it is one of these, once every byte of it is verified."""
        if best.resolve().parent != self.root.resolve():
            return
        self._remove([step for step in self._complete() if self.place(step).resolve() != best.resolve()], best)

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
                places.remove(self.root, step)


def exists(directory: Path, group: Group) -> bool:
    """Whether the first rank sees a directory."""
    return broadcast_json(directory.is_dir(), group, "cpu")


def verify(directory: Path, group: Group) -> None:
    """Compare every byte of a checkpoint with its manifest, each file on one rank. Raises CheckpointError."""
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    with together(group, "cpu"), disk_errors(directory, "Resume from another checkpoint"):
        if not directory.is_dir():
            raise CheckpointError("checkpoint", directory, "there is no complete checkpoint here", _REMEDY)
        unit.verify(directory, unit.read(directory, places.step_of(directory)), rank, world)


def _need_training_state(directory: Path, group: Group) -> None:
    with together(group, "cpu"):
        if not (directory / TRAINING_STATE).is_dir():
            reason = "it holds a model but no training state of this library"
            remedy = "Start a new run from its weights: megatron_merak.from_pretrained(directory)"
            raise CheckpointError("resume_from_checkpoint", directory, reason, remedy)


def write_text(directory: Path, name: str, text: str, group: Group) -> None:
    """The first rank writes a file that is whole or absent."""
    with together(group, "cpu"), disk_errors(directory, SAVE_REMEDY):
        if group is None or dist.get_rank(group) == 0:
            directory.mkdir(parents=True, exist_ok=True)
            with atomic_writer(directory / name) as file:
                file.write(text.encode())
