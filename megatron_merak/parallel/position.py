"""What the launcher says of this process, read before torch is there: its rank, and where the ranks of a host meet."""

import contextlib
import hashlib
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

from ..errors import LaunchError

_PATIENCE = 5.0  # seconds for another rank to finish a line


class Launcher(NamedTuple):
    """The environment variables by which a launcher tells a process who it is: among the job, and on its host."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    by_mpi: bool = True


_TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", by_mpi=False)
_LAUNCHERS = (  # the first that has set one of its variables; torchrun may itself be started by another
    _TORCHRUN,
    Launcher("mpirun", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH and Intel's MPI
)


def number(name: str, default: str) -> int:
    """An environment variable that is a number. Raises LaunchError."""
    text = os.environ.get(name, default)
    if not text.isdigit():
        raise LaunchError(f"environment variable {name}", repr(text), "it is not a number", "Start ranks with torchrun")
    return int(text)


def launcher() -> Launcher:
    """The one that started this process, or torchrun where none did."""
    return next((each for each in _LAUNCHERS if {each.rank, each.size} & os.environ.keys()), _TORCHRUN)


def position() -> tuple[int, int]:
    """(rank, number of ranks) as the launcher says, before any process group exists. Raises LaunchError."""
    by = launcher()
    rank, size = number(by.rank, "0"), number(by.size, "1")
    if not 0 <= rank < size:
        what = f"environment variable {by.rank}"
        raise LaunchError(what, rank, f"{by.size} is {size}", f"Start ranks with {by.name}")
    return rank, size


def environment() -> dict[str, str]:
    """All variables of this process, for those that it starts."""
    return dict(os.environ)


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
