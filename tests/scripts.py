"""``run_script(script, flags, ranks)``: a script of this repository in processes that have imported
torch and the package already.

They are forked as those of ``run_ranks`` are, and find the variables of a launcher if there are
several. What torchrun does besides, a test asks torchrun for.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

from tests.ranks import PRELOAD

ROOT = Path(__file__).resolve().parents[1]


def run_script(
    script: str, flags: Sequence[str], ranks: int = 1, timeout: float = 250.0
) -> subprocess.CompletedProcess:
    """Run ``script``, a path in the repository, on so many ranks.

    The status is that of the first rank that failed, which ends the others; the texts are those of
    all ranks, one after the other. None outlives the call. Raises subprocess.TimeoutExpired.
    """
    from benchmarks.step.launcher import free_port, rank_environment

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    command = [str(ROOT / script), *flags]
    port = free_port()
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    processes = []
    with tempfile.TemporaryDirectory(prefix="script-") as directory:
        try:
            for rank in range(ranks):
                environment = os.environ | own
                if ranks > 1:
                    environment |= rank_environment(rank, ranks, port, False)
                process = context.Process(
                    target=_script, args=(command, environment, f"{directory}/{rank}")
                )
                processes.append(process)
                process.start()
            status = _status(processes, time.monotonic() + timeout)
            if status is None:
                raise subprocess.TimeoutExpired(command, timeout)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        told = _told(directory, ranks, "out")
        errors = _told(directory, ranks, "err")
    return subprocess.CompletedProcess(command, status, told, errors)


def _told(directory: str, ranks: int, kind: str) -> str:
    """What the ranks wrote, one after the other. kind: out or err."""
    texts = [Path(f"{directory}/{rank}.{kind}").read_text() for rank in range(ranks)]
    return "".join(texts)


def _status(processes: list, end: float) -> int | None:
    """The first status that is not 0, or 0 once all have ended; None if that takes too long."""
    running = list(processes)
    while running:
        wait([process.sentinel for process in running], max(0.0, end - time.monotonic()))
        ended = [process for process in running if process.exitcode is not None]
        failed = [process.exitcode for process in ended if process.exitcode]
        if failed:
            return failed[0]
        if not ended and time.monotonic() >= end:
            return None
        running = [process for process in running if process not in ended]
    return 0


def _script(command: list[str], environment: dict[str, str], told: str) -> None:
    parent = multiprocessing.parent_process()
    # never outlive the test run
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    for number, kind in ((1, "out"), (2, "err")):
        file = os.open(f"{told}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
