"""The rank of this process as given by its launcher, and messages printed once per host; imports no
torch.
"""

import contextlib
import hashlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from ..errors import LaunchError
from . import slurm
from .rendezvous import ADDRESS, PORT, Rendezvous, derived

SECRET = "MERAK_JOB_SECRET"  # environment variable of a launcher's secret for one job
# environment variable of the place of a launcher of ours, see ``places``
LAUNCHER = "MERAK_LAUNCHER"
# environment variables in which gloo and NCCL read the network interface between hosts
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_PATIENCE = 5.0  # seconds to wait for another rank to write its line


class Launcher(NamedTuple):
    """The environment variables in which a launcher passes a process its rank in the job and on its
    host.

    by_mpi: whether its ranks may be those of MPI.
    sure:   a variable without which others may have set the rank; empty: none.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    by_mpi: bool = True
    sure: str = ""


_TORCHRUN = Launcher(
    "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", local_size="LOCAL_WORLD_SIZE", by_mpi=False
)
_OPEN_MPI = Launcher(
    "mpirun",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
_HYDRA = Launcher(
    "mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", local_size="MPI_LOCALNRANKS"
)  # MPICH and Intel's MPI
_SRUN = Launcher("srun", slurm.RANK, slurm.SIZE, slurm.LOCAL_RANK, local_size=slurm.TASKS_OF_NODES)
# The first one whose variables are set. torchrun may itself be started by another one, and those of
# MPI start theirs by srun, which in turn has the ranks of MPICH in variables, and not their hosts.
_LAUNCHERS = (
    _TORCHRUN,
    _OPEN_MPI,
    _HYDRA._replace(sure=_HYDRA.local_rank),
    _SRUN,
    _HYDRA,
)

_NUMERIC = (  # variables by which libraries choose how they compute
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "TORCH_BLAS_PREFER_CUBLASLT",
)


def number(name: str, default: str) -> int:
    """Return the number in an environment variable. Raises LaunchError if it is not a number."""
    text = os.environ.get(name, default)
    if not text.isdigit():
        raise LaunchError(
            f"environment variable {name}",
            repr(text),
            "it is not a number",
            "Start ranks with torchrun",
        )
    return int(text)


def launcher() -> Launcher:
    """Return the launcher that started this process; torchrun if there is none."""
    return next((each for each in _LAUNCHERS if _started(each)), _TORCHRUN)


def _started(by: Launcher) -> bool:
    if by is _SRUN:
        return slurm.is_task(os.environ)
    return bool({by.rank, by.size} & os.environ.keys()) and (not by.sure or by.sure in os.environ)


def position() -> tuple[int, int]:
    """Return (rank, number of ranks) as given by the launcher, without a process group. Raises
    LaunchError.
    """
    by = launcher()
    if by is _SRUN:
        slurm.check_task(os.environ)
    rank = number(by.rank, "0")
    size = number(by.size, "1")
    if not 0 <= rank < size:
        what = f"environment variable {by.rank}"
        raise LaunchError(what, rank, f"{by.size} is {size}", f"Start ranks with {by.name}")
    return rank, size


def ranks_here() -> int:
    """Return the number of ranks of the job on this host, 0 where unknown."""
    by = launcher()
    return slurm.tasks_here(os.environ) if by is _SRUN else number(by.local_size, "0")


def local_rank() -> int:
    """Return the index of this rank on its host, -1 where unknown."""
    name = launcher().local_rank
    return number(name, "0") if name in os.environ else -1


def rendezvous() -> Rendezvous:
    """Return where the ranks of the job meet, by the user, the launcher, or what it tells."""
    host = os.environ.get(ADDRESS, "")
    port = number(PORT, "0") if os.environ.get(PORT) else 0
    by = launcher()
    if (host and port) or by is _TORCHRUN:
        return Rendezvous(host, port)
    found = derived(os.environ, by is _SRUN, ranks_here() == position()[1])
    return Rendezvous(host or found.host, port or found.port, found.job)


def environment() -> dict[str, str]:
    """Return all environment variables, to pass to child processes."""
    return dict(os.environ)


def pass_to_ranks(name: str, value: str) -> None:
    """Set an environment variable of the processes that this one starts."""
    os.environ[name] = value


def launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restarts() -> int:
    """Return how often torchrun has started the ranks of this job again."""
    return number("TORCHELASTIC_RESTART_COUNT", "0")


def tell(text: str, alike: str | None = None) -> None:
    """Write a line to stderr, once for all ranks of this host that report the same; those of MPICH
    each write it.

    The other ranks return when the first one has written its line, because launchers end all ranks
    once one exits.

    alike: text by which lines are compared; None: ``text``. Use it where ``text`` contains the
           rank.
    """
    directory = _shared_directory()
    if directory is None:
        _write(text)
        return
    mark = directory / f"said-{hashlib.sha256((alike or text).encode()).hexdigest()[:16]}"
    try:
        with open(mark, "xb") as file:
            _write(text)
            file.write(b"1")
    except FileExistsError:
        _wait_for(mark)
    except OSError:  # torchrun has cleaned up, or the disk is full
        _write(text)


def _write(text: str) -> None:
    stream = sys.stderr
    if threading.current_thread() is not threading.main_thread() and sys.__stderr__ is not None:
        # the main thread may have redirected the other one to silence a library meanwhile
        stream = sys.__stderr__
    # its reader has left, or its disk is full: what is to follow has to
    with contextlib.suppress(OSError):
        stream.write(text + "\n")
        stream.flush()


def _shared_directory() -> Path | None:
    """Return a directory of this attempt of the job on this host: torchrun's, the parent of each
    rank's, Open MPI's, or one for a step of Slurm; or None.
    """
    directory = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    if directory.name.startswith("attempt_") and directory.is_dir():
        return directory
    by = launcher()
    if by is _OPEN_MPI and (given := os.environ.get("PMIX_SERVER_TMPDIR")):
        return Path(given) if Path(given).is_dir() else None
    return slurm.directory(os.environ) if by is _SRUN else None


def _wait_for(mark: Path) -> None:
    end = time.monotonic() + _PATIENCE
    with contextlib.suppress(FileNotFoundError):  # torchrun cleans up
        while time.monotonic() < end and not mark.stat().st_size:
            time.sleep(0.01)


def numeric_environment() -> dict[str, str]:
    """Return the environment variables that decide numbers, "(unset)" where they are not set."""
    return {name: os.environ.get(name, "(unset)") for name in _NUMERIC}
