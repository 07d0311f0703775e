"""Files that are either complete or absent."""

import os
import secrets
import stat
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from ..durable import replaced
from ..errors import DataError


def temporary_name(path: Path) -> Path:
    """Return a name beside `path` that no other process writes, of whatever host: numbers of
    processes are alike in containers.
    """
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def atomic_writer(path: Path) -> AbstractContextManager[BinaryIO]:
    """Open a binary file that appears under `path`, complete and on disk, when the block ends
    without an error. Other processes may write it at the same time.
    """
    return replaced(path, temporary_name(path))


def regular_file_size(path: Path, what: str, flag: str = "--data-path") -> int:
    """Return the size of a regular file; raise `DataError` for anything else before it is
    opened.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(what, path, reason, f"Check the path given with {flag}") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(what, path, "it is not a regular file", f"Give {flag} the path of a file")
    return status.st_size
