"""Arrays that one process builds and all processes of the host map."""

import errno
import fcntl
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ..errors import DataError
from .files import atomic_writer

logger = logging.getLogger(__name__)

# of file systems without locks, such as Lustre where it is mounted without them
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


def cached_arrays(
    directory: Path,
    kind: str,
    description: Mapping[str, object],
    names: Sequence[str],
    build: Callable[[], Sequence[np.ndarray]],
) -> list[np.ndarray]:
    """Return the arrays `names`, mapped read-only from `directory`, building them first if they are
    not there.

    Files are `{md5}-{kind}-{name}.npy` and `{md5}-{kind}-description.txt`, md5 being that of the
    description as JSON. The builder holds a lock of the kernel, which a killed process gives back,
    and renames complete files into place, the description last: without it the arrays do not count.
    Safe to call from any number of processes, of any number of hosts that share the directory; on
    a file system without locks several of them build at the same time.

    Raises `DataError` if the directory cannot be written or a cached array is damaged.
    """
    text = json.dumps(description, indent=4, sort_keys=True)
    base = f"{hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()}-{kind}"
    paths = [directory / f"{base}-{name}.npy" for name in names]
    marker = directory / f"{base}-description.txt"
    if not marker.is_file():
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with _locked(directory / f"{base}.lock"):
                if not marker.is_file():
                    _write(paths, marker, build(), text)
        except OSError as error:
            raise DataError(
                "index cache",
                directory,
                error.strerror or str(error),
                "Give --data-cache-path a directory that can be written",
            ) from error
    return [_load(path) for path in paths]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that builds %s", path.stem)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            # Then several may build: each renames complete files, which are equal, into place.
            logger.info("%s has no locks: every host builds %s", path.parent, path.stem)
        yield


def _write(paths: Sequence[Path], marker: Path, arrays: Sequence[np.ndarray], text: str) -> None:
    start = time.monotonic()
    for path, array in zip(paths, arrays, strict=True):
        with atomic_writer(path) as file:
            np.save(file, array, allow_pickle=False)
    with atomic_writer(marker) as file:
        file.write(text.encode())
    logger.info(
        "built %s in %.1f s", marker.name.removesuffix("-description.txt"), time.monotonic() - start
    )


def _load(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            "index cache",
            path,
            f"it cannot be read ({error})",
            "Delete the file's directory; the next start rebuilds it",
        ) from error
