"""Directories ROOT/checkpoint-N of units.

    ROOT/checkpoint-500/         complete: its manifest is valid and its files are there
    ROOT/.checkpoint-500.new/    being written; complete once it has its manifest, then renamed
    ROOT/.checkpoint-500.old/    being replaced or removed
    ROOT/kept-checkpoint-500/    files that no save wrote, from a directory that was removed

Programs that look for "checkpoint-*" see only the first. They are written, replaced and removed by
``directories``. All functions are local to one rank.
"""

import logging
import os
import re
import shutil
from pathlib import Path

from megatron_merak.checkpoint import unit as units
from megatron_merak.checkpoint.directories import Directories, DirectoryNames, break_seal
from megatron_merak.checkpoint.manifest import NAME
from megatron_merak.durable import free_name, make_directory, move, rename
from megatron_merak.errors import CheckpointError

REMOVED = NAME + ".removed"  # what the manifest is called once its files are being removed

_NAME = re.compile(r"(\.?)checkpoint-(0|[1-9]\d{0,17})(\.new|\.old)?")
_say = logging.getLogger(__name__).warning


def step_of(directory: Path) -> int | None:
    """Return the step in a directory's name; None for a name that no unit has."""
    match = _NAME.fullmatch(directory.name)
    return int(match[2]) if match and bool(match[1]) == bool(match[3]) else None


class Units(Directories):
    """The units in a ROOT. Files that no save wrote move to what replaces a unit, or are kept."""

    remedy = "Check output_dir and its permissions"
    room = "Free some space, or save elsewhere with output_dir"

    def names(self, number: int) -> DirectoryNames:
        name = f"checkpoint-{number}"
        fresh = self.root / f".{name}.new"
        old = self.root / f".{name}.old"
        return DirectoryNames(self.root / name, fresh, old)

    def number_of(self, directory: Path) -> int | None:
        return step_of(directory)

    def check(self, directory: Path, number: int) -> None:
        units.read(directory, number)

    def make_way(self, plain: Path) -> None:
        """Rename a directory that is no complete unit; nobody knows whose it is."""
        _set_aside(plain, plain.name)

    def drop(self, fresh: Path) -> None:
        if fresh.is_dir() and not fresh.is_symlink():
            break_seal(fresh)
            shutil.rmtree(fresh)

    def discard(self, names: DirectoryNames) -> None:
        """Remove what a save wrote to the old directory; it stops being complete first.

        Its manifest has another name from then on, and is the last file that is removed.
        """
        if not names.old.is_dir() or names.old.is_symlink():
            return
        try:
            unit = _begin_removal(names.old, step_of(names.old))
        except CheckpointError as error:
            _say("%s", error)
            _set_aside(names.old, names.plain.name)
            return
        if unit is not None:
            is_replaced = self._is_complete(names.plain, unit.step)
            home = names.plain if is_replaced else self.root / f"kept-{names.plain.name}"
            _keep_foreign(names.old, unit, home)
            for name in unit.files:
                (names.old / name).unlink(missing_ok=True)
            for folder, _, _ in os.walk(names.old, topdown=False):
                if folder != str(names.old) and not os.listdir(folder):
                    os.rmdir(folder)
            if os.listdir(names.old) != [REMOVED]:
                reason = "some program has its files open; a later save removes it"
                _say("%s is not empty yet: %s", names.old, reason)
                return
            (names.old / REMOVED).unlink()
        if os.listdir(names.old):
            _set_aside(names.old, names.plain.name)
        else:
            os.rmdir(names.old)


def _begin_removal(directory: Path, step: int | None) -> units.UnitManifest | None:
    """Rename the directory's manifest and return it; None if it is already removed."""
    if (directory / NAME).exists():
        units.read(directory, step)
        rename(directory / NAME, directory / REMOVED)
    return units.parse(directory / REMOVED) if (directory / REMOVED).exists() else None


def _keep_foreign(directory: Path, unit: units.UnitManifest, home: Path) -> None:
    names = units.foreign(directory, unit, REMOVED)
    for name in names:
        target = free_name(home / name, ".")
        make_directory(target.parent)
        rename(directory / name, target)
    if names:
        place = home.with_name(f"checkpoint-{unit.step}")
        _say("%s is replaced or removed, but for %s: now in %s", place, ", ".join(names), home)


def _set_aside(directory: Path, name: str) -> None:
    """Rename a directory that is no complete unit; ``name`` is that of its place."""
    target = free_name(directory.with_name(f"kept-{name}"), ".")
    move(directory, target)
    _say(
        "%s is no complete checkpoint, and a new one takes its place: it is %s now",
        directory,
        target,
    )
