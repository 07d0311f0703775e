"""Directories ROOT/checkpoint-N of units, and how one is replaced so that at every moment one is complete.

    ROOT/checkpoint-500/         complete: its manifest is valid and its files are there
    ROOT/.checkpoint-500.new/    being written; complete once it has its manifest, then renamed
    ROOT/.checkpoint-500.old/    being replaced or removed
    ROOT/kept-checkpoint-500/    files that no save wrote, from a directory that was removed

Programs that look for "checkpoint-*" see only the first. All functions are local to one rank; one process at a time
writes to a ROOT, see ``lock``.
"""

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from megatron_merak.checkpoint import unit as units
from megatron_merak.checkpoint.files import sync_directory
from megatron_merak.checkpoint.manifest import NAME
from megatron_merak.errors import CheckpointError, DamagedError

REMOVED = NAME + ".removed"  # what the manifest is called once its files are being removed

_NAME = re.compile(r"(\.?)checkpoint-(0|[1-9]\d{0,17})(\.new|\.old)?")
_say = logging.getLogger(__name__).warning


def plain(root: Path, step: int) -> Path:
    return root / f"checkpoint-{step}"


def fresh(root: Path, step: int) -> Path:
    """Return the directory in which a unit is written."""
    return root / f".checkpoint-{step}.new"


def old(root: Path, step: int) -> Path:
    return root / f".checkpoint-{step}.old"


def step_of(directory: Path) -> int | None:
    """Return the step in a directory's name; None for a name that no unit has."""
    match = _NAME.fullmatch(directory.name)
    return int(match[2]) if match and bool(match[1]) == bool(match[3]) else None


def locate(root: Path, step: int, faults: list[CheckpointError] | None = None) -> Path | None:
    """Return the complete directory of a step, under whatever name a crash left it.

    faults: collects what is wrong with others; None: it is logged, unless they have no manifest.
    """
    paths = (place(root, step) for place in (plain, fresh, old))
    return next((path for path in paths if _is_complete(path, step, faults)), None)


def newest_first(root: Path, faults: list[CheckpointError] | None = None) -> Iterator[Path]:
    """Yield the complete units, by step; none if ROOT is absent. ``faults``: see `locate`."""
    located = (locate(root, step, faults) for step in sorted(_steps(root, plain, fresh, old), reverse=True))
    return (path for path in located if path is not None)


def settle(root: Path) -> None:
    """Complete what a crash interrupted: rename complete directories, remove the rest of others.

    Raises `CheckpointError`, and changes nothing of that step, if one cannot be read or is another version's.
    """
    for step in sorted(_steps(root, fresh, old)):
        faults: list[CheckpointError] = []
        place = plain(root, step)
        located = locate(root, step, faults)
        for fault in faults:
            if located is None and not isinstance(fault, DamagedError):
                raise fault
        if located is not None and located != place:
            if os.path.lexists(place):
                _set_aside(place)
            os.rename(located, place)
            sync_directory(root)
        if fresh(root, step).is_dir():
            shutil.rmtree(fresh(root, step))
        discard(root, step)


def publish(root: Path, step: int) -> Path:
    """Rename the complete fresh directory of a step; an earlier complete one is removed last.

    Files that somebody put into the earlier one move to the new one.
    """
    place = plain(root, step)
    discard(root, step)
    if _is_complete(place, step):
        os.rename(place, old(root, step))
    elif os.path.lexists(place):
        _set_aside(place)
    os.rename(fresh(root, step), place)
    sync_directory(root)
    discard(root, step)
    return place


def remove(root: Path, step: int) -> None:
    """Remove a complete unit; files in it that no save wrote are kept."""
    os.rename(plain(root, step), old(root, step))
    sync_directory(root)
    discard(root, step)


def discard(root: Path, step: int) -> None:
    """Remove what a save wrote to the old directory of a step; it stops being complete before the first file is
    removed.

    May be repeated after a crash at any point.
    """
    directory = old(root, step)
    place = plain(root, step)
    if not directory.is_dir() or directory.is_symlink():
        return
    try:
        unit = _begin_removal(directory, step)
    except CheckpointError as error:
        _say("%s", error)
        _set_aside(directory, place.name)
        return
    if unit is not None:
        _keep_foreign(directory, unit, place if _is_complete(place, step) else root / f"kept-{place.name}")
        for name in unit.files:
            (directory / name).unlink(missing_ok=True)
        for folder, _, _ in os.walk(directory, topdown=False):
            if folder != str(directory) and not os.listdir(folder):
                os.rmdir(folder)
        if os.listdir(directory) != [REMOVED]:
            _say("%s is not empty yet: some program has its files open; a later save removes it", directory)
            return
        (directory / REMOVED).unlink()
    if os.listdir(directory):
        _set_aside(directory, place.name)
    else:
        os.rmdir(directory)


def _begin_removal(directory: Path, step: int) -> units.Unit | None:
    """Rename the directory's manifest and return it; None if it is already removed."""
    if (directory / NAME).exists():
        units.read(directory, step)
        os.rename(directory / NAME, directory / REMOVED)
        sync_directory(directory)
    return units.parse(directory / REMOVED) if (directory / REMOVED).exists() else None


def _keep_foreign(directory: Path, unit: units.Unit, home: Path) -> None:
    names = units.foreign(directory, unit, REMOVED)
    for name in names:
        target = _free(home / name)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(directory / name, target)
        sync_directory(target.parent)
    if names:
        _say("%s is replaced or removed, but for %s: now in %s", plain(home.parent, unit.step), ", ".join(names), home)


def _set_aside(directory: Path, name: str | None = None) -> None:
    """Rename a directory that is no complete unit; nobody knows whose it is."""
    target = _free(directory.with_name(f"kept-{name or directory.name}"))
    os.rename(directory, target)
    _say("%s is no complete checkpoint, and a new one takes its place: it is %s now", directory, target)


def _free(path: Path) -> Path:
    """Return ``path``, or the first numbered name after it that is free."""
    names = (path.with_name(f"{path.name}.{n}") if n else path for n in count())
    return next(name for name in names if not os.path.lexists(name))


def _steps(root: Path, *directories: Callable[[Path, int], Path]) -> set[int]:
    try:
        with os.scandir(root) as entries:
            paths = [root / entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return set()
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError("checkpoint directory", root, reason, "Check output_dir and its permissions") from error
    steps = ((path, step_of(path)) for path in paths)
    return {step for path, step in steps if step is not None and path in [place(root, step) for place in directories]}


def _is_complete(directory: Path, step: int, faults: list[CheckpointError] | None = None) -> bool:
    if directory.is_symlink() or not directory.is_dir():
        return False
    if not os.path.lexists(directory / NAME) and (faults is None or directory.name.startswith(".")):
        return False
    try:
        units.read(directory, step)
    except CheckpointError as error:
        if faults is None:
            _say("Passed over as not complete: %s", error)
        else:
            faults.append(error)
        return False
    return True
