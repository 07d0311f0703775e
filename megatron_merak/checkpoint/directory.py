"""Iteration directories: which are complete, and how one is replaced so that at every moment one can be loaded.

    ROOT/iter_0000010/                        complete: its manifest is valid
    ROOT/iter_0000020.new/                    being written; complete once it has its manifest, then renamed
    ROOT/iter_0000010.old/                    being replaced or removed
    ROOT/latest_checkpointed_iteration.txt    Megatron's tracker: written for other programs, never read

All functions here are local to one rank; one process at a time writes to a ROOT, see ``lock``.
"""

import errno
import logging
import os
import re
from collections.abc import Iterator
from itertools import count, groupby
from pathlib import Path

from megatron_merak.checkpoint.files import TEMPORARY, complete_or_absent, sync_directory, verify_tensors
from megatron_merak.checkpoint.manifest import FILE_NAME, NAME, Manifest, parse_manifest
from megatron_merak.errors import CheckpointError, DamagedError

TRACKER = "latest_checkpointed_iteration.txt"

_DIRECTORY = re.compile(r"(iter_(\d{7,}))(\.new|\.old)?")
_SUFFIXES = ("", ".new", ".old")  # which one is the checkpoint when a crash left several complete ones
_LARGEST_MANIFEST = 1 << 30  # bytes


def directory_of(root: Path, iteration: int) -> Path:
    return root / f"iter_{iteration:07d}"


def read_manifest(directory: Path) -> tuple[bytes, Manifest]:
    """Return the bytes and the content of a directory's manifest.

    Raises `DamagedError` if it is absent or invalid, and `CheckpointError` if it cannot be read.
    """
    path = directory / NAME
    remedy = "Load another iteration with --ckpt-step"
    try:
        if path.is_symlink() or not path.is_file():
            raise DamagedError("checkpoint", directory, f"it has no {NAME}, so it is not complete", remedy)
        if path.stat().st_size > _LARGEST_MANIFEST:
            raise DamagedError("manifest", path, f"it is larger than {_LARGEST_MANIFEST} bytes", remedy)
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError("manifest", path, error.strerror or str(error), remedy) from error
    manifest = parse_manifest(text, path)
    if iteration_of(directory) != manifest.iteration:
        raise DamagedError("manifest", path, f"it belongs to iteration {manifest.iteration}", remedy)
    return text, manifest


def locate(root: Path, iteration: int) -> Path | None:
    """Return the complete directory of an iteration, under whatever name a crash left it.

    Raises `CheckpointError` for a manifest that cannot be read.
    """
    return next(_complete_ones(root, iteration, []), None)


def complete_ones(root: Path, faults: list[CheckpointError] | None = None) -> Iterator[Path]:
    """Return the complete directories, newest first; none if ROOT is absent. A crash may leave two of one iteration.

    faults: collects what is wrong with skipped directories, and what cannot be read raises `CheckpointError`; None:
            invalid manifests are logged.
    """
    for iteration in sorted({iteration_of(path) for path in _directories(root)}, reverse=True):
        yield from _complete_ones(root, iteration, faults)


def newest_first(root: Path) -> Iterator[int]:
    """Return the iterations that have a complete directory, newest first."""
    return (iteration for iteration, _ in groupby(map(iteration_of, complete_ones(root))))


def settle(root: Path) -> None:
    """Complete what a crash interrupted: rename complete directories, remove the rest of what this program wrote."""
    leftovers = [path for path in _directories(root) if path.suffix]
    for plain in sorted({path.with_suffix("") for path in leftovers}):
        complete = locate(root, iteration_of(plain))
        if complete is not None and complete != plain:
            clear(plain)
            os.rename(complete, plain)
            sync_directory(root)
        for suffix in (".new", ".old"):
            discard(_suffixed(plain, suffix))


def publish(root: Path, iteration: int) -> Path:
    """Rename the complete ``.new`` directory of an iteration; an earlier complete one is removed last."""
    plain = directory_of(root, iteration)
    new = _suffixed(plain, ".new")
    old = _suffixed(plain, ".old")
    if plain.exists():
        os.rename(plain, old)
    os.rename(new, plain)
    sync_directory(root)
    discard(old)
    with complete_or_absent(root / TRACKER) as file:
        file.write(str(iteration).encode())
    sync_directory(root)
    return plain


def clear(plain: Path) -> None:
    """Remove an incomplete directory that this program wrote; refuse one with other files only."""
    if not os.path.lexists(plain):
        return
    names = [plain.name]
    if plain.is_dir() and not plain.is_symlink():
        names = [entry.name for entry in os.scandir(plain)]
        if not names or any(map(_is_ours, names)):
            discard(plain)
            return
    reason = f"it contains {', '.join(sorted(names)[:3])}, which megatron_merak did not write"
    raise CheckpointError("checkpoint", plain, reason, "Save to another directory with --save, or move it away")


def discard(directory: Path) -> None:
    """Remove what this program wrote to a directory; it stops being complete before the first tensor is removed.

    A directory with other files keeps these, under a name that no checkpoint has.
    """
    if not directory.is_dir() or directory.is_symlink():
        return
    (directory / NAME).unlink(missing_ok=True)
    sync_directory(directory)
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        if _is_ours(entry.name) and not entry.is_dir(follow_symlinks=False):
            os.unlink(entry)
    try:
        os.rmdir(directory)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _keep(directory)


def _keep(directory: Path) -> None:
    """Rename a directory with somebody else's files to a name that no checkpoint has."""
    base = directory.with_name(directory.name.partition(".")[0] + ".kept")
    backup = next(path for n in count() if not os.path.lexists(path := base.with_name(f"{base.name}{n or ''}")))
    os.rename(directory, backup)
    names = ", ".join(sorted(os.listdir(backup))[:3])
    logging.getLogger(__name__).warning("%s was removed, but for %s: now in %s", directory, names, backup)


def remove_older(root: Path, keep_every: int, saved: int | None = None) -> list[int]:
    """Remove complete iterations that ``keep_every`` does not divide and that are older than the newest undamaged
    one.

    Damage that `verify` finds is logged; damaged iterations are not removed.

    saved: the run's newest. Later ones are of an earlier run, in whose directory this one began with --finetune,
           --ckpt-step or from the start: if they counted, what was just saved would be removed as older.
    """
    settle(root)
    iterations = [iteration for iteration in newest_first(root) if saved is None or iteration <= saved]
    if not any(iteration % keep_every for iteration in iterations[1:]):
        return []
    good = next((n for n in iterations if _is_good(directory_of(root, n))), None)
    expendable = [n for n in iterations if good is not None and n < good and n % keep_every]
    for iteration in expendable:
        plain = directory_of(root, iteration)
        old = _suffixed(plain, ".old")
        os.rename(plain, old)
        discard(old)
    return expendable


def _is_good(directory: Path) -> bool:
    try:
        verify(directory)
    except DamagedError as error:
        logging.getLogger(__name__).warning("Older checkpoints are kept in its stead: %s", error)
        return False
    return True


def verify(directory: Path) -> Manifest:
    """Read every byte of a checkpoint and compare it with the manifest; trained tensors must be finite. Raises
    `DamagedError`.
    """
    _, manifest = read_manifest(directory)
    kinds = sorted(manifest.tensors)
    states = [tensors for kind, tensors in manifest.tensors.items() if kind != "model"]
    trained = {name for tensors in states for name in tensors} or manifest.tensors.get("model", {})  # others are frozen
    for name, digests in manifest.files_of(kinds).items():
        verify_tensors(directory / name, manifest.files[name], digests, manifest.save_id, finite=trained)
    return manifest


def check_files(directory: Path, manifest: Manifest) -> None:
    """Raise `CheckpointError` unless every file of the manifest is visible here with its full size."""
    for name, written in manifest.files.items():
        path = directory / name
        size = path.stat().st_size if path.is_file() else None
        if size != written["bytes"]:
            reason = f"another rank wrote {written['bytes']} bytes, but {size or 0} are visible here"
            raise CheckpointError("checkpoint file", path, reason, "Give --save a directory that all hosts share")


def iteration_of(directory: Path) -> int:
    """Return the iteration in a directory's name; -1 for a name that no checkpoint has."""
    match = _DIRECTORY.fullmatch(directory.name)
    return int(match[2]) if match else -1


def _directories(root: Path) -> list[Path]:
    try:
        with os.scandir(root) as entries:
            directories = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError("checkpoint directory", root, reason, "Check --load and --save") from error
    return [root / entry.name for entry in directories if _DIRECTORY.fullmatch(entry.name)]


def _suffixed(plain: Path, suffix: str) -> Path:
    return plain.with_name(plain.name + suffix)


def _complete_ones(root: Path, iteration: int, faults: list[CheckpointError] | None) -> Iterator[Path]:
    """Return the complete directories of an iteration, the valid one first. ``faults``: see `complete_ones`."""
    plain = directory_of(root, iteration)
    for path in (_suffixed(plain, suffix) for suffix in _SUFFIXES):
        begun = (path != plain or faults is None) and not (path / NAME).exists()
        if begun or not path.is_dir() or path.is_symlink():
            continue
        try:
            read_manifest(path)
        except CheckpointError as error:
            if faults is None:
                logging.getLogger(__name__).warning("Passed over as not complete: %s", error)
            elif isinstance(error, DamagedError):
                faults.append(error)
            else:
                raise
        else:
            yield path


def _is_ours(name: str) -> bool:
    name = name.removesuffix(TEMPORARY)
    return name == NAME or FILE_NAME.fullmatch(name) is not None
