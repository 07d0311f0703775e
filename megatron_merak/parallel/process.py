"""What a training process sets up once, whichever entry it came by: fp32 matrix products, host memory, threads."""

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from .memory import keep_freed_memory
from .precision import choose_fp32_matmul

_PR_SET_PDEATHSIG = 1
_TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Environment:
    """What the launcher and the user's environment say of this process.

    ranks_here: ranks of the job on this host, 0 where that is not known.
    own_threads: whether the user chose the number of threads; torchrun's default of 1 is no choice.
    own_malloc: whether the user chose how malloc returns memory.
    """

    ranks_here: int = 0
    own_threads: bool = False
    own_malloc: bool = False


@dataclass(frozen=True)
class Setup:
    """What was chosen. ``str`` says it, each with the way to choose otherwise.

    fp32_matmul: torch's precision of fp32 matrix products. keeps_memory: whether malloc keeps what is freed.
    threads: of one operation.
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
    """Make the choices of this process. What the user has set in torch or in the environment stays as it is.

    device: this rank's. fp32_matmul: "auto", or a precision of ``torch.set_float32_matmul_precision``.
    """
    if fp32_matmul != "auto":
        torch.set_float32_matmul_precision(fp32_matmul)
    elif torch.get_float32_matmul_precision() == "highest":  # torch's default
        choose_fp32_matmul(device)
    # What partial sums of one bf16 or fp16 product add up to is not rounded in between.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if not environment.own_threads and environment.ranks_here > 1:
        torch.set_num_threads(max(1, cores() // environment.ranks_here))
    keeps = device.type == "cpu" and not environment.own_malloc and keep_freed_memory()
    return Setup(torch.get_float32_matmul_precision(), keeps, torch.get_num_threads())


def end_with_launcher() -> None:
    """Let the kernel end this process when the one that started it ends, however that comes about.

    A launcher that is killed cannot stop its ranks; they would train on and write checkpoints beside the next job's.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def cores() -> int:
    """Cores that this process may use; hardware threads of one core count once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    usable = sorted(os.sched_getaffinity(0))
    return len({_siblings(number) for number in usable})


def _siblings(number: int) -> str:
    try:
        return (_TOPOLOGY / f"cpu{number}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(number)
