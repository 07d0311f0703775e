"""Sums of gradients that travel in bf16: what they are, to the bit, what is sent, and how far from
fp32 that is.
"""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from megatron_merak.parallel.buffers import BufferEntry, ParameterBuffer
from megatron_merak.runtime.grads import GradientReducer
from megatron_merak.runtime.wire import Wire
from tests.ranks import run_ranks

# elements of a bucket, which 2, 3 and 4 ranks divide; buckets of integers lack some
COUNT, BUCKETS = 12_000, 3
DTYPES = (torch.float32, torch.bfloat16)


def gradients(rank, bucket, exact):
    generator = torch.Generator().manual_seed(10 * bucket + rank)
    if exact:
        return torch.randint(-40, 41, (COUNT - bucket,), generator=generator).float()
    return torch.randn(COUNT, generator=generator)


def summed(rank, world_size, exact):
    """Of several buckets under way at a time: all-reduced, and this rank's shard where ranks divide
    it.
    """
    wire = Wire(dist.group.WORLD, True)
    given = [gradients(rank, bucket, exact) for bucket in range(BUCKETS)]
    works = [wire.all_reduce(values) for values in given]
    shards = []
    for bucket in range(BUCKETS):
        values = gradients(rank, 0, exact) + bucket
        own = values[rank * (COUNT // world_size) :][: COUNT // world_size]
        works.append(wire.reduce_scatter(own, values))
        shards.append(own)
    for work in works:
        work.wait()
        work.wait()
    return given, shards


@pytest.mark.parametrize("world_size", [2, 3])
def test_integers_are_summed_exactly(world_size):
    for rank, (whole, shards) in enumerate(run_ranks(summed, world_size, True)):
        for bucket, values in enumerate(whole):
            assert torch.equal(
                values, sum(gradients(other, bucket, True) for other in range(world_size))
            )
        for bucket, own in enumerate(shards):
            full = sum(gradients(other, 0, True) + bucket for other in range(world_size))
            assert torch.equal(own, full.chunk(world_size)[rank])


def rounded(world_size, bucket, shift=0):
    return torch.stack(
        [(gradients(rank, bucket, False) + shift).bfloat16() for rank in range(world_size)]
    )


# Relative error of the norm, of gradients that are independent on every rank: docs/data_parallel.md
# has these numbers.
MEASURED = {2: (0.00166, 0.00245), 4: (0.00166, 0.00237)}


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_gradient_is_rounded_once_and_the_whole_sum_once_more(world_size):
    for rank, (whole, shards) in enumerate(run_ranks(summed, world_size, False)):
        for bucket, values in enumerate(whole):
            sent = rounded(world_size, bucket)
            assert torch.equal(values, sent.sum(0, dtype=torch.float32).bfloat16().float())
            _check_error(values, world_size, bucket, 0, 1)
        for bucket, own in enumerate(shards):
            sent = rounded(world_size, 0, bucket)
            assert torch.equal(own, sent.sum(0, dtype=torch.float32).chunk(world_size)[rank])
        _check_error(shards[0], world_size, 0, rank, 0)


def _check_error(found, world_size, bucket, rank, again):
    """Element by element within 2^-8 of what was added up, and of the sum where it was rounded
    again; and the norm.
    """
    exact = torch.stack([gradients(other, bucket, False).double() for other in range(world_size)])
    if not again:
        exact = exact.chunk(world_size, 1)[rank]
    error, total = (found.double() - exact.sum(0)).abs(), exact.sum(0).abs()
    assert (error <= 2**-8 * (exact.abs().sum(0) + again * (total + error)) + 1e-30).all()
    assert error.norm() / total.norm() == pytest.approx(MEASURED[world_size][again], rel=0.03)


class Types(TorchDispatchMode):
    """The dtypes of tensors that collectives get."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors, _ = tree_flatten(args)
            self.found |= {tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor)}
        return func(*args, **kwargs or {})


def types_sent(rank, world_size):
    """Of a step whose buckets are reduced, by (in bf16, sharded)."""
    told = {}
    for in_bf16 in (False, True):
        for shards in (False, True):
            entries = [[BufferEntry(f"{unit}.weight", (64, 64), 0)] for unit in range(2)]
            buffer = ParameterBuffer(
                entries, torch.float32, "cpu", 4096, *((world_size, rank) if shards else (1, 0))
            )
            reducer = GradientReducer(buffer, dist.group.WORLD, True, in_bf16=in_bf16)
            with Types() as types:
                for name in reversed(buffer.slots):
                    reducer.ready(name)
                reducer.finish()
            told[in_bf16, shards] = types.found
    return told


def test_nothing_but_bf16_is_sent():
    for told in run_ranks(types_sent, 2):
        assert told == {
            (half, shards): {DTYPES[half]} for half in (False, True) for shards in (False, True)
        }
