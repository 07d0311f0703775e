"""The communication backends that a job can have, one row each."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Backend:
    """A value of ``--distributed-backend``.

    name:    the value, and the name of its groups.
    job:     the backend of the default process group; groups of other backends are created beside
             it.
    of_gpus: whether it transfers tensors of GPUs, else of CPUs.
    by_tag:  whether messages are matched by tag inside a group; else by order, and each channel has
             its own group.
    """

    name: str
    job: str
    of_gpus: bool = False
    by_tag: bool = False


_ROWS = (
    Backend("gloo", "gloo", by_tag=True),
    Backend("nccl", "nccl", of_gpus=True),
    Backend("emu", "emu", by_tag=True),
    Backend("merak_shm", "gloo", by_tag=True),
    Backend("merak_peer", "nccl", of_gpus=True),
    Backend("gloo_cuda", "gloo_cuda", of_gpus=True, by_tag=True),
    Backend("mpi", "merak_mpi", by_tag=True),
)
BACKENDS: Mapping[str, Backend] = MappingProxyType({row.name: row for row in _ROWS})


def of_group(name: str) -> Backend | None:
    """Return the row of a group's backend, which may be known as that of a job only."""
    own = (row for row in _ROWS if row.job == name)
    return BACKENDS.get(name) or next(own, None)
