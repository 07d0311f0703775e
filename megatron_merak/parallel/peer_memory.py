"""All-reduce of small messages through peer memory of the GPUs of one host, in a single kernel.

Every rank has a buffer that its peers map, and copies its message there. For the smallest messages
every rank sums all of them (one shot); otherwise each rank sums its shard and reads the others'
sums (two shots). See csrc/kernels/all_reduce.cuh. Larger messages use the process group's own
all-reduce.
"""

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .peer_buffers import PeerBuffers
from .peer_kernels import PATIENCE, PeerKernels, check, load_kernels

logger = logging.getLogger(__name__)

WORLDS = (2, 4, 8)
# Bytes of the largest message: two ranks gain nothing beyond, and with more NCCL lets switches add
# up. Chunks of a larger message would gain as good as nothing: docs/gpu.md has the arithmetic.
CAPACITY = 8 << 20
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Largest message in bytes of the one-shot algorithm: more traffic, one synchronisation less.
_ONE_SHOT = {2: CAPACITY, 4: 512 << 10, 8: 256 << 10}


class PeerRank:
    """One rank's end of an all-reduce group.

    Calls must come in the same order on all ranks, each on a stream of its rank's device. Two
    concurrent calls would deadlock, so a call on another stream first waits, through an event, for
    the previous one.

    buffers:  of all ranks, in rank order, mapped into this process.
    capacity: bytes of the largest message.
    patience: seconds that a kernel waits for its peers before it fails.
    """

    def __init__(
        self,
        kernels: PeerKernels,
        buffers: Sequence[Tensor],
        rank: int,
        device: torch.device,
        capacity: int,
        patience: float = PATIENCE,
    ):
        assert len(buffers) in WORLDS, len(buffers)
        self._kernels = kernels
        self._rank = rank
        self._device = device
        self.capacity = capacity
        self._patience = patience
        self._buffers = buffers  # keeps the memory mapped
        self._bases = (ctypes.c_void_p * len(buffers))(*(buffer.data_ptr() for buffer in buffers))
        self._stream: Any = None
        self._last = torch.cuda.Event()

    def problem(self, tensor: Tensor) -> str:
        """Return why a tensor is not supported; empty if it is."""
        if tensor.dtype not in _TYPES or tensor.device != self._device:
            return f"{tensor.dtype} on {tensor.device}"
        if not tensor.is_contiguous():
            return "a tensor that is not dense"
        if tensor.numel() * tensor.element_size() > self.capacity:
            return f"more than {self.capacity} bytes"
        return ""

    def all_reduce(self, tensor: Tensor) -> None:
        """All-reduce a supported tensor in place on the current stream; the result is bitwise equal
        on all ranks.
        """
        size = tensor.numel() * tensor.element_size()
        world = len(self._bases)
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            if self._stream is not None and stream != self._stream:
                stream.wait_event(self._last)
            pointer = tensor.data_ptr()
            two_shots = int(size > _ONE_SHOT[world])
            status = self._kernels.all_reduce(
                self._bases,
                self._rank,
                world,
                self.capacity,
                pointer,  # from here
                pointer,  # to here
                tensor.numel(),
                _TYPES[tensor.dtype],
                two_shots,
                self._patience,
                stream.cuda_stream,
            )
            check("all_reduce", status)
            self._last.record(stream)
            self._stream = stream


def virtual_ranks(
    world: int, device: torch.device, capacity: int = CAPACITY, patience: float = PATIENCE
) -> list[PeerRank]:
    """Return all ranks of a group in this process on one device, for tests; call each rank on its
    own stream.
    """
    kernels = load_kernels()
    assert kernels is not None, "the compiled CUDA library is missing"
    buffers = [
        torch.zeros(kernels.bytes(capacity), dtype=torch.uint8, device=device) for _ in range(world)
    ]
    torch.cuda.synchronize(device)
    return [
        PeerRank(kernels, buffers, rank, device, capacity=capacity, patience=patience)
        for rank in range(world)
    ]


class PeerMemory:
    """``all_reduce`` over the ranks of ``group``, through peer memory where that is possible.

    Construction is collective and waits for all ranks.

    device:   of this rank.
    capacity: bytes of the largest message.
    patience: see ``PeerRank``.

    Attribute ``reason``: why the group's own all-reduce is used for everything; empty where peer
    memory is available.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        capacity: int = CAPACITY,
        patience: float = PATIENCE,
    ):
        self.group = group
        self._logged: frozenset[str] = frozenset()
        self._rank: PeerRank | None = None
        buffers = PeerBuffers(
            group, device, lambda kernels: kernels.bytes(capacity), self._own_problem()
        )
        self.reason = buffers.reason
        if not self.reason and buffers.kernels is not None:
            rank = dist.get_rank(group)
            self._rank = PeerRank(
                buffers.kernels, buffers.tensors, rank, device, capacity=capacity, patience=patience
            )
        self._log_once(self.reason)

    def takes(self, tensor: Tensor) -> bool:
        """Whether peer memory supports a tensor; if not, log each reason once."""
        problem = self.reason if self._rank is None else self._rank.problem(tensor)
        self._log_once(problem)
        return not problem

    def all_reduce(self, tensor: Tensor) -> None:
        """All-reduce ``tensor`` over the group in place, on the current stream.

        Collective, in the same order on all ranks, with tensors of the same size, dtype and layout.
        """
        if self._rank is None or not self.takes(tensor):
            dist.all_reduce(tensor, group=self.group)
        elif tensor.numel():
            self._rank.all_reduce(tensor)

    def _log_once(self, reason: str) -> None:
        if reason and reason not in self._logged:
            self._logged |= {reason}
            logger.info("all-reduce by the process group, not by peer memory: %s", reason)

    def _own_problem(self) -> str:
        world = dist.get_world_size(self.group)
        return "" if world in WORLDS else f"{world} ranks are not one of {WORLDS}"
