"""Starts the ranks of one case as fresh processes, one core and one thread each, and collects what they measured."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cases import Case, ModelShape

HERE = Path(__file__).resolve().parent


class RankFailed(RuntimeError):
    """A rank ended with an error; the message is the end of its standard error."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
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
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **threads, **{key: str(value) for key, value in torchrun.items()}, "PYTHONPATH": path}


def run_case(
    case: Case, shape: ModelShape, cores: list[int], warmup: int, steps: int, seed: int, timeout: float
) -> list[dict[str, Any]]:
    """Run `case` once; the result of every rank, by rank.

    Rank r is pinned to cores[r]. Raises RankFailed if a rank fails or `timeout` seconds pass; no rank is left behind.
    """
    if len(cores) < case.world_size:
        raise RankFailed(f"{case.name} wants one core per process: {case.world_size} cores, {len(cores)} given")
    job = {"case": case.to_dict(), "shape": asdict(shape), "warmup": warmup, "steps": steps, "seed": seed}
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="merak_bench_") as scratch:
        folder = Path(scratch)
        ranks = []
        for rank in range(case.world_size):
            request = {**job, "core": cores[rank], "result": str(folder / f"{rank}.json")}
            with open(folder / f"{rank}.err", "w") as errors:
                command = [sys.executable, str(HERE / "worker.py"), json.dumps(request)]
                environment = rank_environment(rank, case.world_size, port)
                ranks.append(subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=errors, stderr=errors))
        results = [folder / f"{rank}.json" for rank in range(case.world_size)]
        try:
            failed = wait_for(ranks, results, timeout)
        finally:
            for process in ranks:
                process.kill()
                process.communicate()
        if failed is not None:
            tail = (folder / f"{failed}.err").read_text()[-2000:]
            raise RankFailed(f"{case.name}: rank {failed} failed\n{tail}")
        return [json.loads(result.read_text()) for result in results]


def wait_for(ranks: list[subprocess.Popen], results: list[Path], timeout: float) -> int | None:
    """Wait until every rank has written its result (None), or one has ended without, or the time is over (its number)."""
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
