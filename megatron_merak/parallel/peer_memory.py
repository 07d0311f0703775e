"""All-reduce of small messages over memory that the GPUs of one host share: one kernel, no library call.

Every rank has a buffer that its peers map. A message is copied into it and summed where it is used: by all ranks at
once (one shot, for the smallest), or each rank sums its part and reads the others' (two shots). See
csrc/kernels/all_reduce.cuh. What does not fit goes to the process group's own all-reduce.
"""

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .peer_buffers import PeerBuffers
from .peer_kernels import PATIENCE, Kernels, check, load_kernels

logger = logging.getLogger(__name__)

WORLDS = (2, 4, 8)
CAPACITY = 8 << 20  # bytes of the largest message; beyond it a ring that saturates the links wins
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Up to so many bytes every rank reads all of every peer's message: more traffic, one meeting less.
_ONE_SHOT = {2: CAPACITY, 4: 512 << 10, 8: 256 << 10}


class PeerRank:
    """One rank's end: all ranks' buffers, as this process maps them, in rank order.

    Calls must come in the same order on all ranks, each on a stream of its rank's device. Two that overlap would wait
    for each other for ever, so that a call on another stream first waits (by an event) for the one before. patience:
    seconds that a kernel waits for a peer's before its launch fails.
    """

    def __init__(
        self,
        kernels: Kernels,
        buffers: Sequence[Tensor],
        rank: int,
        device: torch.device,
        capacity: int,
        patience: float = PATIENCE,
    ):
        assert len(buffers) in WORLDS, len(buffers)
        self._kernels, self._rank, self._device, self.capacity = kernels, rank, device, capacity
        self._patience = patience
        self._buffers = buffers  # as long as they live, the memory stays mapped
        self._bases = (ctypes.c_void_p * len(buffers))(*(buffer.data_ptr() for buffer in buffers))
        self._stream: Any = None
        self._last = torch.cuda.Event()

    def problem(self, tensor: Tensor) -> str:
        """Why a tensor cannot be summed here; empty when it can."""
        if tensor.dtype not in _TYPES or tensor.device != self._device:
            return f"{tensor.dtype} on {tensor.device}"
        if not tensor.is_contiguous():
            return "a tensor that is not dense"
        if tensor.numel() * tensor.element_size() > self.capacity:
            return f"more than {self.capacity} bytes"
        return ""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor without ``problem`` over ranks, in place, on the current stream; the same bits on all ranks."""
        size, world = tensor.numel() * tensor.element_size(), len(self._bases)
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            if self._stream is not None and stream != self._stream:
                stream.wait_event(self._last)
            pointer, two_shots = tensor.data_ptr(), int(size > _ONE_SHOT[world])
            ranks = (self._bases, self._rank, world, self.capacity)
            message = (pointer, pointer, tensor.numel(), _TYPES[tensor.dtype])
            status = self._kernels.all_reduce(*ranks, *message, two_shots, self._patience, stream.cuda_stream)
            check("all_reduce", status)
            self._last.record(stream)
            self._stream = stream


def virtual_ranks(world: int, device: torch.device, capacity: int = CAPACITY) -> list[PeerRank]:
    """All ranks in this process and on one device: for tests, each rank's calls on a stream of its own."""
    kernels = load_kernels()
    assert kernels is not None, "the compiled CUDA library is missing"
    buffers = [torch.zeros(kernels.bytes(capacity), dtype=torch.uint8, device=device) for _ in range(world)]
    torch.cuda.synchronize(device)
    return [PeerRank(kernels, buffers, rank, device, capacity) for rank in range(world)]


class PeerMemory:
    """``all_reduce`` over the ranks of ``group``, through shared memory where that is possible.

    Making one is collective and waits for all ranks. ``reason``: why the group's own all-reduce serves every call;
    empty where peer memory serves those that fit. device: this rank's. patience: see ``PeerRank``.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, capacity: int = CAPACITY, patience: float = PATIENCE
    ):
        self.group = group
        self._told: frozenset[str] = frozenset()
        self._rank: PeerRank | None = None
        buffers = PeerBuffers(group, device, lambda kernels: kernels.bytes(capacity), self._own_problem())
        self.reason = buffers.reason
        if not self.reason:
            rank = dist.get_rank(group)
            self._rank = PeerRank(buffers.kernels, buffers.tensors, rank, device, capacity, patience)
        self._tell(self.reason)

    def takes(self, tensor: Tensor) -> bool:
        """Whether it sums such a tensor; where not, the log says why, once."""
        problem = self.reason if self._rank is None else self._rank.problem(tensor)
        self._tell(problem)
        return not problem

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over the group in place, on the current stream.

        Collective, in the same order on all ranks, with tensors of one size, type and layout.
        """
        if not self.takes(tensor):
            dist.all_reduce(tensor, group=self.group)
        elif tensor.numel():
            self._rank.all_reduce(tensor)

    def _tell(self, reason: str) -> None:
        if reason and reason not in self._told:
            self._told |= {reason}
            logger.info("all-reduce by the process group, not by peer memory: %s", reason)

    def _own_problem(self) -> str:
        world = dist.get_world_size(self.group)
        return "" if world in WORLDS else f"{world} ranks are not one of {WORLDS}"
