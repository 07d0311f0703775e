"""The clock of a rank: wall time, or the modelled time of a simulated device."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

from ..cluster import Cluster, Device, Link
from .emulated_kernels import ChargedKernels
from .in_flight import Done, Work


class Clock(Protocol):
    """The time of a rank in seconds. ``label`` describes a modelled clock; it is empty for wall
    time.
    """

    label: str

    def now(self) -> float:
        """Return the seconds since an arbitrary origin."""

    def kernel(self, seconds: float) -> None:
        """Let the device compute for that time."""

    def kernels(self) -> AbstractContextManager:
        """Return a context in which every tensor operation of this thread advances this clock."""

    def side_stream(self) -> AbstractContextManager | None:
        """Return a context in which waits do not delay computation; None where that is
        impossible.
        """

    def restart(self) -> None:
        """Count from the origin again, with nothing in flight, where the time is modelled."""

    def host_copy(self, nbytes: int, back: bool) -> Work:
        """Return the handle of a copy between host and device that begins now.

        back: whether it is to the host; each direction has one copy at a time.
        """

    def on_host(self) -> AbstractContextManager:
        """Return a context in which tensor operations are the host's, while the device waits."""


class WallClock:
    """The monotonic clock of the machine. `kernel` sleeps, which needs no core, so ranks may
    outnumber cores.
    """

    label = ""

    def now(self) -> float:
        return time.perf_counter()

    def kernel(self, seconds: float) -> None:
        time.sleep(seconds)

    def kernels(self) -> AbstractContextManager:
        return nullcontext()

    def side_stream(self) -> None:
        return None

    def restart(self) -> None:
        pass

    def host_copy(self, nbytes: int, back: bool) -> Done:
        return Done()

    def on_host(self) -> AbstractContextManager:
        return nullcontext()


class Queued(Protocol):
    """A collective in the queue of its links."""

    def resolve(self, queue: "Queue") -> None:
        """Determine when the collective starts, given when the queue is free, and when it ends."""


class Queue:
    """One rank's queue on links of one class: one collective at a time, in launch order.

    ``free``: when the collectives resolved so far end, in seconds.
    """

    def __init__(self):
        self.free = 0.0
        self.waiting: deque[Queued] = deque()

    def resolve(self, last: Queued) -> None:
        """Resolve the collectives launched up to ``last``."""
        while self.waiting[0] is not last:
            self.waiting.popleft().resolve(self)
        self.waiting.popleft().resolve(self)


@dataclass(frozen=True)
class Account:
    """Seconds of a logical clock: ``now`` is the sum of ``busy``, ``exposed`` and ``idle``.

    busy:          computing.
    exposed:       waiting for a transfer in flight.
    idle:          waiting for a peer to start a transfer.
    communication: duration of transfers, overlapped or not.
    """

    now: float
    busy: float
    exposed: float
    idle: float
    communication: float

    def __sub__(self, other: "Account") -> "Account":
        return Account(
            *(
                end - start
                for end, start in zip(vars(self).values(), vars(other).values(), strict=True)
            )
        )


class LogicalClock:
    """Modelled time of one rank's device, which has one stream of kernels and one queue per class
    of links.

    Only ``kernel`` and ``wait`` advance it, so that two equal runs have bitwise equal times,
    whatever the load of the machine.

    cluster: gives the times of messages; None: only calls of ``kernel`` take time.
    device:  of this rank, gives the times of tensor operations; None: the cluster's.
    """

    def __init__(self, cluster: Cluster | None = None, device: Device | None = None):
        self.cluster = cluster
        self.device = device or (cluster.device if cluster else None)
        self.label = f"modelled on {cluster.name or cluster.device.name}" if cluster else "modelled"
        self._queues: dict[Link, Queue] = {}
        self._charged: ChargedKernels | None = None
        self.restart()

    def restart(self) -> None:
        self.busy = self.exposed = self.idle = self.communication = 0.0
        self._now = 0.0
        for queue in self._queues.values():
            queue.free = 0.0
            queue.waiting.clear()
        self._host_free = {True: 0.0, False: 0.0}

    def now(self) -> float:
        return self._now

    def account(self) -> Account:
        """Return how the time was spent so far."""
        return Account(
            self._now, self.busy, self.exposed, self.idle, communication=self.communication
        )

    def kernel(self, seconds: float) -> None:
        self._now += seconds
        self.busy += seconds

    def kernels(self) -> AbstractContextManager:
        if self.device is None:
            return nullcontext()
        self._charged = ChargedKernels(self.device, self.kernel)
        return self._charged

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        saved = self._now, self.busy, self.exposed, self.idle
        yield
        self._now, self.busy, self.exposed, self.idle = saved

    def queue(self, link: Link) -> Queue:
        """Return the queue of a class of links."""
        return self._queues.setdefault(link, Queue())

    def wait(self, ready: float, end: float) -> None:
        """Wait for a transfer that ends at ``end``; all of its ranks had joined it at ``ready``."""
        if end <= self._now:
            return
        moving = max(self._now, min(ready, end))
        self.idle += moving - self._now
        self.exposed += end - moving
        self._now = end

    def host_copy(self, nbytes: int, back: bool) -> Work:
        bandwidth = 0.0 if self.device is None else self.device.host_bandwidth
        seconds = nbytes / bandwidth if bandwidth else 0.0
        ready = max(self._now, self._host_free[back])
        self._host_free[back] = ready + seconds
        self.communication += seconds
        return _HostCopy(self, ready + seconds)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """As in `Clock`. The host's memory is taken to be as fast as the link to it."""
        charged = self._charged
        if charged is None or not charged.device.host_bandwidth:
            yield
            return
        device = charged.device
        charged.device = replace(device, memory_bandwidth=device.host_bandwidth)
        try:
            yield
        finally:
            charged.device = device


class _HostCopy:
    """A modelled copy between host and device, until ``end``."""

    def __init__(self, clock: LogicalClock, end: float):
        self._clock = clock
        self._end = end

    def wait(self) -> None:
        self._clock.wait(self._clock.now(), self._end)
