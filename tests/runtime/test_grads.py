import random

import pytest
import torch
import torch.distributed as dist

from megatron_merak.parallel.buffers import BufferEntry, ParameterBuffer
from megatron_merak.parallel.clock import LogicalClock, WallClock
from megatron_merak.parallel.relay import Relay
from megatron_merak.runtime.grads import GradientReducer
from tests.ranks import run_ranks

NAMES = tuple(f"layer.{i}.{kind}" for i in range(4) for kind in ("weight", "bias"))


def make_buffer(bucket_elements=256):
    groups = [
        [BufferEntry(f"layer.{i}.weight", (9, 11), 0), BufferEntry(f"layer.{i}.bias", (11,), 1)]
        for i in range(4)
    ]
    return ParameterBuffer(groups, torch.float32, "cpu", bucket_elements)


def value(name, rank, step):
    return 1000 * step + 10 * NAMES.index(name) + rank


def reduce_steps(rank, world_size, overlap):
    """Three steps; every rank reports its parameters in another order; every gradient is an
    integer.
    """
    buffer = make_buffer()
    reducer = GradientReducer(buffer, dist.group.WORLD, overlap)
    for step in range(3):
        buffer.main_grad.zero_()
        reducer.start()
        order = list(NAMES)
        random.Random(10 * step + rank).shuffle(order)
        for name in order:
            assert not reducer.launched or overlap
            buffer.grad(name).fill_(value(name, rank, step))
            reducer.ready(name)
        assert reducer.missing == ()
        assert reducer.launched == (len(buffer.buckets) if overlap else 0)
        reducer.finish()
        for name in NAMES:
            total = sum(value(name, other, step) for other in range(world_size))
            assert torch.equal(buffer.grad(name), torch.full_like(buffer.grad(name), total)), (
                step,
                name,
            )
    return len(buffer.buckets)


@pytest.mark.parametrize(("world_size", "overlap"), [(2, True), (4, True), (2, False)])
def test_sums_integers_whatever_the_order(world_size, overlap):
    assert run_ranks(reduce_steps, world_size, overlap) == [3] * world_size


def reduce_in_halves(rank, world_size):
    """Two groups of two ranks reduce apart; a parameter that no rank reports is summed all the
    same.
    """
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    buffer = make_buffer()
    reducer = GradientReducer(buffer, groups[rank // 2])
    buffer.main_grad.fill_(rank)
    for name in NAMES[1:]:
        reducer.ready(name)
    launched, missing = reducer.launched, reducer.missing
    reducer.finish()
    return launched, missing, buffer.main_grad.unique().tolist()


def test_groups_reduce_apart_and_finish_launches_the_rest():
    results = run_ranks(reduce_in_halves, 4)
    assert [result[2] for result in results] == [[1.0], [1.0], [5.0], [5.0]]
    assert {result[:2] for result in results} == {(2, ("layer.0.weight",))}


def test_buckets_launch_in_order_as_soon_as_they_are_whole():
    buffer = make_buffer(bucket_elements=192)
    assert [set(bucket.names) for bucket in buffer.buckets] == [
        set(NAMES[i : i + 2]) for i in (6, 4, 2, 0)
    ]
    reducer = GradientReducer(buffer, None)
    for name, launched in zip(reversed(NAMES), (0, 1, 1, 2, 2, 3, 3, 4), strict=True):
        reducer.ready(name)
        assert reducer.launched == launched
    reducer.finish()
    reducer.start()
    for name in NAMES[:6]:
        reducer.ready(name)
        assert reducer.launched == 0  # bucket 0 holds the others back
    reducer.ready(NAMES[6])
    reducer.ready(NAMES[7])
    assert reducer.launched == 4


def test_without_a_group_nothing_changes():
    buffer = make_buffer()
    buffer.main_grad.copy_(torch.arange(buffer.size))
    reducer = GradientReducer(buffer, None)
    for name in NAMES:
        reducer.ready(name)
    reducer.finish()
    assert torch.equal(buffer.main_grad, torch.arange(buffer.size, dtype=torch.float32))


def test_misuse_is_caught():
    reducer = GradientReducer(make_buffer(), None)
    with pytest.raises(AssertionError, match="no parameter layer.9.bias"):
        reducer.ready("layer.9.bias")
    reducer.ready("layer.3.bias")
    with pytest.raises(AssertionError, match="layer.3.bias is ready twice"):
        reducer.ready("layer.3.bias")
    reducer.finish()
    with pytest.raises(AssertionError, match="layer.3.weight is ready after finish"):
        reducer.ready("layer.3.weight")
    with pytest.raises(AssertionError, match="twice"):
        reducer.finish()
    reducer.start()
    reducer.ready("layer.3.bias")


def reduce_in_instances(rank, world_size, instances, modelled, overlap):
    """Two steps of integers; what this rank owns of them, and the buffers' elements that it was
    all-reduced over.
    """
    size = world_size // instances
    inside = [dist.new_group([*range(first, first + size)]) for first in range(0, world_size, size)]
    across = [dist.new_group([*range(place, world_size, size)]) for place in range(size)]
    entries = [[BufferEntry(name, (9, 11), 0)] for name in NAMES] + [
        [BufferEntry("apart", (5,), 0, fp32=True)]
    ]
    buffer = ParameterBuffer(entries, torch.bfloat16, "cpu", 256, size, rank % size)
    relay = Relay(torch.device("cpu"), LogicalClock() if modelled else WallClock())
    groups = (inside[rank // size], across[rank % size])
    reducer = GradientReducer(buffer, dist.group.WORLD, overlap, *groups, relay)
    for step in range(2):
        reducer.start()
        order = [*NAMES, "apart"]
        random.Random(10 * step + rank).shuffle(order)
        for name in order:
            buffer.grad(name).fill_(
                1000 * step + rank + (7 if name == "apart" else 10 * NAMES.index(name))
            )
            reducer.ready(name)
        reducer.finish()
        owned = 0
        for name in order:
            base = 1000 * step + (7 if name == "apart" else 10 * NAMES.index(name))
            for own in buffer.own_grad(name):
                assert own.eq(sum(base + other for other in range(world_size))).all(), (step, name)
                owned += own.numel()
    return owned


@pytest.mark.parametrize(("modelled", "overlap"), [(False, True), (True, True), (False, False)])
def test_shards_are_summed_in_an_instance_and_across(modelled, overlap):
    """Every element has one owner in each instance; what is on all ranks is summed over all of them
    at once.
    """
    owned = run_ranks(reduce_in_instances, 4, 2, modelled, overlap)
    assert sum(owned) == 2 * len(NAMES) * 99 + 4 * 5


class Late:
    """A collective that is through when it is waited for, by a clock."""

    def __init__(self, log, name, clock=None, end=0.0):
        self.log, self.name, self.clock, self.end = log, name, clock, end

    def wait(self):
        self.log.append(f"wait {self.name}")
        if self.clock is not None:
            self.clock.wait(self.end, self.end)


def follow(clock):
    log, relay = [], Relay(torch.device("cpu"), clock)
    for name, end in (("a", 3.0), ("b", 5.0)):

        def launch(name=name):
            log.append(
                f"launch {name}2 at {clock.now() if isinstance(clock, LogicalClock) else 0:.0f}"
            )
            return Late(log, f"{name}2")

        relay.follow(
            Late(log, name, clock if isinstance(clock, LogicalClock) else None, end), launch
        )
        log.append(f"on at {clock.now() if isinstance(clock, LogicalClock) else 0:.0f}")
    relay.finish()
    return log


def test_what_follows_waits_beside_the_computation_or_as_late_as_it_can():
    assert follow(LogicalClock()) == [
        "wait a",
        "launch a2 at 3",
        "on at 0",
        "wait b",
        "launch b2 at 5",
        "on at 0",
        "wait a2",
        "wait b2",
    ]
    assert follow(WallClock()) == [
        "on at 0",
        "wait a",
        "launch a2 at 0",
        "on at 0",
        "wait b",
        "launch b2 at 0",
        "wait a2",
        "wait b2",
    ]
