"""Peer memory where there is none: the group's own all-reduce serves every call, and the reason is
said once.
"""

import logging

import torch
import torch.distributed as dist

from megatron_merak.parallel import peer_buffers, peer_group, peer_memory
from megatron_merak.parallel.peer_memory import PeerMemory
from tests.ranks import run_ranks

from .collectives import each_collective, whole


def _on_cpu(rank, world_size):
    records, handler = [], logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    peer_memory.logger.addHandler(handler)
    peer_memory.logger.setLevel(logging.INFO)
    peers = PeerMemory(dist.group.WORLD, torch.device("cpu"))
    for _ in range(2):
        tensor = torch.arange(5.0) + rank
        peers.all_reduce(tensor)
        assert torch.equal(
            tensor, world_size * torch.arange(5.0) + world_size * (world_size - 1) / 2
        )
    return peers.reason, records


def test_a_cpu_falls_back_and_says_why_once():
    for reason, records in run_ranks(_on_cpu, 2):
        assert reason == "the device is cpu"
        assert records == [f"all-reduce by the process group, not by peer memory: {reason}"]


class _OneCannot(PeerMemory):
    def _own_problem(self):
        return f"rank {dist.get_rank()} is out" if dist.get_rank() < 2 else ""


def _as_a_group(rank, world_size):
    """No rank can share memory: each sum, and all else, is done by what stands behind the group."""
    peer_group.register(torch.device("cpu"), staged=True)
    group = dist.new_group(backend=peer_group.NAME)
    assert type(group) is peer_group.StagedPeerGroup and dist.get_backend(group) == peer_group.NAME
    given, wrong = whole(1, world_size, 9 * world_size, torch.float32), []
    for later in (False, True):
        for name, work, found, wanted in each_collective(rank, world_size, given, 9, group, later):
            if later:
                work.wait()
            if not all(map(torch.equal, found, wanted)):
                wrong.append((name, later))
    return group.sums._memory.reason, wrong


def test_a_group_is_served_by_what_stands_behind_it():
    assert run_ranks(_as_a_group, 2) == [("the device is cpu", [])] * 2


def _reason(rank, world_size):
    return _OneCannot(dist.group.WORLD, torch.device("cpu")).reason


def test_all_ranks_decide_alike():
    """Else they would wait for each other in different places."""
    assert run_ranks(_reason, 3) == ["rank 0 is out"] * 3


def test_handles_travel_as_text():
    handle = (0, b"\x00\xff handle", 4096, 128, b"", 0, b"\x01", True)
    assert tuple(peer_buffers._decoded(peer_buffers._encoded(part)) for part in handle) == handle


def test_handles_of_peers_are_opened_on_the_own_device(monkeypatch):
    """Kernels of this rank's device use the memory; opened on the peer's, it would be mapped for
    the peer's kernels.
    """
    opened = []

    def share(storage):
        return 1, b"handle of rank 1", storage.nbytes(), 0, b"", 0, b"", True

    def open_handle(device, *handle):
        opened.append((device, handle[0]))
        return torch.UntypedStorage(handle[1])

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_handle)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(peer_buffers.dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(peer_buffers, "_uuid", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(
        peer_buffers, "_local_devices", lambda: {f"GPU {index}": index for index in range(4)}
    )
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device, **more: zeros(*shape, **more))
    buffers = object.__new__(peer_buffers.PeerBuffers)
    buffers._group, buffers._device = None, torch.device("cuda", 1)
    # Each rank tells its own device, if it tells one.
    buffers._gather = lambda value: [
        value | {"uuid": f"GPU {r}"} if isinstance(value, dict) else value for r in range(3)
    ]
    tensors = buffers._connect(64)
    assert (
        opened == [(1, b"handle of rank 1")] * 2 and [len(tensor) for tensor in tensors] == [64] * 3
    )
