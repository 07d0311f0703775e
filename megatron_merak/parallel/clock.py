"""What time it is for a rank: the machine's clock, or a logical one that passes only as modelled work is charged."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from ..cluster import Cluster, Link
from .emulated_kernels import Kernels


class Clock(Protocol):
    """Seconds as a rank counts them. ``label`` says where they come from, empty for the machine's own."""

    label: str

    def now(self) -> float:
        """Seconds since an arbitrary origin."""

    def kernel(self, seconds: float) -> None:
        """The device computes for so long."""

    def kernels(self) -> AbstractContextManager:
        """Inside, every tensor operation of this thread takes its time on this clock."""

    def aside(self) -> AbstractContextManager | None:
        """Inside, another stream than that of the computation waits; None where a wait takes the rank's own time."""


class WallClock:
    """The machine's monotonic clock. A kernel of given time is a sleep: it needs no core, so that more ranks than cores
    can be timed.
    """

    label = ""

    def now(self) -> float:
        return time.perf_counter()

    def kernel(self, seconds: float) -> None:
        time.sleep(seconds)

    def kernels(self) -> AbstractContextManager:
        return nullcontext()

    def aside(self) -> None:
        return None


class Queued(Protocol):
    """A collective on the queue of its links."""

    def resolve(self, queue: "Queue") -> None:
        """Find out when it starts, given when the queue is free, and when it ends."""


class Queue:
    """The links of one class as one rank uses them: one collective at a time, in the order of their launch.

    ``free``: when the collectives resolved so far are through, in seconds.
    """

    def __init__(self):
        self.free = 0.0
        self.waiting: deque[Queued] = deque()

    def resolve(self, last: Queued) -> None:
        """Resolve what was launched up to ``last``."""
        while self.waiting[0] is not last:
            self.waiting.popleft().resolve(self)
        self.waiting.popleft().resolve(self)


@dataclass(frozen=True)
class Account:
    """Seconds of a logical clock: ``now`` is the sum of ``busy``, ``exposed`` and ``idle``.

    busy: computing. exposed: waiting for a transfer under way. idle: waiting for a peer to take part in one.
    communication: transfers under way, hidden or not.
    """

    now: float
    busy: float
    exposed: float
    idle: float
    communication: float

    def __sub__(self, other: "Account") -> "Account":
        return Account(*(mine - theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))


class LogicalClock:
    """Modelled time of one rank's device, which has one stream of kernels and one queue per class of links.

    Nothing but ``kernel`` and ``wait`` makes it pass, so that two equal runs read equal times to the last bit, however
    busy the machine is. ``cluster`` prices kernels; None: only kernels of given time count.
    """

    def __init__(self, cluster: Cluster | None = None):
        self.cluster = cluster
        self.label = f"modelled on {cluster.name or cluster.device.name}" if cluster else "modelled"
        self.busy = self.exposed = self.idle = self.communication = 0.0
        self._now = 0.0
        self._queues: dict[Link, Queue] = {}

    def now(self) -> float:
        return self._now

    def account(self) -> Account:
        """Where the time went so far."""
        return Account(self._now, self.busy, self.exposed, self.idle, self.communication)

    def kernel(self, seconds: float) -> None:
        self._now += seconds
        self.busy += seconds

    def kernels(self) -> AbstractContextManager:
        return nullcontext() if self.cluster is None else Kernels(self.cluster.device, self.kernel)

    @contextmanager
    def aside(self) -> Iterator[None]:
        spent = self._now, self.busy, self.exposed, self.idle
        yield
        self._now, self.busy, self.exposed, self.idle = spent

    def queue(self, link: Link) -> Queue:
        """The queue of a class of links."""
        return self._queues.setdefault(link, Queue())

    def wait(self, ready: float, end: float) -> None:
        """The stream waits for a transfer to ``end``; ``ready`` is when all of its ranks had come to it."""
        if end <= self._now:
            return
        moving = max(self._now, min(ready, end))
        self.idle += moving - self._now
        self.exposed += end - moving
        self._now = end
