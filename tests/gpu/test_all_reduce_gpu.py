"""All-reduce over peer memory on one GPU: virtual ranks on streams of one process, and ranks that
share the device.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_merak.parallel.peer_kernels import load_kernels
from megatron_merak.parallel.peer_memory import PeerMemory, virtual_ranks
from megatron_merak.parallel.side_stream import SideStream
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or load_kernels() is None, reason="no GPU, or no CUDA kernels"
    ),
]

CAPACITY = 2 << 20  # two rounds of every thread
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def messages(world, count, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator).to(dtype) for _ in range(world)]


def summed(tensors):
    """In rank order, in fp32, rounded once."""
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total = total + tensor.float()
    return total.to(tensors[0].dtype)


class Ranks:
    """Virtual ranks, each with a stream. All their blocks must be on the GPU at once, or they would
    wait for ever.
    """

    def __init__(self, world, patience):
        self.world, device = world, torch.device("cuda", torch.cuda.current_device())
        room = torch.cuda.get_device_properties(device).multi_processor_count * 2048 // 512
        if 32 * world > room:
            pytest.skip(f"blocks of {world} ranks are not all resident on this GPU")
        self.ranks = virtual_ranks(world, device, CAPACITY, patience)
        self.streams = [torch.cuda.Stream() for _ in range(world)]

    def check(self, count, dtype, seed=0, offset=0):
        given = messages(self.world, count, dtype, seed)
        held = [
            torch.empty(count + offset, dtype=dtype, device="cuda")[offset:].copy_(t) for t in given
        ]
        torch.cuda.synchronize()
        for rank, stream, tensor in zip(self.ranks, self.streams, held, strict=True):
            assert rank.problem(tensor) == ""
            with torch.cuda.stream(stream):
                rank.all_reduce(tensor)
        torch.cuda.synchronize()
        expected = summed(given)
        assert all(torch.equal(t.cpu(), expected) for t in held), (count, dtype)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_any_size(world, dtype, patience):
    """From one element to all that fits: one shot, two shots, tails, addresses that packs cannot
    use.
    """
    ranks = Ranks(world, patience)
    most = CAPACITY // torch.empty(0, dtype=dtype).element_size()
    for seed, count in enumerate((1, 7, 8, 1000, 4099, 65536, most // 2 + 1, most)):
        ranks.check(count, dtype, seed)
    ranks.check(1001, dtype, offset=1)


@pytest.mark.parametrize("switching", [False, True])
def test_many_calls_in_a_row_without_a_wait_of_the_host(switching, patience):
    """Switching: every second call is on another stream, and has to wait for the one before."""
    ranks, others, rounds = Ranks(2, patience), [torch.cuda.Stream() for _ in range(2)], 200
    given = [messages(2, 3000, torch.float32, seed) for seed in range(rounds)]
    held = [[t.cuda() for t in one] for one in given]
    torch.cuda.synchronize()
    for number, rank in enumerate(ranks.ranks):
        for turn, one in enumerate(held):
            stream = others[number] if switching and turn % 2 else ranks.streams[number]
            with torch.cuda.stream(stream):
                rank.all_reduce(one[number])
    torch.cuda.synchronize()
    for one, truth in zip(held, given, strict=True):
        assert all(torch.equal(t.cpu(), summed(truth)) for t in one)


def test_a_captured_call_can_be_replayed(patience):
    ranks = Ranks(2, patience)
    given = messages(2, 5000, torch.float32)
    held, graphs = [t.cuda() for t in given], [torch.cuda.CUDAGraph() for _ in range(2)]
    torch.cuda.synchronize()
    for graph, rank, stream, tensor in zip(graphs, ranks.ranks, ranks.streams, held, strict=True):
        with torch.cuda.graph(graph, stream=stream):
            rank.all_reduce(tensor)
    for _ in range(3):
        for graph, stream in zip(graphs, ranks.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    # the sum, and twice its double
    assert all(torch.equal(t.cpu(), summed(given) * 4) for t in held)


def test_sums_on_a_side_stream_wait_for_their_products(patience):
    """Each virtual rank launches all of its work, and sums on a side stream, before any result is
    looked at.
    """
    ranks = Ranks(2, patience)
    generator = torch.Generator("cuda").manual_seed(0)
    x = [torch.randn(700, 64, generator=generator, device="cuda") for _ in range(2)]
    weight = [torch.randn(96, 64, generator=generator, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for rank, stream, rows, own in zip(ranks.ranks, ranks.streams, x, weight, strict=True):
        with torch.cuda.stream(stream):
            start, halves = SideStream(rank.all_reduce), [part @ own.t() for part in rows.chunk(2)]
            works = [start(half) for half in halves]
            for work in works:
                work.wait()
            found.append(torch.cat(halves))
    torch.cuda.synchronize()
    exact = sum(rows.double() @ own.double().t() for rows, own in zip(x, weight, strict=True))
    assert torch.equal(found[0], found[1])
    # products may be in TF32
    torch.testing.assert_close(found[0].double(), exact, rtol=1e-2, atol=0.3)


def _shared_device(rank, world_size, patience):
    """Two processes on one GPU: NCCL refuses that, so the group is gloo, and peer memory is what is
    tested.
    """
    torch.cuda.set_device(0)
    peers = PeerMemory(dist.group.WORLD, torch.device("cuda", 0), CAPACITY, patience)
    assert peers.reason == "", peers.reason
    for seed, count in enumerate((1, 1000, 100_003, 1 << 18)):
        given = messages(world_size, count, torch.float32, seed)
        tensor = given[rank].cuda()
        peers.all_reduce(tensor)
        assert torch.equal(tensor.cpu(), summed(given)), count
    torch.cuda.synchronize()
    dist.barrier()
    return True


def test_processes_exchange_handles(patience):
    assert all(run_ranks(_shared_device, 2, patience))
