"""The process-group backend "gloo_cuda": gloo on GPU tensors, through copies in host memory.

NCCL does not support several ranks on one GPU. This backend runs any layout on a single GPU, for
debugging, not for speed. A collective copies its inputs to the host when called, which waits for
the current stream; `wait` copies its outputs back on the current stream.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from .work import FinishedByWaiting, gloo_of

NAME = "gloo_cuda"

Copies = Sequence[tuple[Tensor, Tensor]]  # (output, its copy on the host)


def register() -> None:
    """Make ``dist.new_group(backend="gloo_cuda")`` and ``init_process_group("gloo_cuda")`` work."""

    def create(options, _) -> dist.ProcessGroup:
        return StagedGroup(gloo_of(options))

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


class StagedWork(FinishedByWaiting):
    """A collective on the host copies. Waiting a second time does nothing."""

    def __init__(self, work: Work, outputs: list[Tensor], copies: Copies):
        super().__init__(outputs)
        self._work: Work | None = work
        self._copies = copies

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the collective and copy its outputs back. Raises RuntimeError after the timeout,
        or the group's.
        """
        if (work := self._work) is not None:
            self._work = None
            work.wait(timeout or timedelta())
            for tensor, host in self._copies:
                tensor.detach().copy_(host)
            self._copies = ()
        return True

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def is_success(self) -> bool:
        return self._work is None


class StagedGroup(dist.ProcessGroup):
    """The process group. Other methods are those of the base class, which pass their tensors to
    gloo unchanged.
    """

    def __init__(self, gloo: Any):
        super().__init__(gloo.rank(), gloo.size())  # type: ignore[call-arg]  # the stubs leave this constructor out
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.gloo = gloo

    def getBackendName(self) -> str:
        return NAME

    def barrier(self, opts=None):
        return self.gloo.barrier()

    def allreduce(self, tensors, opts=None):
        host = _copied(tensors)
        return _back(self.gloo.allreduce(host, opts or dist.AllreduceOptions()), tensors, host)

    def broadcast(self, tensors, opts):
        host = _copied(tensors)
        return _back(self.gloo.broadcast(host, opts), tensors, host)

    def reduce(self, tensors, opts):
        host = _copied(tensors)
        return _back(self.gloo.reduce(host, opts), tensors, host)

    def allgather(self, outputs, inputs, opts=None):
        host = [_empty(parts) for parts in outputs]
        work = self.gloo.allgather(host, _copied(inputs))
        return _back(work, sum(outputs, []), sum(host, []))

    def all_gather_single(self, output, input, opts=None, **_):
        host = _empty([output])
        return _back(self.gloo._allgather_base(*host, *_copied([input])), [output], host)

    def reduce_scatter(self, outputs, inputs, opts=None):
        host = _empty(outputs)
        work = self.gloo.reduce_scatter(
            host, [_copied(parts) for parts in inputs], opts or dist.ReduceScatterOptions()
        )
        return _back(work, outputs, host)

    def reduce_scatter_single(self, output, input, opts=None, **_):
        host = _empty([output])
        work = self.gloo._reduce_scatter_base(
            *host, *_copied([input]), opts or dist.ReduceScatterOptions()
        )
        return _back(work, [output], host)

    def all_to_all_single(self, output, input, output_splits, input_splits, opts=None, **_):
        host = _empty([output])
        return _back(
            self.gloo.alltoall_base(*host, *_copied([input]), output_splits, input_splits),
            [output],
            host,
        )

    def send(self, tensors, destination, tag):
        return _back(self.gloo.send(_copied(tensors), destination, tag), [], [])

    def recv(self, tensors, source, tag):
        host = _empty(tensors)
        return _back(self.gloo.recv(host, source, tag), tensors, host)

    # The names of these before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]


def _copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for tensor in tensors
    ]


def _empty(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]


def _back(work: Work, outputs: list[Tensor], host: list[Tensor]) -> StagedWork:
    return StagedWork(work, outputs, list(zip(outputs, host, strict=True)))
