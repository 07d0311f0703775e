"""Messages through mailboxes on a device of our own, which runs streams in any order that streams
and events allow.
"""

import ctypes
from collections import deque
from contextlib import contextmanager
from random import Random

import pytest
import torch
import torch.distributed as dist

from megatron_merak.parallel import peer_group
from megatron_merak.parallel.mailbox import Ends, Machine, Shape, places
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.parallel.p2p import Pipes
from megatron_merak.parallel.peer_kernels import PATIENCE, PeerKernels
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.pipeline_parallel.passes import add_communication
from megatron_merak.plan import Grid
from tests.ranks import run_ranks


class Device:
    """Streams are queues of steps. A step that returns False could not be done yet."""

    def __init__(self):
        self.streams = []

    def run(self, random):
        """Some streams are much slower than others."""
        haste = {stream: 10 ** random.uniform(0, 4) for stream in self.streams}
        while busy := [stream for stream in self.streams if stream.steps]:
            busy.sort(key=lambda stream: random.expovariate(haste[stream]))
            moved = next((stream for stream in busy if stream.steps[0]() is not False), None)
            assert moved, "every stream waits for another"
            moved.steps.popleft()


class Stream:
    def __init__(self, device):
        self.steps = deque()
        device.streams.append(self)
        self.cuda_stream = self  # what kernels are launched on

    def wait_event(self, event):
        recorded = event.records
        self.steps.append(lambda: event.reached >= recorded)


class Event:
    def __init__(self):
        self.records, self.reached = 0, 0

    def record(self, stream):
        self.records += 1
        stream.steps.append(self.reach)

    def reach(self):
        self.reached += 1

    def query(self):
        return self.reached == self.records


class Rank:
    """What torch.cuda is to one process on the device."""

    Event = Event

    def __init__(self, device):
        self.device, self.current = device, Stream(device)

    def Stream(self):
        return Stream(self.device)

    def current_stream(self):
        return self.current

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def write(self, to, tensor):
        self.current.steps.append(lambda: to.copy_(tensor) is not None)


class Message(torch.Tensor):
    def record_stream(self, stream):
        pass


def counter(pointer):
    return ctypes.c_uint32.from_address(pointer)


def await_counter(pointer, value, patience, stream):
    stream.steps.append(lambda: counter(pointer).value >= value)
    return 0


def raise_counter(pointer, value, stream):
    def step():
        assert counter(pointer).value == value - 1
        counter(pointer).value = value

    stream.steps.append(step)
    return 0


KERNELS = PeerKernels(None, None, await_counter, raise_counter)
SHAPE = Shape(slots=3, size=16)


def ends(channels, world, device):
    buffers = [
        torch.zeros(places(channels, rank, SHAPE)[1], dtype=torch.uint8) for rank in range(world)
    ]
    ranks = [Rank(device) for _ in range(world)]
    machines = [Machine(KERNELS, PATIENCE, rank, rank.write) for rank in ranks]
    return ranks, [Ends(channels, rank, buffers, machines[rank], SHAPE) for rank in range(world)]


def message(number, size, dtype=torch.float32):
    return torch.arange(number * 100, number * 100 + size).to(dtype).as_subclass(Message)


@pytest.mark.parametrize("seed", range(20))
def test_messages_of_any_size_arrive_in_order(seed):
    """Both ways between two ranks and on to a third; messages of no slot, of one, and of more than
    there are.
    """
    random, device = Random(seed), Device()
    channels = [(0, 1, "F"), (1, 0, "B"), (1, 2, "F"), (2, 1, "B")]
    ranks, own = ends(channels, 3, device)
    sizes = [random.choice((0, 1, 4, 5, 12, 13, 40)) for _ in range(12)]
    expected, found, works = {}, {}, []
    for number, size in enumerate(sizes):
        for source, destination, kind in channels:
            expected[source, kind, number] = message(number + 1000 * source, size)
            held = torch.zeros_like(expected[source, kind, number])
            ranks[source].write(held, expected[source, kind, number])
            sent = own[source].send((source, destination, kind), held)
            with ranks[source].stream(ranks[source].Stream()):
                sent.wait()
                ranks[source].write(held, torch.zeros_like(held))  # once it is sent, it may change
    for (source, kind, number), whole in expected.items():
        destination = {channel[0::2]: channel[1] for channel in channels}[source, kind]
        target = found[source, kind, number] = torch.zeros_like(whole)
        with ranks[destination].stream(ranks[destination].Stream()):
            # its memory is in use when it is announced
            ranks[destination].write(target, torch.zeros_like(target))
            works.append(
                (destination, own[destination].receive((source, destination, kind), target))
            )
    assert not any(work.is_completed() for _, work in works)
    random.shuffle(works)  # whoever waits for a later one takes the earlier ones too
    seen = [torch.zeros_like(work.result()[0]) for _, work in works]
    for (destination, work), there in zip(works, seen, strict=True):
        with ranks[destination].stream(
            random.choice((ranks[destination].current, ranks[destination].Stream()))
        ):
            work.wait()
            ranks[destination].write(there, work.result()[0])
    device.run(random)
    assert all(
        torch.equal(there, work.result()[0]) for (_, work), there in zip(works, seen, strict=True)
    )
    assert all(torch.equal(found[key], whole) for key, whole in expected.items())
    assert all(work.is_completed() for _, work in works)


def test_a_sender_waits_for_a_free_slot():
    device = Device()
    ranks, own = ends([(0, 1, "F")], 2, device)
    held = [message(number, 4) for number in range(5)]
    for tensor in held:
        own[0].send((0, 1, "F"), tensor)
    with pytest.raises(AssertionError, match="every stream waits"):
        device.run(Random(0))
    target = torch.empty(4).as_subclass(Message)
    own[1].receive((0, 1, "F"), target).wait()
    with pytest.raises(AssertionError, match="every stream waits"):
        device.run(Random(0))
    assert torch.equal(target, held[0])
    for _ in held[1:]:
        target = torch.empty(4).as_subclass(Message)
        own[1].receive((0, 1, "F"), target).wait()
    device.run(Random(0))
    assert torch.equal(target, held[-1])


def _on_cpus(rank, world_size):
    """Two pipelines of two stages. Without peer memory each channel has a group, which keeps
    messages in order.
    """
    peer_group.register(torch.device("cpu"), staged=True)
    grid = Grid(dp=2, pp=2)
    mesh = build_mesh(grid, rank, torch.device("cpu"), collectives=peer_group.NAME)
    pipes = Pipes(mesh, add_communication(build_schedule("1f1b", 2, 4)))
    assert dist.get_backend(mesh.pp) == peer_group.NAME
    return pipes._mailboxes, sorted(pipes._groups) == pipes._channels()


def test_pipes_without_peer_memory_have_a_group_for_each_channel():
    assert run_ranks(_on_cpus, 4) == [(None, True)] * 4


def test_parts_of_a_buffer():
    """Each channel has its own part, on the ranks that it joins and nowhere else."""
    channels = [(0, 1, "F"), (1, 0, "B"), (1, 2, "F")]
    assert places(channels, 0, SHAPE) == ({(0, 1, "F"): 0, (1, 0, "B"): 128}, 128 + 128 + 48)
    assert places(channels, 2, SHAPE) == ({(1, 2, "F"): 0}, 128 + 48)
    assert places(channels, 3, SHAPE) == ({}, 0)


@pytest.mark.parametrize(
    ("message", "shape"),
    [
        (0, (8, 4 << 20)),
        (4 << 20, (8, 4 << 20)),
        ((4 << 20) + 2, (2, (4 << 20) + 128)),
        (32 << 20, (2, 32 << 20)),
        (1 << 30, (2, 256 << 20)),
    ],
)
def test_a_message_of_a_plan_fills_one_slot(message, shape):
    assert Shape.of(message) == shape
