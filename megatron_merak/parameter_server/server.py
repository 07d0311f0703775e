"""A serving rank: one thread for every rank that it serves, until that leaves or dies."""

import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..counting import counted
from .roles import Role, ended_key
from .service import Service, Snapshots
from .snapshot import snapshot_path
from .wire import CLIENT, SERVER, Connection, ConnectionLost, MessageKind, comes

_JOB = "word for this job"
HEARTBEATS = 4  # signs of life within the time after which a side that is silent counts as gone


def starts_key(server: int) -> str:
    """The key of the job's store that counts the starts of that rank's server."""
    return f"parameter server {server} started"


def connection_name(server: int, start: int, client: int) -> str:
    return f"parameter server {server}, start {start}, rank {client}"


@dataclass(frozen=True)
class Settings:
    """Settings of a server.

    directory: of snapshots; None: there are none.
    interval:  updates between two snapshots.
    timeout:   how long a worker may be silent until it counts as dead.
    """

    directory: Path | None
    interval: int
    timeout: timedelta


class Server:
    """Serves the clients of ``role`` in threads, from its construction on.

    store: the job's.
    """

    def __init__(self, role: Role, store: dist.Store, settings: Settings):
        self.role = role
        self.store = store
        self.settings = settings
        self.start = store.add(starts_key(role.rank), 1)
        self._job = store.compare_set(_JOB, "", secrets.token_hex(8)).decode()
        self.lost: list[int] = []
        self.failure: Exception | None = None
        self._pool = ThreadPoolExecutor(1, "snapshots")
        self.services = {
            place: self._service(place) for place in sorted({self._place(c) for c in role.clients})
        }
        self._threads = [
            threading.Thread(
                target=self._run, args=(client,), name=f"serves rank {client}", daemon=True
            )
            for client in role.clients
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Return whether every client has left or is gone, and the last snapshot is written. Raises
        what went wrong.

        seconds: how long to wait for the clients, None: as long as it takes
        """
        end = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if end is None else max(end - time.monotonic(), 0.0))
            if thread.is_alive():
                return False
        for service in self.services.values():
            service.close()
        self._pool.shutdown()
        if self.failure is not None:
            raise self.failure
        return True

    def summary(self) -> str:
        """What the server did, in one line."""
        updates = max(
            (service.piece.version for service in self.services.values() if service.piece),
            default=0,
        )
        staleness = [
            (age, n)
            for service in self.services.values()
            for age, n in service.record.staleness.items()
        ]
        count = sum(n for _, n in staleness)
        text = f"parameter server (rank {self.role.rank}): {counted(updates, 'update')}"
        if count:
            mean = sum(age * n for age, n in staleness) / count
            most = max(age for age, _ in staleness)
            text += f", staleness {mean:.1f} on average and {most} at most"
        if dropped := sum(service.record.dropped for service in self.services.values()):
            text += f", {counted(dropped, 'gradient')} too old"
        lost = ", ".join(map(str, sorted(self.lost)))
        return text + (f", lost rank{'s' * (len(self.lost) > 1)} {lost}" if self.lost else "")

    def _place(self, client: int) -> int:
        return client % self.role.places

    def _service(self, place: int) -> Service:
        directory = self.settings.directory
        path = None
        if directory is not None:
            path = snapshot_path(directory, self.role.rank, place)
        say = partial(print, flush=True)
        snapshots = Snapshots(path, self._job, self.settings.interval, self.start > 1, say=say)
        return Service(
            self.role.workers,
            snapshots,
            self._pool,
            self.settings.timeout.total_seconds() / HEARTBEATS,
        )

    def _run(self, client: int) -> None:
        worker = client // self.role.places
        service = self.services[self._place(client)]
        connection = None
        try:
            name = connection_name(self.role.rank, self.start, client)
            timeout = self.settings.timeout
            own: Any = self.store.clone()  # type: ignore[attr-defined]  # which torch's stubs leave out
            if not comes(own, name, CLIENT, ended_key(client), timeout=timeout):
                raise ConnectionLost(f"rank {client} did not come")
            connection = Connection(self.store, name, SERVER, timeout, secret=self.role.secret)
            service.serve(worker, connection)
        except ConnectionLost as error:
            self.lost.append(client)
            print(
                f"parameter server (rank {self.role.rank}): rank {client} is gone ({error})",
                flush=True,
            )
        except Exception as error:  # nobody looks at what a thread raises
            self.failure = error
            if connection is not None:
                connection.send(MessageKind.ERROR, text=f"{type(error).__name__}: {error}")
        finally:
            service.gone(worker)
