"""Starts the ranks of one case as fresh processes, one core and one thread each, and collects what
they measured.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.step.cases import Case, ModelShape


class RankFailed(RuntimeError):
    """A rank ended with an error; the message holds the end of what every rank printed."""


@dataclass(frozen=True)
class Settings:
    """How every case of a run is measured. `timeout` in seconds; `keep_memory` sets glibc's
    allocator in every rank.
    """

    warmup: int
    steps: int
    seed: int
    timeout: float
    cores: tuple[int, ...]
    keep_memory: bool


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environment(rank: int, world_size: int, port: int, keep_memory: bool) -> dict[str, str]:
    """The variables torchrun would set, one thread for every library that has threads."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    torchrun = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    # glibc: take large blocks from the heap and never give it back, so that no step faults the same
    # pages in again.
    memory = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)} if keep_memory else {}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ours = {**threads, **memory, **torchrun, "PYTHONPATH": path}
    return {**os.environ, **{key: str(value) for key, value in ours.items()}}


def run_together(command: Sequence[str], ranks: int, seconds: float) -> bool:
    """Run a command in so many ranks of one job; whether all ended with status 0. None is left
    behind.
    """
    port = free_port()
    processes = [
        subprocess.Popen(command, env=rank_environment(rank, ranks, port, False))
        for rank in range(ranks)
    ]
    try:
        statuses = [process.wait(seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return not any(statuses)


def run_case(case: Case, shape: ModelShape, settings: Settings) -> list[dict[str, Any]]:
    """Run `case` once; the result of every rank, by rank.

    Rank r is pinned to settings.cores[r]. Raises RankFailed if a rank fails or settings.timeout
    seconds pass; no rank is left behind.
    """
    if len(settings.cores) < case.world_size:
        raise RankFailed(
            f"{case.name}: {case.world_size} processes want a core each, {len(settings.cores)} given"
        )
    job = {key: getattr(settings, key) for key in ("warmup", "steps", "seed")}
    job |= {"case": asdict(case), "shape": asdict(shape)}
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="merak_bench_") as scratch:
        folder = Path(scratch)
        ranks = []
        for rank in range(case.world_size):
            request = {**job, "core": settings.cores[rank], "result": str(folder / f"{rank}.json")}
            with open(folder / f"{rank}.err", "w") as errors:
                command = [sys.executable, "-m", "benchmarks.step.worker", json.dumps(request)]
                environment = (
                    rank_environment(rank, case.world_size, port, settings.keep_memory)
                    | case.environment
                )
                streams = {"stdin": subprocess.PIPE, "stdout": errors, "stderr": errors}
                ranks.append(subprocess.Popen(command, env=environment, **streams))
        results = [folder / f"{rank}.json" for rank in range(case.world_size)]
        try:
            failed = wait_for(ranks, results, settings.timeout)
        finally:
            for process in ranks:
                process.kill()
                process.communicate()
        if failed is not None:
            tails = [
                f"rank {rank}:\n{(folder / f'{rank}.err').read_text()[-2000:]}"
                for rank in range(case.world_size)
            ]
            raise RankFailed(
                f"{case.name}: rank {failed} failed or was too slow\n" + "\n".join(tails)
            )
        return [json.loads(result.read_text()) for result in results]


def wait_for(ranks: list[subprocess.Popen], results: list[Path], timeout: float) -> int | None:
    """Wait until every rank has written its result (None), or one ended without or is too slow (its
    number).
    """
    deadline = time.monotonic() + timeout
    while True:
        ended = [process.poll() is not None for process in ranks]
        missing = [rank for rank, result in enumerate(results) if not result.exists()]
        if not missing:
            return None
        for rank in missing:
            if ended[rank]:
                return rank
        if time.monotonic() > deadline:
            return missing[0]
        time.sleep(0.05)
