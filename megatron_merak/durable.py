"""A kill or a power cut leaves the old or the new, whole: the one order in which everything writes.

After a power cut a disk has all that was done before an fsync, and any part of what was done
since. So whatever writes what a later run reads goes step by step:

                            a FILE              a directory NAME in ROOT
    1. write aside          FILE.tmp            NAME.new/...
    2. sync what is there   the file            its files, and each folder, which has their names
    3. seal it                                  NAME.new/manifest.json, as a FILE: it is complete
    4. rename it            FILE.tmp -> FILE    NAME -> NAME.old, NAME.new -> NAME
    5. sync the parent                          ROOT: nothing can take the new away
    6. remove the old                           NAME.old, its manifest first

Here are the calls of which these steps are made, and files. Directories are written by
``checkpoint/directories.py``, and by ``checkpoint/in_place.py`` where they have files of others and
cannot be renamed: there step 4 is the rename of one link.

Nothing else renames, syncs, or asks how much is free (``tests/test_architecture.py``). All
functions are local to one rank.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import IO, BinaryIO

from .errors import FullDiskError

TEMPORARY = ".tmp"  # how the name of a file ends that is aside
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


def sync(file: IO[bytes]) -> None:
    """Write the bytes of an open file out to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Write the bytes of a file out to the disk."""
    with open(path, "rb") as file:
        sync(file)


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


def move(aside: Path, path: Path) -> None:
    """Give what is aside, and on the disk, its name, which stays once its parent is synced."""
    os.replace(aside, path)


def rename(aside: Path, path: Path) -> None:
    """Give what is aside, and on the disk, its name, which stays."""
    move(aside, path)
    sync_directory(path.parent)


def aside_of(path: Path) -> Path:
    """Return the name of a file while it is written."""
    return path.with_name(path.name + TEMPORARY)


@contextmanager
def written(aside: Path) -> Iterator[BinaryIO]:
    """Open a file that is aside for writing; at the end of the body its bytes are on the disk.

    After an error it is removed.
    """
    try:
        with open(aside, "wb") as file:
            yield file
            sync(file)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise


@contextmanager
def replaced(path: Path, aside: Path | None = None) -> Iterator[BinaryIO]:
    """Open a file for writing that appears under ``path`` if the body ends without an error.

    aside: its name until then, in the same file system; None: that of `aside_of`.
    """
    aside = aside_of(path) if aside is None else aside
    with written(aside) as file:
        yield file
    rename(aside, path)


def free_name(path: Path, separator: str) -> Path:
    """Return ``path``, or the first name with a number after it that is free."""
    numbered = (path.with_name(f"{path.name}{separator}{n}") for n in count(1))
    return next(name for name in chain([path], numbered) if not os.path.lexists(name))
