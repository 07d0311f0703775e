"""A process-group backend "emu": gloo moves the data, and a logical clock models how long that
takes on a cluster.

The rules, a conservative discrete-event simulation:

- A collective starts when the last of its ranks has launched it and those launched before it on
  links of the same class
  are done; it lasts what ``cluster`` says. Waiting for it works like on a stream: the clock
  advances to its end.
- A message starts when it is sent, its receive is posted, and messages from the same rank to the
  same rank that were
  ready before it are done; it occupies the wire for bytes / bandwidth and arrives the latency
  later. Sending takes no time of the sender. This is the rule of ``pipeline_parallel.simulate``.
- The wall clock is never read. Time stamps accompany the data, so that equal runs have equal times.

Every receive names its source. Ranks launch the collectives of a link class in consistent orders,
as on one stream.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import _disable_current_modes

from .. import cluster as costs
from ..cluster import Link
from .clock import LogicalClock, Queue
from .work import FinishedByWaiting

_STAMP_TAG = 1 << 30  # of time stamps, above the tags of messages
_STAMPS_KEPT = 4096  # of messages that may be in flight; those before them were read long ago


def register(clock: LogicalClock) -> None:
    """Make ``dist.init_process_group("emu")`` and ``new_group(backend="emu")`` work for groups
    created from now on.

    clock: this rank's, of a cluster; global rank r is on node r // ranks_per_node.
    """

    def create(options, _) -> EmulatedGroup:
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        gloo = dist.ProcessGroupGloo(
            dist.PrefixStore("emu", options.store),
            options.group_rank,
            options.group_size,
            options.timeout,
        )
        return EmulatedGroup(Unseen(gloo), ranks, clock, options.group_id)

    dist.Backend.register_backend("emu", create, extended_api=True, devices=["cpu"])


class Unseen:
    """gloo, hidden from dispatch modes.

    gloo's threads work under the modes of the thread that started them, and their copies, at
    unknown times, are no kernels of the model.
    """

    def __init__(self, gloo: dist.ProcessGroupGloo):
        self._gloo = gloo

    def __getattr__(self, name: str) -> Callable:
        def unseen(*args):
            with _disable_current_modes():
                return getattr(self._gloo, name)(*args)

        return unseen


class Stamp:
    """Numbers sent beside the data. No operation is dispatched to write or read them, so that none
    is timed.
    """

    def __init__(self, *values: float):
        self._values = array("d", values)
        self.tensor = torch.frombuffer(self._values, dtype=torch.float64)

    def __getitem__(self, place: int) -> float:
        return self._values[place]


class EmulatedWork(FinishedByWaiting):
    """Data in flight, and when it arrives. Waiting a second time does nothing."""

    def __init__(self, data: Work, clock: LogicalClock, result: Any):
        super().__init__(result)
        self.data = data
        self.clock = clock
        self.ready: float | None = None
        self.end: float | None = None

    def find_end(self) -> None:
        """Set ``ready`` and ``end``."""
        raise NotImplementedError

    def wait(self, timeout=None) -> bool:
        if self.end is None:
            self.find_end()
        assert self.ready is not None and self.end is not None
        self.clock.wait(self.ready, self.end)
        return True

    def is_completed(self) -> bool:
        return self.end is not None

    def is_success(self) -> bool:
        return True


class EmulatedCollective(EmulatedWork):
    """A collective of ``cost`` seconds; ``stamp`` becomes the time at which the last rank launched
    it.
    """

    def __init__(
        self,
        data: Work,
        stamp: Stamp,
        stamping: Work,
        cost: float,
        queue: Queue,
        clock,
        result: Any,
    ):
        super().__init__(data, clock, result)
        self.stamp = stamp
        self.stamping = stamping
        self.cost = cost
        self.queue = queue
        queue.waiting.append(self)

    def find_end(self) -> None:
        self.queue.resolve(self)

    def resolve(self, queue: Queue) -> None:
        with _disable_current_modes():  # some of gloo's collectives copy their result here
            self.data.wait()
        self.stamping.wait()
        ready = self.stamp[0]
        self.ready = ready
        self.end = queue.free = max(ready, queue.free) + self.cost
        self.clock.communication += self.cost


class EmulatedWire:
    """The receiving end of the messages from one rank: one at a time, in the order in which they
    become ready.
    """

    def __init__(self, gloo, source: int, link: Link, clock: LogicalClock):
        self.gloo = gloo
        self.source = source
        self.link = link
        self.clock = clock
        self.free = 0.0
        self._posted: dict[int, deque[Receive]] = {}
        self._sent: list[Stamp] = []
        self._met: list[tuple[float, Receive]] = []  # with the time when each is ready

    def post(self, receive: "Receive") -> None:
        self._posted.setdefault(receive.tag, deque()).append(receive)

    def find_end(self, last: "Receive") -> None:
        """Read time stamps, which come in the order of the sends, up to that of ``last``; then time
        the messages that were ready before it.
        """
        self._meet()
        while last.ready is None:
            stamp = Stamp(0.0, 0.0)
            self.gloo.recv([stamp.tensor], self.source, _STAMP_TAG).wait()
            self._sent.append(stamp)
            self._meet()
        self._met.sort(key=lambda met: met[0])
        while last.end is None:
            ready, receive = self._met.pop(0)
            self.free = max(ready, self.free) + receive.nbytes / self.link.bandwidth
            receive.end = self.free + self.link.latency
            self.clock.communication += costs.send(receive.nbytes, self.link)

    def _meet(self) -> None:
        """Match sent messages with posted receives."""
        left = []
        for stamp in self._sent:
            posted = self._posted.get(int(stamp[1]))
            if posted:
                receive = posted.popleft()
                ready = max(stamp[0], receive.posted)
                receive.ready = ready
                self._met.append((ready, receive))
            else:
                left.append(stamp)
        self._sent = left


class Receive(EmulatedWork):
    """A posted receive of one message."""

    def __init__(self, data: Work, wire: EmulatedWire, tag: int, tensors: list[Tensor]):
        super().__init__(data, wire.clock, tensors)
        self.wire = wire
        self.tag = tag
        self.nbytes = _bytes(tensors)
        self.posted = wire.clock.now()
        self._arrived = False
        wire.post(self)

    def find_end(self) -> None:
        self.wire.find_end(self)

    def wait(self, timeout=None) -> bool:
        if not self._arrived:
            self.data.wait()
            self._arrived = True
        return super().wait()


class EmulatedSend(Work):
    """A sent message; its time is counted at the receiver."""

    def __init__(self, data: Work, tensors: list[Tensor]):
        super().__init__()
        self.data = data
        self.tensors = tensors
        self._gone = False

    def wait(self, timeout=None) -> bool:
        if not self._gone:
            self.data.wait()
            self._gone = True
        return True

    def is_completed(self) -> bool:
        return self._gone or self.data.is_completed()


class EmulatedGroup(dist.ProcessGroup):
    """The ranks of a group, gloo between them for the data, and the clock of this rank. Created by
    ``register``.
    """

    def __init__(self, gloo: Unseen, ranks: Sequence[int], clock: LogicalClock, name: str):
        super().__init__(gloo.rank(), gloo.size())  # type: ignore[call-arg]  # the stubs leave this constructor out
        self._name = name
        self.gloo: Any = gloo
        self.ranks = ranks
        self.clock = clock
        self.n = len(ranks)
        cluster = clock.cluster
        assert cluster is not None, "a clock that emulates has a cluster"
        self.cluster = cluster
        self.link = cluster.link(ranks)
        self.queue = clock.queue(cluster.between if cluster.crosses(ranks) else cluster.inside)
        self._wires: dict[int, EmulatedWire] = {}
        self._stamps: deque[tuple[Work, Stamp]] = deque()

    def getBackendName(self) -> str:
        return "emu"

    @property
    def group_name(self) -> str:  # type: ignore[override]  # a plain attribute in the stubs
        """The name of the group, which torch stores in backends but not in those written
        in Python.
        """
        return self._name

    def shutdown(self) -> None:
        """Release gloo, whose threads must end before the interpreter does."""
        self._wires.clear()
        self._stamps.clear()
        self.gloo = None

    def _launch(self, data: Work, cost: float, result: Any) -> EmulatedCollective:
        stamp = Stamp(self.clock.now())
        latest: Any = dist.AllreduceOptions()
        latest.reduceOp = dist.ReduceOp.MAX
        stamping = self.gloo.allreduce([stamp.tensor], latest)
        return EmulatedCollective(
            data, stamp, stamping, cost, queue=self.queue, clock=self.clock, result=result
        )

    def allreduce(self, tensors, opts=None):
        work = self.gloo.allreduce(tensors, opts or dist.AllreduceOptions())
        return self._launch(work, costs.all_reduce(self.n, _bytes(tensors), self.link), tensors)

    def broadcast(self, tensors, opts):
        work = self.gloo.broadcast(tensors, opts)
        return self._launch(work, costs.broadcast(self.n, _bytes(tensors), self.link), tensors)

    def reduce(self, tensors, opts):
        work = self.gloo.reduce(tensors, opts)
        return self._launch(work, costs.broadcast(self.n, _bytes(tensors), self.link), tensors)

    def allgather(self, outputs, inputs, opts=None):
        work = self.gloo.allgather(outputs, inputs)
        return self._launch(work, costs.all_gather(self.n, _bytes(inputs), self.link), outputs)

    def _allgather_base(self, output, input, opts=None):
        work = self.gloo._allgather_base(output, input)
        return self._launch(work, costs.all_gather(self.n, _bytes([input]), self.link), [output])

    def reduce_scatter(self, outputs, inputs, opts=None):
        work = self.gloo.reduce_scatter(outputs, inputs, opts or dist.ReduceScatterOptions())
        return self._launch(work, costs.reduce_scatter(self.n, _bytes(outputs), self.link), outputs)

    def _reduce_scatter_base(self, output, input, opts=None):
        work = self.gloo._reduce_scatter_base(output, input, opts or dist.ReduceScatterOptions())
        return self._launch(
            work, costs.reduce_scatter(self.n, _bytes([output]), self.link), [output]
        )

    def alltoall_base(self, output, input, output_splits, input_splits, opts=None):
        work = self.gloo.alltoall_base(output, input, output_splits, input_splits)
        size = _bytes([input])
        others = [count for rank, count in enumerate(input_splits or ()) if rank != self.rank()]
        if others.count(0) == self.n - 2 and sum(others) == len(input):
            cost = costs.all_gather(2, size, self.link)  # a message to one rank
        else:
            cost = costs.reduce_scatter(self.n, size / self.n, self.link)
        return self._launch(work, cost, [output])

    # torch 2.13 calls these names, older releases the three above.
    def all_gather_single(self, output, input, opts=None, **_):
        return self._allgather_base(output, input)

    def reduce_scatter_single(self, output, input, opts=None, **_):
        return self._reduce_scatter_base(output, input, opts)

    def all_to_all_single(self, output, input, output_splits, input_splits, opts=None, **_):
        return self.alltoall_base(output, input, output_splits, input_splits, opts)

    def gather(self, outputs, inputs, opts):
        work = self.gloo.gather(outputs, inputs, opts)
        return self._launch(work, costs.all_gather(self.n, _bytes(inputs), self.link), outputs)

    def scatter(self, outputs, inputs, opts):
        work = self.gloo.scatter(outputs, inputs, opts)
        return self._launch(work, costs.all_gather(self.n, _bytes(outputs), self.link), outputs)

    def barrier(self, opts=None):
        """Costs an empty message to the others and back."""
        return self._launch(self.gloo.barrier(), costs.all_reduce(self.n, 0, self.link), [])

    def send(self, tensors, destination: int, tag: int = 0):
        # gloo never says of a send that it is over, so it is waited for
        if len(self._stamps) == _STAMPS_KEPT:
            self._stamps.popleft()[0].wait()
        stamp = Stamp(self.clock.now(), tag)
        assert tag < _STAMP_TAG, tag
        stamping = self.gloo.send([stamp.tensor], destination, _STAMP_TAG)
        self._stamps.append((stamping, stamp))
        return EmulatedSend(self.gloo.send(tensors, destination, tag), tensors)

    def recv(self, tensors, source: int, tag: int = 0):
        if source not in self._wires:
            link = self.cluster.link([self.ranks[source], self.ranks[self.rank()]])
            self._wires[source] = EmulatedWire(self.gloo, source, link, self.clock)
        return Receive(self.gloo.recv(tensors, source, tag), self._wires[source], tag, tensors)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
