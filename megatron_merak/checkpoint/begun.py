"""A mark in a directory that a command is writing, by which a killed command is told from one that
ended.

    DIR/.merak-convert     while DIR is written; removed last

It is on the disk before anything else is written. All functions are local to one rank.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_merak.checkpoint.files import disk_errors
from megatron_merak.durable import make_directory, sync_directory

MARK = ".merak-convert"

_REMEDY = "Check the output directory, its permissions and its free space"


def is_begun(directory: Path) -> bool:
    """Whether a command began to write a directory and did not end."""
    return (directory / MARK).is_file()


@contextmanager
def marked(directory: Path) -> Iterator[None]:
    """Mark a directory, created if it does not exist, while the body writes it.

    After an error the mark stays where there is something in the directory that only a command
    which was killed may leave; a directory that is empty is removed if it was made here.

    Raises CheckpointError if it cannot be written.
    """
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    was_complete = bool(held(directory)) and not is_begun(directory)
    with disk_errors(directory, _REMEDY):
        make_directory(directory)
        (directory / MARK).touch()
        sync_directory(directory)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            if was_complete or not held(directory):
                (directory / MARK).unlink()
            for each in missing:
                each.rmdir()
        raise
    with disk_errors(directory, _REMEDY):
        (directory / MARK).unlink()
        sync_directory(directory)


def held(directory: Path) -> list[str]:
    """Return the names in a directory, but for the mark; none if it does not exist."""
    if not directory.is_dir():
        return []
    return sorted(name for name in os.listdir(directory) if name != MARK)
