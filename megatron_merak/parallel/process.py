"""Process-wide settings of a training process: precision of fp32 matrix products, host memory,
threads.
"""

import ctypes
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import LaunchError
from .memory import keep_freed_memory
from .places import is_dead, place_of
from .precision import choose_fp32_matmul

_PR_SET_PDEATHSIG = 1
_TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Environment:
    """What the launcher and the user's environment specify for this process.

    ranks_here:  number of ranks of the job on this host, 0 where unknown.
    own_threads: whether the user set the number of threads; torchrun's default of 1 does not count.
    own_malloc:  whether the user configured when malloc returns memory to the system.
    """

    ranks_here: int = 0
    own_threads: bool = False
    own_malloc: bool = False


@dataclass(frozen=True)
class Setup:
    """The chosen settings. ``str`` describes them, with the settings that override them.

    fp32_matmul:  torch's precision of fp32 matrix products.
    keeps_memory: whether malloc keeps freed memory.
    threads:      number of threads of one operation.
    """

    fp32_matmul: str = "highest"
    keeps_memory: bool = False
    threads: int = 1

    def __str__(self) -> str:
        memory = ", freed memory is kept (MALLOC_TRIM_THRESHOLD_)" if self.keeps_memory else ""
        return (
            f"{self.threads} thread{'s' * (self.threads > 1)} each (OMP_NUM_THREADS), "
            f"fp32 matrix products at '{self.fp32_matmul}' (fp32_matmul_precision){memory}"
        )


def set_up(device: torch.device, fp32_matmul: str, environment: Environment) -> Setup:
    """Choose and apply the settings of this process, except those that the user has set in torch or
    the environment.

    device:      of this rank.
    fp32_matmul: "auto", or a precision of ``torch.set_float32_matmul_precision``.
    """
    if fp32_matmul != "auto":
        torch.set_float32_matmul_precision(fp32_matmul)
    elif torch.get_float32_matmul_precision() == "highest":  # torch's default
        choose_fp32_matmul(device)
    # Partial sums of a bf16 or fp16 product are accumulated in fp32.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if not environment.own_threads and environment.ranks_here > 1:
        torch.set_num_threads(max(1, cores() // environment.ranks_here))
    keeps = device.type == "cpu" and not environment.own_malloc and keep_freed_memory()
    return Setup(torch.get_float32_matmul_precision(), keeps, torch.get_num_threads())


def end_with_launcher(launcher: str | None = None) -> None:
    """Let the operating system end this process when its parent process ends for any reason.

    A killed launcher cannot stop its ranks; they would continue and write checkpoints concurrently
    with the next job.

    launcher: what ``launcher_place`` said in it; None: it was not ours. Raises LaunchError if it
              has ended before.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if launcher is None:
        return
    place = json.loads(launcher)
    # the system tells nothing of what ended before it was asked to
    if is_dead(place, place_of(os.getpid())):
        raise LaunchError("launcher", f"process {place[1]}", "it has ended", "Start the job again")


def launcher_place() -> str:
    """Return the place of this process, for the ranks that it starts."""
    return json.dumps(place_of(os.getpid()))


def cores() -> int:
    """Return the number of cores that this process may use; hardware threads of one core count
    once.
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    usable = sorted(os.sched_getaffinity(0))
    return len({_siblings(number) for number in usable})


def _siblings(number: int) -> str:
    try:
        return (_TOPOLOGY / f"cpu{number}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(number)
