"""A file system of a few megabytes that a test can fill."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_BLOCK = 1 << 12


@contextmanager
def small_disk(place: Path, megabytes: int) -> Iterator[Path]:
    """Mount a file system in memory at ``place``; skip the test where that is not allowed."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("file systems can be mounted by root only")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(directory: Path) -> Path:
    """Leave no space in the file system of a directory; return the file that takes it."""
    ballast = directory / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        for size in (1 << 16, _BLOCK):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    assert os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize < _BLOCK
    return ballast
