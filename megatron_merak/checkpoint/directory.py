"""Iteration directories: which are complete, what is in one, and which are removed.

    ROOT/iter_0000010/                        complete: its manifest is valid
    ROOT/iter_0000020.new/                    being written; complete once it has its manifest, then renamed
    ROOT/iter_0000010.old/                    being replaced or removed
    ROOT/latest_checkpointed_iteration.txt    Megatron's tracker: written for other programs, never read

They are written, replaced and removed by ``directories``. All functions here are local to one rank.
"""

import errno
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

from megatron_merak.checkpoint.directories import Directories, DirectoryNames, break_seal
from megatron_merak.checkpoint.files import verify_tensors
from megatron_merak.checkpoint.manifest import (
    BUFFER,
    FILE_NAME,
    MODEL,
    NAME,
    Manifest,
    parse_manifest,
)
from megatron_merak.durable import TEMPORARY, free_name, move, replaced
from megatron_merak.errors import CheckpointError, DamagedError

TRACKER = "latest_checkpointed_iteration.txt"

_DIRECTORY = re.compile(r"(iter_(\d{7,}))(\.new|\.old)?")
_LARGEST_MANIFEST = 1 << 30  # bytes


def directory_of(root: Path, iteration: int) -> Path:
    return root / f"iter_{iteration:07d}"


def read_manifest(directory: Path, number: int | None = None) -> tuple[bytes, Manifest]:
    """Return the bytes and the content of a directory's manifest.

    number: the iteration that it must be of; None: that of the directory's name.

    Raises `DamagedError` if it is absent or invalid, and `CheckpointError` if it cannot be read.
    """
    path = directory / NAME
    remedy = "Load another iteration with --ckpt-step"
    try:
        if path.is_symlink() or not path.is_file():
            raise DamagedError(
                "checkpoint", directory, f"it has no {NAME}, so it is not complete", remedy
            )
        if path.stat().st_size > _LARGEST_MANIFEST:
            raise DamagedError(
                "manifest", path, f"it is larger than {_LARGEST_MANIFEST} bytes", remedy
            )
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError("manifest", path, error.strerror or str(error), remedy) from error
    manifest = parse_manifest(text, path)
    if (iteration_of(directory) if number is None else number) != manifest.iteration:
        raise DamagedError(
            "manifest", path, f"it belongs to iteration {manifest.iteration}", remedy
        )
    return text, manifest


class TensorDirectories(Directories):
    """Directories of tensor files. What this program did not write is kept when one goes."""

    remedy = "Check --load and --save"
    room = "Free some space, or save elsewhere with --save"

    def make_way(self, plain: Path) -> None:
        """Remove one that this program wrote; refuse one with other files only."""
        names = [plain.name]
        if plain.is_dir() and not plain.is_symlink():
            names = [entry.name for entry in os.scandir(plain)]
            if not names or any(map(_is_ours, names)):
                self.drop(plain)
                return
        reason = f"it contains {', '.join(sorted(names)[:3])}, which megatron_merak did not write"
        raise CheckpointError(
            "checkpoint", plain, reason, "Save to another directory with --save, or move it away"
        )

    def drop(self, fresh: Path) -> None:
        """Remove what this program wrote to a directory.

        A directory with other files keeps these, under a name that no checkpoint has.
        """
        if not fresh.is_dir() or fresh.is_symlink():
            return
        break_seal(fresh)
        for entry in sorted(os.scandir(fresh), key=lambda entry: entry.name):
            if _is_ours(entry.name) and not entry.is_dir(follow_symlinks=False):
                os.unlink(entry)
        try:
            os.rmdir(fresh)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            _keep(fresh)

    def discard(self, names: DirectoryNames) -> None:
        self.drop(names.old)


class Iterations(TensorDirectories):
    """The iterations in a ROOT."""

    def names(self, number: int) -> DirectoryNames:
        plain = directory_of(self.root, number)
        return DirectoryNames(plain, fresh=Path(f"{plain}.new"), old=Path(f"{plain}.old"))

    def number_of(self, directory: Path) -> int | None:
        iteration = iteration_of(directory)
        return None if iteration < 0 else iteration

    def check(self, directory: Path, number: int) -> None:
        read_manifest(directory)

    def publish(self, number: int) -> Path:
        plain = super().publish(number)
        with replaced(self.root / TRACKER) as file:
            file.write(str(number).encode())
        return plain

    def remove_older(
        self,
        keep_every: int,
        saved: int | None = None,
        remove_passed: Callable[[int], object] | None = None,
    ) -> list[int]:
        """Remove complete iterations that are older than the newest undamaged one.

        Multiples of ``keep_every`` stay. Damage that `verify` finds is logged; damaged iterations
        are not removed.

        saved: the run's newest. Later ones are of an earlier run, in whose directory this one began
               with --finetune, --ckpt-step or from the start: if they counted, what was just saved
               would be removed as older.
        remove_passed: removes what else that one makes superfluous; None: there is nothing.
        """
        self.settle()
        complete = map(iteration_of, self.newest_first())
        iterations = [iteration for iteration in complete if saved is None or iteration <= saved]
        is_older = any(iteration % keep_every for iteration in iterations[1:])
        if not is_older and remove_passed is None:
            return []
        good = next((n for n in iterations if _is_good(directory_of(self.root, n))), None)
        expendable = [n for n in iterations if good is not None and n < good and n % keep_every]
        if good is not None and remove_passed is not None:
            remove_passed(good)
        for iteration in expendable:
            self.remove(iteration)
        return expendable


def _keep(directory: Path) -> None:
    """Rename a directory with somebody else's files to a name that no checkpoint has."""
    backup = free_name(directory.with_name(directory.name.partition(".")[0] + ".kept"), "")
    move(directory, backup)
    names = ", ".join(sorted(os.listdir(backup))[:3])
    logging.getLogger(__name__).warning(
        "%s was removed, but for %s: now in %s", directory, names, backup
    )


def _is_good(directory: Path) -> bool:
    try:
        verify(directory)
    except DamagedError as error:
        logging.getLogger(__name__).warning("Older checkpoints are kept in its stead: %s", error)
        return False
    return True


def verify(directory: Path, number: int | None = None) -> Manifest:
    """Read every byte of a checkpoint and compare it with the manifest; trained tensors must be
    finite. Raises `DamagedError`.

    number: as for `read_manifest`.
    """
    _, manifest = read_manifest(directory, number)
    kinds = sorted(manifest.tensors)
    states = [kind for kind in kinds if kind not in (MODEL, BUFFER)]
    # others are frozen
    trained = {name for kind in states for name in manifest.tensors[kind]}
    trained = trained or {*manifest.tensors.get(MODEL, ())}
    for name, digests in manifest.files_of(kinds).items():
        verify_tensors(
            directory / name, manifest.files[name], digests, manifest.save_id, finite=trained
        )
    return manifest


def check_files(directory: Path, manifest: Manifest) -> None:
    """Raise `CheckpointError` unless every file of the manifest is visible here with its
    full size.
    """
    for name, written in manifest.files.items():
        path = directory / name
        size = path.stat().st_size if path.is_file() else None
        if size != written["bytes"]:
            reason = (
                f"another rank wrote {written['bytes']} bytes, but {size or 0} are visible here"
            )
            raise CheckpointError(
                "checkpoint file", path, reason, "Give --save a directory that all hosts share"
            )


def iteration_of(directory: Path) -> int:
    """Return the iteration in a directory's name; -1 for a name that no checkpoint has."""
    match = _DIRECTORY.fullmatch(directory.name)
    return int(match[2]) if match else -1


def _is_ours(name: str) -> bool:
    name = name.removesuffix(TEMPORARY)
    return name == NAME or FILE_NAME.fullmatch(name) is not None
