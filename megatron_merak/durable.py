"""A kill or a power cut leaves the old or the new, whole: the one order in which everything writes.

After a power cut a disk has all that was done before an fsync, and any part of what was done
since. So whatever writes what a later run reads goes step by step:

                            a FILE              a directory NAME in ROOT
    1. write aside          .FILE.tmp           NAME.new/...
    2. sync what is there   the file            its files, and each folder, which has their names
    3. seal it                                  NAME.new/manifest.json, as a FILE: it is complete
    4. rename it            .FILE.tmp -> FILE   NAME -> NAME.old, NAME.new -> NAME
    5. sync the parent                          ROOT: nothing can take the new away
    6. remove the old                           NAME.old, its manifest first

Of a directory that is read: NAME, or if that is not complete, NAME.new or NAME.old. What a kill
leaves of these is completed or removed by `Directories.settle`, with which the next save begins.
Where a directory has files of others and cannot be renamed, step 4 is the rename of one link
(``checkpoint/in_place.py``). Names aside are each writer's own.

All functions are local to one rank; one process at a time writes to a ROOT.
"""

import errno
import logging
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import BinaryIO, ClassVar

from .errors import CheckpointError, DamagedError, FullDiskError

MANIFEST = "manifest.json"
MARGIN = 1 << 20  # bytes of free space beyond those that are counted: headers, manifests, trackers

# of file systems that cannot, and of directories that may be written but not read
_NO_DIRECTORY_SYNC = (
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EBADF,
    errno.EACCES,
)


def check_free(directory: Path, counted: int, what: str, remedy: str) -> None:
    """Raise `FullDiskError` unless there is room for ``counted`` bytes and the `MARGIN`.

    what: names the directory.
    """
    needed = counted + MARGIN
    free = shutil.disk_usage(directory).free
    if free < needed:
        reason = f"{needed:,} bytes are needed and {free:,} are free"
        raise FullDiskError(what, os.fspath(directory), reason, remedy)


def make_directory(directory: Path) -> None:
    """Create a directory and those above it, as far as they do not exist; their names stay."""
    missing = [each for each in (directory, *directory.parents) if not each.is_dir()]
    directory.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_directory(each.parent)


def sync_file(path: Path) -> None:
    """Write the bytes of a file out to the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Write the names in a directory out to the disk, on file systems that can."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise


def sync_folders(directory: Path) -> None:
    """Write the names in a directory and in all below it out to the disk."""
    for folder, _, _ in os.walk(directory, topdown=False):
        sync_directory(Path(folder))


def rename(aside: Path, path: Path) -> None:
    """Give what is aside, and on the disk, its name, which stays."""
    os.replace(aside, path)
    sync_directory(path.parent)


@contextmanager
def written(aside: Path) -> Iterator[BinaryIO]:
    """Open a file that is aside for writing; at the end of the body its bytes are on the disk."""
    with open(aside, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replaced(path: Path, aside: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that appears under ``path`` if the body ends without an error.

    aside: its name until then, in the same directory.
    """
    with written(aside) as file:
        yield file
    rename(aside, path)


def break_seal(directory: Path) -> None:
    """Let a directory count as incomplete before the first of its files is removed."""
    (directory / MANIFEST).unlink(missing_ok=True)
    sync_directory(directory)


def free_name(path: Path, separator: str) -> Path:
    """Return ``path``, or the first name with a number after it that is free."""
    numbered = (path.with_name(f"{path.name}{separator}{n}") for n in count(1))
    return next(name for name in chain([path], numbered) if not os.path.lexists(name))


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

    def publish(self, number: int) -> Path:
        """Give the fresh directory of a number, which is complete, its place.

        An earlier one is removed last.
        """
        names = self.names(number)
        self.discard(names)
        if self._is_complete(names.plain, number):
            os.rename(names.plain, names.old)
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
            raise CheckpointError("checkpoint directory", self.root, reason, self.remedy) from error
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
