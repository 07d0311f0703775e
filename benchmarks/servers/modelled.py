"""When data-parallel workers and their servers do what, on a modelled cluster.

Every worker is a node, and every server that only serves; the cluster's link between nodes joins
them all. Computing, the servers' work and what travels take time, everything else none; a gradient
that is too old takes as long as others. So nothing depends on the values of gradients, and a trace
can be followed with real ones (learner.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from benchmarks.servers.network import Clock, Network
from megatron_merak.cluster import Cluster, Link, all_reduce
from megatron_merak.parameter_server.roles import Role
from megatron_merak.parameter_server.round import AHEAD
from megatron_merak.plan import DTYPE_BYTES
from megatron_merak.planner.cost import optimizer_bytes

STRATEGIES = ("allreduce", "ps-sync", "ps-async")
BACKWARD = 2 / 3  # of computing: gradients come evenly meanwhile
BUCKET = 40_000_000  # gradient elements that are all-reduced at a time


@dataclass(frozen=True)
class Setup:
    """workers: nodes that compute. servers: nodes that only serve; 0: every worker's node serves as
    well. cluster: its device and its link between nodes count. elements: of the model. compute:
    seconds of a worker's forwards and backwards for a step. slow: that of each worker is so many
    times as long. dtype: of the weights. server_bandwidth: bytes per second of a server's memory,
    as far as the one core that it computes with reaches.
    """

    workers: int
    servers: int
    cluster: Cluster
    elements: int
    compute: float
    slow: tuple[float, ...] = ()
    dtype: str = "bfloat16"
    server_bandwidth: float = 10e9

    @property
    def role(self) -> Role:
        return Role(0, self.workers + self.servers, 1, self.servers)

    @property
    def link(self) -> Link:
        return self.cluster.between

    def computing(self, worker: int) -> float:
        return self.compute * (self.slow[worker] if self.slow else 1.0)

    @property
    def pushed(self) -> float:
        """Bytes of a gradient's piece: fp32."""
        return 4 * self.elements / len(self.role.endpoints)

    @property
    def pulled(self) -> float:
        """Bytes of a piece of the weights."""
        return DTYPE_BYTES[self.dtype] * self.elements / len(self.role.endpoints)

    def working(self, bytes_of_an_element: float) -> float:
        """Seconds in which a server moves so many bytes for every element of its piece."""
        return (
            bytes_of_an_element * self.elements / len(self.role.endpoints) / self.server_bandwidth
        )

    @property
    def updating(self) -> float:
        """Seconds of AdamW on a piece, whose gradient's norm is known."""
        return self.working(optimizer_bytes(self.dtype) - 4)


@dataclass(frozen=True)
class Event:
    """What a server applied. worker: whose gradient; -1: the sum of all workers'. part: of a batch,
    which that gradient is of; of a sum, the number of the step."""

    seconds: float
    worker: int
    server: int
    part: int


@dataclass
class Trace:
    """events: in the order of time. finished: of each worker, when it had the weights after each of
    its steps. sent,
    received: bytes of each node in a step of all workers, on average."""

    setup: Setup
    strategy: str
    events: list[Event] = field(default_factory=list)
    finished: list[list[float]] = field(default_factory=list)
    sent: dict[int, float] = field(default_factory=dict)
    received: dict[int, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return max(times[-1] for times in self.finished if times)

    @property
    def step(self) -> float:
        """Seconds in which as many gradients were applied as there are workers, in the second half
        of the run.
        """
        times = sorted(time for times in self.finished for time in times)
        half = len(times) // 2
        return (times[-1] - times[half - 1]) / (len(times) - half) * self.setup.workers

    def rate(self, worker: int) -> float:
        """Steps of a worker per second."""
        return len(self.finished[worker]) / self.finished[worker][-1]


def follow(setup: Setup, strategy: str, steps: int) -> Trace:
    """Trace ``steps`` steps of all workers: with ps-async ``steps`` times as many as there are
    workers, whoever takes them."""
    trace = Trace(setup, strategy, finished=[[] for _ in range(setup.workers)])
    if strategy == "allreduce":
        _all_reduce(setup, steps, trace)
        return trace
    clock = Clock()
    network = Network(clock, setup.link)
    (_Together if strategy == "ps-sync" else _Alone)(setup, clock, network, trace, steps).start()
    clock.run()
    trace.sent = {node: size / steps for node, size in sorted(network.sent.items())}
    trace.received = {node: size / steps for node, size in sorted(network.received.items())}
    return trace


def _all_reduce(setup: Setup, steps: int, trace: Trace) -> None:
    """Buckets are reduced one at a time while the slowest worker's backward still runs."""
    slowest = max(map(setup.computing, range(setup.workers)))
    buckets = max(1, setup.elements // BUCKET)
    now = free = -BACKWARD * slowest
    for _ in range(buckets):
        now += BACKWARD * slowest / buckets
        free = max(free, now) + all_reduce(setup.workers, 4 * setup.elements / buckets, setup.link)
    device = setup.cluster.device
    update = device.compute_time(0, optimizer_bytes(setup.dtype), setup.dtype) * setup.elements
    step = slowest + (max(0.0, free) if setup.workers > 1 else 0.0) + update
    trace.events = [Event(step * (number + 1), -1, 0, number) for number in range(steps)]
    for times in trace.finished:
        times.extend(step * (number + 1) for number in range(steps))
    moved = 2 * (setup.workers - 1) / setup.workers * 4 * setup.elements
    trace.sent = trace.received = dict.fromkeys(range(setup.workers), moved)


class _Core:
    """What a server computes with: one thing after the other."""

    def __init__(self, clock: Clock):
        self.clock, self.free = clock, 0.0

    def work(self, seconds: float, done: Callable[[], object]) -> None:
        self.free = max(self.free, self.clock.now) + seconds
        self.clock.after(self.free - self.clock.now, done)


@dataclass
class _Job:
    """Workers and servers on a clock; ``steps`` of all workers."""

    setup: Setup
    clock: Clock
    network: Network
    trace: Trace
    steps: int

    def __post_init__(self):
        self.endpoints = self.setup.role.endpoints
        self.cores = [_Core(self.clock) for _ in self.endpoints]
        self.missing = [0] * self.setup.workers  # servers that have not answered, of each worker

    def start(self) -> None:
        for worker in range(self.setup.workers):
            self.compute(worker)

    def compute(self, worker: int) -> None:
        raise NotImplementedError

    def answer(self, worker: int, server: int) -> None:
        """Send weights; a worker goes on when it has those of all servers."""
        self.network.send(
            self.endpoints[server], worker, self.setup.pulled, lambda: self._take(worker)
        )

    def _take(self, worker: int) -> None:
        self.missing[worker] -= 1
        if not self.missing[worker]:
            self.trace.finished[worker].append(self.clock.now)
            self.compute(worker)


class _Alone(_Job):
    """ps-async: a server applies a gradient when it has come, and answers with the weights of that
    moment.
    """

    def __post_init__(self):
        super().__post_init__()
        self.part, self.claimed = [0] * self.setup.workers, 0

    def compute(self, worker: int) -> None:
        if self.claimed < self.steps * self.setup.workers:
            self.part[worker], self.claimed = self.claimed, self.claimed + 1
            self.clock.after(self.setup.computing(worker), lambda: self._push(worker))

    def _push(self, worker: int) -> None:
        self.missing[worker] = len(self.endpoints)
        for server, node in enumerate(self.endpoints):
            self.network.send(
                worker, node, self.setup.pushed, lambda s=server: self._arrive(worker, s)
            )

    def _arrive(self, worker: int, server: int) -> None:
        # of the weights that are sent
        copying = self.setup.working(2 * DTYPE_BYTES[self.setup.dtype])

        def applied() -> None:
            self.trace.events.append(Event(self.clock.now, worker, server, self.part[worker]))
            self.answer(worker, server)

        self.cores[server].work(self.setup.updating + copying, applied)


class _Together(_Job):
    """ps-sync: a server lets some gradients come in at a time, and adds them in the order of the
    workers. When all servers have said so, the first worker that knows lets them apply the sums,
    and all receive weights."""

    def __post_init__(self):
        super().__post_init__()
        self.taken = [0] * self.setup.workers
        self._begin()

    def _begin(self) -> None:
        servers = range(len(self.endpoints))
        self.next = [0 for _ in servers]  # the worker whose gradient each server adds next
        self.asking: list[set[int]] = [set() for _ in servers]  # workers that may not send yet
        self.arrived: list[set[int]] = [set() for _ in servers]
        self.incoming, self.adding = [0 for _ in servers], [False for _ in servers]
        self.summed = self.applied = 0

    def compute(self, worker: int) -> None:
        if self.taken[worker] < self.steps:
            self.taken[worker] += 1
            self.clock.after(self.setup.computing(worker), lambda: self._contribute(worker))

    def _contribute(self, worker: int) -> None:
        self.missing[worker] = len(self.endpoints)
        for server, node in enumerate(self.endpoints):
            asked = 0.0 if node == worker else 2 * self.setup.link.latency
            self.clock.after(asked, lambda s=server: self._ask(s, worker))

    def _ask(self, server: int, worker: int) -> None:
        self.asking[server].add(worker)
        self._admit(server)

    def _admit(self, server: int) -> None:
        for worker in sorted(self.asking[server]):
            if self.incoming[server] < AHEAD or worker == self.next[server]:
                self.asking[server].remove(worker)
                self.incoming[server] += 1
                arrived = partial(self._arrive, server, worker)
                self.network.send(worker, self.endpoints[server], self.setup.pushed, arrived)

    def _arrive(self, server: int, worker: int) -> None:
        self.arrived[server].add(worker)
        self._add(server)

    def _add(self, server: int) -> None:
        if self.adding[server] or self.next[server] not in self.arrived[server]:
            return
        self.adding[server] = True
        moved = 12 if self.next[server] else 8  # bytes per element: the first one is copied

        def added() -> None:
            self.adding[server] = False
            self.incoming[server] -= 1
            self.next[server] += 1
            self._admit(server)
            self._add(server)
            if self.next[server] == self.setup.workers:
                self.cores[server].work(self.setup.working(4), self._sum)

        self.cores[server].work(self.setup.working(moved), added)

    def _sum(self) -> None:
        self.summed += 1
        if self.summed == len(self.endpoints):
            # the norm goes out, and the word to apply comes
            self.clock.after(2 * self.setup.link.latency, self._apply)

    def _apply(self) -> None:
        for server in range(len(self.endpoints)):
            self.cores[server].work(self.setup.updating, lambda s=server: self._applied(s))

    def _applied(self, server: int) -> None:
        self.trace.events.append(Event(self.clock.now, -1, server, self.taken[0] - 1))
        self.applied += 1
        if self.applied == len(self.endpoints):
            self._begin()
        for worker in range(self.setup.workers):
            self.answer(worker, server)
