"""Directories that are complete or absent, whatever is killed when; one implementation of all kinds.

    begin      settles what a kill left, looks for room, and makes NAME.new, empty
    seal       once all of it is on the disk: the manifest, last, which makes it complete
    publish    gives it its name, and removes the one before
    abandon    after an error: removes it

in the order of ``durable``. Of a directory that is read: NAME, or if that is not complete, NAME.new
or NAME.old. Names aside are each kind's own.

All functions are local to one rank; one process at a time writes to a ROOT, see ``lock``.
"""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import ClassVar

from megatron_merak.durable import (
    check_free,
    make_directory,
    move,
    rename,
    replaced,
    sync_directory,
)
from megatron_merak.errors import CheckpointError, DamagedError

MANIFEST = "manifest.json"

_WHAT = "checkpoint directory"  # what a root is called in messages


def seal(directory: Path, manifest: bytes) -> None:
    """Let a directory, all of which is on the disk, count as complete."""
    with replaced(directory / MANIFEST) as file:
        file.write(manifest)


def break_seal(directory: Path) -> None:
    """Let a directory count as incomplete before the first of its files is removed."""
    (directory / MANIFEST).unlink(missing_ok=True)
    sync_directory(directory)


@dataclass(frozen=True)
class DirectoryNames:
    """The names that one directory has in turn.

    plain: once it is published.
    fresh: while it is written.
    old:   while it is replaced or removed.
    """

    plain: Path
    fresh: Path
    old: Path


class Directories(ABC):
    """The numbered directories of one kind in ``root``.

    A kind says how they are called, when one is complete, and what is its own in one that goes.
    """

    remedy: ClassVar[str]  # where ``root`` cannot be read
    room: ClassVar[str]  # the remedy where there is too little of it

    def __init__(self, root: Path):
        self.root = root

    @abstractmethod
    def names(self, number: int) -> DirectoryNames:
        """Return the names of a number's directory."""

    @abstractmethod
    def number_of(self, directory: Path) -> int | None:
        """Return the number in a directory's name; None for a name that none of this kind has."""

    @abstractmethod
    def check(self, directory: Path, number: int) -> None:
        """Raise `DamagedError` unless a directory is complete.

        Raises another `CheckpointError` if it cannot be read, or is another version's.
        """

    @abstractmethod
    def make_way(self, plain: Path) -> None:
        """Remove or rename what is no complete directory but in the place of one, or refuse to."""

    @abstractmethod
    def drop(self, fresh: Path) -> None:
        """Remove what an unfinished save wrote."""

    @abstractmethod
    def discard(self, names: DirectoryNames) -> None:
        """Remove what a save wrote to the old directory, its manifest first.

        May be repeated after a crash at any point.
        """

    def locate(self, number: int) -> Path | None:
        """Return the complete directory of a number, under whatever name a crash left it.

        Raises `CheckpointError` for one that cannot be read, or is another version's.
        """
        return next(self._complete(number, [], strict=True), None)

    def newest_first(self, faults: list[CheckpointError] | None = None) -> Iterator[Path]:
        """Yield the complete directory of each number that has one, the highest first.

        faults: collects what is wrong with others; None: it is logged, if they have a manifest.
        """
        for number in sorted(self._numbers(), reverse=True):
            yield from islice(self._complete(number, faults), 1)

    def candidates(self, faults: list[CheckpointError]) -> Iterator[Path]:
        """Yield all complete directories, the highest number first; a crash may leave two of one.

        faults: collects what is wrong with damaged ones.

        Raises `CheckpointError` for one that cannot be read, or is another version's.
        """
        for number in sorted(self._numbers(), reverse=True):
            yield from self._complete(number, faults, strict=True)

    def settle(self) -> None:
        """Complete what a crash interrupted: rename complete directories, remove the rest.

        Raises `CheckpointError`, and changes nothing of that number, for one that cannot be read
        or is another version's.
        """
        for number in sorted(self._numbers(leftover=True)):
            names = self.names(number)
            located = self.locate(number)
            if located is not None and located != names.plain:
                if os.path.lexists(names.plain):
                    self.make_way(names.plain)
                rename(located, names.plain)
            self.drop(names.fresh)
            self.discard(names)

    def begin(self, number: int, counted: int) -> Path:
        """Return an empty directory in which a number's is written, for `publish` or `abandon`.

        counted: bytes that it will have, as far as they are known.

        Raises `CheckpointError`, before anything is written: `FullDiskError` where there is no
        room, others for what cannot make way.
        """
        make_directory(self.root)
        self.settle()
        names = self.names(number)
        if self.locate(number) is None and os.path.lexists(names.plain):
            self.make_way(names.plain)
        check_free(self.root, counted, _WHAT, self.room)
        names.fresh.mkdir()
        return names.fresh

    def abandon(self, number: int, error: Exception) -> None:
        """Remove a directory that is not complete; if that fails too, tell it beside the error."""
        fresh = self.names(number).fresh
        try:
            self.drop(fresh)
        except OSError as second:
            error.add_note(
                f"{fresh} could not be removed ({second}); the next save to this directory will "
                "try again"
            )

    def publish(self, number: int) -> Path:
        """Give the fresh directory of a number, which is complete, its place.

        An earlier one is removed last.
        """
        names = self.names(number)
        self.discard(names)
        if self._is_complete(names.plain, number):
            move(names.plain, names.old)
        elif os.path.lexists(names.plain):
            self.make_way(names.plain)
        rename(names.fresh, names.plain)
        self.discard(names)
        return names.plain

    def remove(self, number: int) -> None:
        """Remove a complete directory."""
        names = self.names(number)
        rename(names.plain, names.old)
        self.discard(names)

    def _numbers(self, leftover: bool = False) -> set[int]:
        """Return the numbers of all directories, complete or not.

        leftover: of those only that have not the plain name.
        """
        try:
            with os.scandir(self.root) as entries:
                below = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return set()
        except OSError as error:
            reason = error.strerror or str(error)
            raise CheckpointError(_WHAT, self.root, reason, self.remedy) from error
        found = set()
        for path in (self.root / name for name in below):
            number = self.number_of(path)
            if number is None:
                continue
            names = self.names(number)
            if path in (names.fresh, names.old) or (path == names.plain and not leftover):
                found.add(number)
        return found

    def _complete(
        self,
        number: int,
        faults: list[CheckpointError] | None,
        strict: bool = False,
    ) -> Iterator[Path]:
        """Yield the complete directories of a number, that with the plain name first."""
        names = self.names(number)
        for path in (names.plain, names.fresh, names.old):
            if self._is_complete(path, number, faults, strict):
                yield path

    def _is_complete(
        self,
        path: Path,
        number: int,
        faults: list[CheckpointError] | None = None,
        strict: bool = False,
    ) -> bool:
        """Whether a directory is complete.

        faults: collects what is wrong with it; None: it is logged, unless it has no manifest.
        strict: raise what is not damage.
        """
        if path.is_symlink() or not path.is_dir():
            return False
        was_published = path == self.names(number).plain
        if not (was_published and faults is not None) and not os.path.lexists(path / MANIFEST):
            return False
        try:
            self.check(path, number)
        except CheckpointError as error:
            if strict and not isinstance(error, DamagedError):
                raise
            if faults is None:
                logging.getLogger(__name__).warning("Passed over as not complete: %s", error)
            else:
                faults.append(error)
            return False
        return True
