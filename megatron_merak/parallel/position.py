"""What the launcher says of this process, read before torch is there: its rank, and where the ranks of a host meet."""

import contextlib
import hashlib
import os
import sys
import time
from pathlib import Path

from ..errors import LaunchError

_PATIENCE = 5.0  # seconds for another rank to finish a line


def number(name: str, default: str) -> int:
    """An environment variable that is a number. Raises LaunchError."""
    text = os.environ.get(name, default)
    if not text.isdigit():
        raise LaunchError(f"environment variable {name}", repr(text), "it is not a number", "Start ranks with torchrun")
    return int(text)


def position() -> tuple[int, int]:
    """(rank, number of ranks) as the launcher says, before any process group exists. Raises LaunchError."""
    rank, size = number("RANK", "0"), number("WORLD_SIZE", "1")
    if not 0 <= rank < size:
        raise LaunchError("environment variable RANK", rank, f"WORLD_SIZE is {size}", "Start ranks with torchrun")
    return rank, size


def launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def tell(text: str, alike: str | None = None) -> None:
    """Write a line to stderr, once for all ranks of this host that torchrun started and that have the same to say.

    alike: what is compared, where ``text`` names the rank. A rank that is not the first returns when the first one has
    written its line, since torchrun ends all ranks as soon as one exits.
    """
    meeting = _meeting()
    if meeting is None:
        _write(text)
        return
    mark = meeting / f"said-{hashlib.sha256((alike or text).encode()).hexdigest()[:16]}"
    try:
        with open(mark, "xb") as file:
            _write(text)
            file.write(b"1")
    except FileExistsError:
        _wait_for(mark)
    except OSError:  # torchrun has cleaned up, or the disk is full
        _write(text)


def _write(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _meeting() -> Path | None:
    """The directory that torchrun made for this attempt of the job on this host: it is above that of each rank."""
    directory = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    return directory if directory.name.startswith("attempt_") and directory.is_dir() else None


def _wait_for(mark: Path) -> None:
    end = time.monotonic() + _PATIENCE
    with contextlib.suppress(FileNotFoundError):  # torchrun cleans up
        while time.monotonic() < end and not mark.stat().st_size:
            time.sleep(0.01)
