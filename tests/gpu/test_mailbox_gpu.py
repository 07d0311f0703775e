"""Messages by the copy engine on one GPU: virtual ranks, each with streams of its own, in one
process.
"""

import pytest
import torch

from megatron_merak.parallel.mailbox import Ends, Machine, Shape, places
from megatron_merak.parallel.peer_kernels import load_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or load_kernels() is None, reason="no GPU, or no CUDA kernels"
    ),
]

SHAPE = Shape(slots=3, size=1 << 16)
CHANNELS = [(0, 1, "F"), (1, 0, "B")]


@pytest.mark.parametrize("rounds", [1, 40])
def test_messages_both_ways(rounds, patience):
    """Sizes of no slot to more than there are; the host runs ahead and waits for nothing."""
    device = torch.device("cuda", torch.cuda.current_device())
    buffers = [
        torch.zeros(places(CHANNELS, rank, SHAPE)[1], dtype=torch.uint8, device=device)
        for rank in range(2)
    ]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    ends = [
        Ends(CHANNELS, rank, buffers, Machine(load_kernels(), patience), SHAPE) for rank in range(2)
    ]
    generator = torch.Generator().manual_seed(0)
    wanted, found = [], []
    for turn in range(rounds):
        size = (0, 1, 1000, 1 << 14, (1 << 14) + 1, 1 << 17)[turn % 6]
        for channel in CHANNELS:
            source, destination, _ = channel
            wanted.append(torch.randn(size, generator=generator))
            with torch.cuda.stream(streams[source]):
                work = ends[source].send(channel, 2 * wanted[-1].to(device))
            with torch.cuda.stream(streams[destination]):
                target = torch.empty(size, device=device)
                ends[destination].receive(channel, target).wait()
                found.append(target + 1)
            with torch.cuda.stream(streams[source]):
                work.wait()
    torch.cuda.synchronize()
    assert all(torch.equal(a.cpu(), 2 * b + 1) for a, b in zip(found, wanted, strict=True))
