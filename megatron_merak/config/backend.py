"""What settings ask of the backend of collectives."""

from ..errors import ConfigError
from .parallel import ParallelConfig


def check_backend(parallel: ParallelConfig) -> None:
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
