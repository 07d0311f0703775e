"""All rows of the parity table: one process per type, a time limit each, and a cache that survives
interruption.
"""

import contextlib
import hashlib
import json
import logging
import multiprocessing
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from .heads import heads
from .measure import CELLS, row

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("megatron_merak", "tests/zoo", "tests/graph")
CODE = (".py", ".h", ".cpp", ".cuh")
MEMORY = 12 << 30  # bytes of address space of one type and each of its ranks

Row = dict[str, Any]


def digest(sources: Iterable[str] = SOURCES) -> str:
    """Of everything a row depends on: the packages' versions and our sources, but for tests and the
    table's text.
    """
    made = hashlib.sha256()
    for package in ("torch", "transformers"):
        made.update(f"{package} {version(package)}\n".encode())
    for folder in sources:
        for path in sorted((ROOT / folder).rglob("*.*")):
            if path.suffix not in CODE or path.name.startswith("test_") or path.name == "table.py":
                continue
            made.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return made.hexdigest()[:16]


def read_cache(path: Path, key: str | None) -> dict[str, Row]:
    """Rows by type, the last one of each; of this digest only, or of any (None). A torn last line
    does not count.
    """
    rows: dict[str, Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found = json.loads(line)
            if key is None or found.get("digest") == key:
                rows[found["type"]] = found
    return rows


def sweep(
    model_types: Iterable[str],
    jobs: int,
    timeout: float,
    cache: Path,
    key: str,
    report: Callable[[Row, int], None],
    asked: Sequence[str] = CELLS,
) -> None:
    """Measure and append to ``cache``; ``report`` hears of every row and how many are left."""
    waiting = list(model_types)
    running: dict[Connection, _Job] = {}
    cache.parent.mkdir(parents=True, exist_ok=True)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                job = _Job(waiting.pop(0), timeout, asked)
                running[job.pipe] = job
            patience = max(0.0, min(job.deadline for job in running.values()) - time.monotonic())
            ready = wait(list(running), patience)
            late = [pipe for pipe, job in running.items() if job.deadline <= time.monotonic()]
            for pipe in {*ready, *late}:
                job = running.pop(pipe)
                found = job.finish(pipe in ready) | {"digest": key}
                with cache.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found, default=str) + "\n")
                report(found, len(waiting) + len(running))
    finally:
        for job in running.values():
            job.kill()


def measure_apart(model_type: str, asked: Sequence[str] = CELLS, timeout: float = 100.0) -> Row:
    """One row, from a process of its own."""
    job = _Job(model_type, timeout, asked)
    return job.finish(job.pipe.poll(timeout))


class _Job:
    """The process of one type; it leads a process group of its own, so that its ranks go
    with it.
    """

    def __init__(self, model_type: str, timeout: float, asked: Sequence[str] = CELLS):
        context = multiprocessing.get_context("fork")
        self.model_type, self.timeout = model_type, timeout
        self.deadline = time.monotonic() + timeout
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_measure, args=(model_type, asked, theirs))
        self.process.start()
        theirs.close()

    def finish(self, answered: bool) -> Row:
        head = heads()[self.model_type]
        known = {
            "type": head.model_type,
            "mapping": head.mapping,
            "class": head.class_name,
            "causal": head.causal,
        }
        try:
            found = (
                self.pipe.recv()
                if answered
                else known | {"broken": f"not done after {self.timeout:g} s"}
            )
        except EOFError:
            found = known | {"broken": "its process died"}
        self.kill()
        return found

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _measure(model_type: str, asked: Sequence[str], pipe: Connection) -> None:
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with quiet():
        pipe.send(row(model_type, asked))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """One thread, and nothing on the console: models warn, the exporter prints the graphs that it
    gives up.
    """
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    yield
