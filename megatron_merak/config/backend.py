"""What settings ask of the backend of collectives."""

from ..errors import ConfigError
from .backends import BACKENDS
from .parallel import ParallelConfig
from .sections import TrainConfig


def check_backend(parallel: ParallelConfig, train: TrainConfig) -> None:
    backend = BACKENDS.get(parallel.distributed_backend)
    if backend is not None and not backend.halves and (train.bf16 or train.fp16):
        flag = "--bf16" if train.bf16 else "--fp16"
        reason = f"torch's {backend.name.upper()} backend has no 16-bit numbers"
        raise ConfigError(flag, True, reason, "Leave it out, or use --distributed-backend gloo")
    _check_emulation(parallel)
    if parallel.preflight and parallel.distributed_backend == "emu":
        reason = "links of an emulated cluster are modelled, and there is nothing to measure"
        raise ConfigError("--preflight", True, reason, "Leave it out")


def _check_emulation(parallel: ParallelConfig) -> None:
    if parallel.distributed_backend == "emu" and parallel.emulate is None:
        raise ConfigError(
            "--emulate",
            "(missing)",
            "is needed with --distributed-backend emu",
            "Name a cluster, such as dgx-a100, rtx3090 or laptop, or a file *.json",
        )
