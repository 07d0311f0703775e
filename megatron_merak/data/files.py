"""Files that are either complete or absent."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..errors import DataError


def temporary_name(path: Path) -> Path:
    """Return a name beside `path` that no other live process of this host writes."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def publish(temporary: Path, path: Path) -> None:
    """Rename a closed, flushed file to `path` and make the rename durable, if the file system can."""
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF):
            raise
    finally:
        os.close(directory)


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Yield a binary file that appears under `path`, complete and on disk, when the block ends without an error."""
    temporary = temporary_name(path)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def regular_file_size(path: Path, what: str, flag: str = "--data-path") -> int:
    """Return the size of a regular file; raise `DataError` for anything else before it is opened."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(what, path, reason, f"Check the path given with {flag}") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(what, path, "it is not a regular file", f"Give {flag} the path of a file")
    return status.st_size
