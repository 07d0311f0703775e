"""Iteration directories: which are complete, and how one takes its place without a moment at which none is loadable.

    ROOT/iter_0000010/                        complete: its manifest is valid
    ROOT/iter_0000020.new/                    being written; complete once its manifest is in, then renamed
    ROOT/iter_0000010.old/                    being replaced or removed
    ROOT/latest_checkpointed_iteration.txt    Megatron's tracker: written for other programs, never believed

All functions here are local to one rank; one process at a time writes to a ROOT.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_merak.checkpoint.files import TEMPORARY, complete_or_absent, sync_directory, verify_tensors
from megatron_merak.checkpoint.manifest import FILE_NAME, NAME, Manifest, parse_manifest
from megatron_merak.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"

_DIRECTORY = re.compile(r"(iter_(\d{7,}))(\.new|\.old)?")
_SUFFIXES = ("", ".new", ".old")  # which one is the checkpoint when a crash left several complete ones
_LARGEST_MANIFEST = 1 << 30  # bytes


def directory_of(root: Path, iteration: int) -> Path:
    return root / f"iter_{iteration:07d}"


def read_manifest(directory: Path) -> tuple[bytes, Manifest]:
    """The bytes and the content of a directory's manifest. Raises `CheckpointError` when it is absent or not valid."""
    path = directory / NAME
    remedy = "Load another iteration with --ckpt-step"
    try:
        if path.is_symlink() or not path.is_file():
            raise CheckpointError("checkpoint", directory, f"it has no {NAME}, so it is not complete", remedy)
        if path.stat().st_size > _LARGEST_MANIFEST:
            raise CheckpointError("manifest", path, f"it is larger than {_LARGEST_MANIFEST} bytes", remedy)
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError("manifest", path, error.strerror or str(error), remedy) from error
    manifest = parse_manifest(text, path)
    if _iteration(directory) != manifest.iteration:
        raise CheckpointError("manifest", path, f"it belongs to iteration {manifest.iteration}", remedy)
    return text, manifest


def locate(root: Path, iteration: int) -> Path | None:
    """The complete directory of an iteration, whatever a crash left it called."""
    plain = directory_of(root, iteration)
    return next((path for suffix in _SUFFIXES if _is_complete(path := _suffixed(plain, suffix))), None)


def newest_first(root: Path) -> Iterator[int]:
    """The iterations that have a complete directory, newest first; an absent ROOT has none."""
    for iteration in sorted({_iteration(path) for path in _directories(root)}, reverse=True):
        if locate(root, iteration) is not None:
            yield iteration


def settle(root: Path) -> None:
    """Finish what a crash interrupted: put complete directories in their places, remove the rest of ours."""
    leftovers = [path for path in _directories(root) if path.suffix]
    for plain in sorted({path.with_suffix("") for path in leftovers}):
        complete = locate(root, _iteration(plain))
        if complete is not None and complete != plain:
            clear(plain)
            os.rename(complete, plain)
            sync_directory(root)
        for suffix in (".new", ".old"):
            discard(_suffixed(plain, suffix))


def publish(root: Path, iteration: int) -> Path:
    """Let the complete ``.new`` directory of an iteration take its place; an earlier complete one goes last."""
    plain = directory_of(root, iteration)
    new, old = _suffixed(plain, ".new"), _suffixed(plain, ".old")
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
    """Remove an incomplete directory of ours; refuse one with a file in it that no save of ours could have left."""
    if not os.path.lexists(plain):
        return
    foreign = [] if plain.is_dir() and not plain.is_symlink() else [plain.name]
    foreign = foreign or [entry.name for entry in os.scandir(plain) if not _is_ours(entry.name)]
    if foreign:
        reason = f"it holds {', '.join(sorted(foreign)[:3])}, which megatron_merak did not write"
        raise CheckpointError("checkpoint", plain, reason, "Save to another directory with --save, or move it away")
    discard(plain)


def discard(directory: Path) -> None:
    """Remove a directory; it stops being complete before the first tensor is lost."""
    if directory.is_dir() and not directory.is_symlink():
        (directory / NAME).unlink(missing_ok=True)
        sync_directory(directory)
        shutil.rmtree(directory)


def remove_older(root: Path, keep_every: int) -> list[int]:
    """Remove complete iterations that ``keep_every`` does not divide, but for the newest one, once that is verified."""
    settle(root)
    newest, *older = list(newest_first(root)) or [None]
    expendable = [iteration for iteration in older if iteration % keep_every]
    if expendable:
        verify(directory_of(root, newest))
    for iteration in expendable:
        plain = directory_of(root, iteration)
        old = _suffixed(plain, ".old")
        os.rename(plain, old)
        discard(old)
    return expendable


def verify(directory: Path) -> Manifest:
    """Read every byte of a checkpoint and compare it with the manifest."""
    _, manifest = read_manifest(directory)
    for name, digests in manifest.files_of(sorted(manifest.tensors)).items():
        verify_tensors(directory / name, manifest.files[name], digests, manifest.save_id)
    return manifest


def check_files(directory: Path, manifest: Manifest) -> None:
    """Raise `CheckpointError` unless every file of the manifest is visible from here at its full size."""
    for name, written in manifest.files.items():
        path = directory / name
        size = path.stat().st_size if path.is_file() else None
        if size != written["bytes"]:
            reason = f"another rank wrote {written['bytes']} bytes, and {size or 0} are seen here"
            raise CheckpointError("checkpoint file", path, reason, "Give --save a directory that all hosts share")


def _directories(root: Path) -> list[Path]:
    try:
        with os.scandir(root) as entries:
            found = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError("checkpoint directory", root, reason, "Check --load and --save") from error
    return [root / entry.name for entry in found if _DIRECTORY.fullmatch(entry.name)]


def _iteration(directory: Path) -> int:
    match = _DIRECTORY.fullmatch(directory.name)
    return int(match[2]) if match else -1


def _suffixed(plain: Path, suffix: str) -> Path:
    return plain.with_name(plain.name + suffix)


def _is_complete(directory: Path) -> bool:
    if directory.is_symlink() or not (directory / NAME).exists():
        return False
    try:
        read_manifest(directory)
    except CheckpointError as error:
        logging.getLogger(__name__).warning("Passed over as not complete: %s", error)
        return False
    return True


def _is_ours(name: str) -> bool:
    name = name.removesuffix(TEMPORARY)
    return name == NAME or FILE_NAME.fullmatch(name) is not None
