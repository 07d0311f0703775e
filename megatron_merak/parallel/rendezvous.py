"""Where the ranks of a job meet: the address that the user or the launcher names, or one that every
rank derives from what the launcher told it.

    torchrun, merak-launch   MASTER_ADDR and MASTER_PORT, which they set
    srun                     the first host of the step, and a port by the numbers of job and step
    mpirun, mpiexec          on one host: itself, and a port by the name that the launcher gave the job

A port that is derived may be taken; then the first rank says so.
"""

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from . import slurm
from .places import place_of

LOOPBACK = "127.0.0.1"
ADDRESS = "MASTER_ADDR"
PORT = "MASTER_PORT"
# below those that systems give to outgoing connections
_FIRST_PORT = 11000
_PORTS = 18000
# a job's name by Open MPI 5, and 4
_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
_PROXY = "hydra_pmi_proxy"  # the parent, on each host, of the ranks of MPICH and Intel's MPI


class Rendezvous(NamedTuple):
    """The address of the store of a job. An empty ``host`` or a ``port`` of 0 is unknown.

    job: the launcher's name of the job, where the address was derived from it; two jobs may have
         one port.
    """

    host: str
    port: int
    job: str = ""


def derived(environment: Mapping[str, str], by_slurm: bool, one_host: bool) -> Rendezvous:
    """Return where the ranks of a launcher meet that names no place.

    by_slurm: whether srun started them.
    one_host: whether all of them are on this host.
    """
    if by_slurm:
        job = f"Slurm {environment.get(slurm.JOB, '')}.{environment[slurm.STEP]}"
        host = LOOPBACK if one_host else first_host(environment)
        return Rendezvous(host, port_of(job), job)
    job = next((environment[name] for name in _JOBS if environment.get(name)), "") or _proxy()
    known = bool(one_host and job)
    return Rendezvous(LOOPBACK if one_host else "", port_of(job) if known else 0, job)


def first_host(environment: Mapping[str, str]) -> str:
    return slurm.first_host(environment.get(slurm.NODES, ""))


def _proxy() -> str:
    """Return a name of the process that MPICH starts on a host for all ranks of a job there; empty
    where that is not this one's parent.
    """
    parent = os.getppid()
    try:
        command = Path(f"/proc/{parent}/comm").read_text().strip()
    except OSError:
        return ""
    return f"{_PROXY} {place_of(parent)}" if command == _PROXY else ""


def port_of(job: str) -> int:
    """Return a port for a job, by its name."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
