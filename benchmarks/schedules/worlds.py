"""Ranks on this machine for benchmarks: processes from a fork server, several jobs at a time, a
progress line.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import Any

from benchmarks import ROOT
from tests.ranks import PRELOAD, run_ranks


@dataclass(frozen=True)
class Job:
    """``fn(rank, ranks, *args)`` on so many ranks. ``seconds``: about how long it takes."""

    name: str
    fn: Callable
    ranks: int
    args: tuple
    seconds: float


def prepare(*modules: str) -> None:
    """Start the server that ranks are forked from. It imports ``modules`` once, so that no rank
    does.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch_only = [name for name in PRELOAD if not name.startswith("transformers")]
    forkserver.set_forkserver_preload([*torch_only, *modules])
    forkserver.ensure_running()


def run_jobs(jobs: Sequence[Job], at_once: int, done: Callable[[Job, list[Any]], str]) -> None:
    """Run all, the longest first. ``done`` takes a job and the results of its ranks, and says what
    to print of them.

    The first job that fails ends all others' start; its error is raised.
    """
    began, left = time.monotonic(), sum(job.seconds for job in jobs)
    total = left
    with ThreadPoolExecutor(at_once) as pool:
        waiting = {
            pool.submit(run_ranks, job.fn, job.ranks, *job.args, timeout=120 + 4 * job.seconds): job
            for job in sorted(jobs, key=lambda job: -job.seconds)
        }
        try:
            for count, future in enumerate(as_completed(waiting), 1):
                job = waiting[future]
                said = done(job, future.result())
                left -= job.seconds
                passed = time.monotonic() - began
                rest = passed * left / max(total - left, 1e-9)
                line = f"[{count}/{len(jobs)}] {job.name}: {said}; {passed:.0f} s, about {rest:.0f} s left"
                print(line, file=sys.stderr, flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
