"""Servers and clients of a job inside one process: real connections and threads, no launcher."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_merak.parallel.buffers import BufferEntry, ParameterBuffer
from megatron_merak.parameter_server.client import Client
from megatron_merak.parameter_server.layout import PieceLayout, Span, layout_of, pieces_of
from megatron_merak.parameter_server.roles import Role
from megatron_merak.parameter_server.server import Server, Settings

TIMEOUT = timedelta(seconds=20)
SIZE = 256  # elements of the buffer


def new_buffer() -> ParameterBuffer:
    """Two groups of parameters; the last quarter is counted elsewhere."""
    half, quarter = SIZE // 2, SIZE // 4
    entries = [
        BufferEntry("a", (half,), 0),
        BufferEntry("b", (quarter,), 1),
        BufferEntry("c", (quarter,), 1, False),
    ]
    return ParameterBuffer([entries], torch.float32, "cpu")


def layouts(workers: int, servers: int, **changes) -> list[tuple[Span, PieceLayout]]:
    """Of each server: its span of the buffer, and what it is told of it."""
    given = {
        "dtype": "float32",
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "sync": False,
        "max_staleness": 8,
    }
    spans = pieces_of(SIZE, servers)
    return [
        (span, layout_of(new_buffer(), span, workers=workers, **given | changes)) for span in spans
    ]


class Job:
    """workers workers of one rank, servers ranks that only serve; 0: each worker serves."""

    def __init__(
        self, workers: int, servers: int, directory: Path | None = None, interval: int = 1
    ):
        self.size, self.servers = workers + servers, servers
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.settings, self.timeout = Settings(directory, interval, TIMEOUT), TIMEOUT
        self.said: list[str] = []

    def role(self, rank: int) -> Role:
        return Role(rank, self.size, 1, self.servers)

    def server(self, rank: int) -> Server:
        return Server(self.role(rank), self.store.clone(), self.settings)

    def client(self, worker: int, **changes) -> Client:
        role = self.role(worker)
        pieces = layouts(role.workers, len(role.endpoints), **changes)
        return Client(role, self.store.clone(), pieces, self.timeout, self.said.append)


@contextmanager
def serving(
    workers: int, servers: int, directory: Path | None = None
) -> Iterator[tuple[Job, list[Server]]]:
    """A job with its servers; when it is left without an error, they have ended without one."""
    job = Job(workers, servers, directory)
    serve = range(workers, workers + servers) if servers else range(workers)
    started = [job.server(rank) for rank in serve]
    yield job, started
    for server in started:
        server.wait()
