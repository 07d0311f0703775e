"""The process-group backend "merak_peer": small all-reduces by peer memory of the GPUs of a host,
the rest by NCCL.

Such an all-reduce is one kernel of ``csrc/kernels/all_reduce.cuh``, on a side stream if
asynchronous. Ranks map each other's memory at the first all-reduce; where they cannot, NCCL does
everything, and the reason is logged.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from .peer_memory import PeerMemory
from .side_stream import Pending, SideStream
from .staged import StagedGroup
from .work import FinishedByWaiting, gloo_of, ranks_of

NAME = "merak_peer"


def register(device: torch.device, staged: bool = False) -> None:
    """Make ``dist.new_group(backend="merak_peer")`` work, with this rank on ``device``.

    staged: use gloo instead of NCCL, which does not support several ranks on one GPU.
    """

    def create(options, nccl_options) -> dist.ProcessGroup:
        patience = options.timeout.total_seconds()
        if staged:
            return StagedPeerGroup(gloo_of(options), device, patience)
        return PeerGroup(_nccl(options, nccl_options), device, patience)

    devices = ["cpu", "cuda"] if staged else ["cuda"]
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=devices)


class PeerWork(FinishedByWaiting):
    """The work of an all-reduce on the stream of its caller, or ``pending`` on another one."""

    def __init__(self, outputs: list[Tensor], pending: Pending | None = None):
        super().__init__(outputs)
        self._pending = pending

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the result. The kernel has a timeout of its own for
        missing peers.
        """
        if self._pending is not None:
            self._pending.wait()
        return True

    def is_completed(self) -> bool:
        return self._pending is None or self._pending.is_completed()

    def is_success(self) -> bool:
        return self.is_completed()


class PeerSums:
    """The all-reduces of ``group`` that use peer memory."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, patience: float):
        self._group = group
        self._device = device
        self._patience = patience
        self._memory: PeerMemory | None = None
        self._side_stream: SideStream | None = None

    def start(self, tensors: list[Tensor], opts: dist.AllreduceOptions) -> Work | None:
        """Start an all-reduce; None if peer memory does not support its operation, dtype, size or
        device.
        """
        if len(tensors) != 1 or opts.reduceOp != dist.ReduceOp.SUM:
            return None
        if self._memory is None:
            self._memory = PeerMemory(self._group, self._device, patience=self._patience)
        if not self._memory.takes(tensors[0]):
            return None
        if not opts.asyncOp:
            self._memory.all_reduce(tensors[0])
            return PeerWork(tensors)
        self._side_stream = self._side_stream or SideStream(self._memory.all_reduce)
        return PeerWork(tensors, self._side_stream(tensors[0]))


class PeerGroup(dist.ProcessGroup):
    """The process group on NCCL. Other methods are those of the base class, which uses NCCL for
    CUDA tensors.
    """

    def __init__(self, nccl: Any, device: torch.device, patience: float):
        super().__init__(nccl.rank(), nccl.size())  # type: ignore[call-arg]  # the stubs leave this constructor out
        self._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
        self._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        self.nccl, self.sums = nccl, PeerSums(self, device, patience)

    def getBackendName(self) -> str:
        return NAME

    def allreduce(self, tensors, opts=None):
        opts = opts or dist.AllreduceOptions()
        return self.sums.start(tensors, opts) or self.nccl.allreduce(tensors, opts)


class StagedPeerGroup(StagedGroup):
    """As `PeerGroup`, for ranks that share a GPU, on gloo."""

    def __init__(self, gloo: dist.ProcessGroupGloo, device: torch.device, patience: float):
        super().__init__(gloo)
        self.sums = PeerSums(self, device, patience)

    def getBackendName(self) -> str:
        return NAME

    def allreduce(self, tensors, opts=None):
        opts = opts or dist.AllreduceOptions()
        return self.sums.start(tensors, opts) or super().allreduce(tensors, opts)


def _nccl(options, nccl_options: "dist.ProcessGroupNCCL.Options | None") -> "dist.ProcessGroupNCCL":
    own = nccl_options or dist.ProcessGroupNCCL.Options()
    own._timeout = options.timeout
    own.group_name = options.group_id
    own.global_ranks_in_group = ranks_of(options)
    store = dist.PrefixStore("nccl", options.store)
    return dist.ProcessGroupNCCL(store, options.group_rank, options.group_size, own)
