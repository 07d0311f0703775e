"""Buffers on the GPU of every rank of a host, mapped by all these ranks through CUDA IPC
handles.
"""

import socket
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from .agree import gather_json
from .peer_kernels import PeerKernels, load_kernels

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class PeerBuffers:
    """One zero-initialised buffer on the device of every rank of ``group``, all mapped into this
    process.

    Construction is collective and waits for all ranks.

    nbytes:  kernels -> size of a buffer in bytes, equal on all ranks.
    problem: why this rank cannot take part; empty if it can.

    Attributes:
    kernels: the functions that work on the buffers.
    reason:  why there are no buffers, equal on all ranks; empty if there are.
    tensors: uint8, in rank order, each mapped for this rank's device, on whatever device it is.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        nbytes: Callable[[PeerKernels], int],
        problem: str = "",
    ):
        self._group = group
        self._device = device
        self.kernels = load_kernels() if device.type == "cuda" else None
        self._carrier = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
        self.tensors: list[Tensor] = []
        self.reason = self._agree(problem)
        if not self.reason and self.kernels is not None:
            self.tensors = self._connect(nbytes(self.kernels))

    def _gather(self, value: object) -> list:
        return gather_json(value, self._group, self._carrier)

    def _agree(self, problem: str) -> str:
        """Return the first problem of any rank, empty if there is none."""
        if not problem and self._device.type != "cuda":
            problem = f"the device is {self._device.type}"
        elif not problem and self.kernels is None:
            problem = "the compiled CUDA library is missing"
        everyone = self._gather({"host": _host(), "uuid": _uuid(self._device), "problem": problem})
        problems = [rank["problem"] for rank in everyone]
        if len({rank["host"] for rank in everyone}) > 1:
            problems.append("the ranks are on several hosts")
        if not any(problems):
            problems = self._gather(_unreachable(self._device, [rank["uuid"] for rank in everyone]))
        return next((problem for problem in problems if problem), "")

    def _connect(self, nbytes: int) -> list[Tensor]:
        """Allocate this rank's buffer, exchange handles and map the others.

        A handle is opened while this rank's device is current, because opening grants access to the
        current device, whose kernels read and write the buffer. Opening it on a peer's device would
        also create a context there.
        """
        own = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)
        shared = [_encoded(part) for part in own.untyped_storage()._share_cuda_()]
        everyone = self._gather(shared)
        rank = dist.get_rank(self._group)
        mapped = []
        for number, handle in enumerate(everyone):
            if number == rank:
                mapped.append(own)
            else:
                parts = [_decoded(part) for part in handle[1:]]
                storage = torch.UntypedStorage._new_shared_cuda(_index(self._device), *parts)
                mapped.append(
                    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:nbytes]
                )
        self._gather(None)  # all ranks have mapped all buffers before the first kernel writes
        return mapped


def _host() -> str:
    """Return an identifier of this boot of this host, equal in all its containers."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _local_devices() -> dict[str, int]:
    """Return UUID of a device -> its index in this process."""
    return {_uuid(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}


def _unreachable(device: torch.device, uuids: list[str]) -> str:
    """Return which rank's device this process cannot map; empty if it can map all."""
    local = _local_devices()
    own = local[_uuid(device)]
    for rank, uuid in enumerate(uuids):
        if uuid not in local:
            return f"the device of rank {rank} is not visible to all ranks"
        if local[uuid] != own and not torch.cuda.can_device_access_peer(own, local[uuid]):
            return f"cuda:{own} cannot reach the memory of cuda:{local[uuid]}"
    return ""


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _encoded(part: object) -> object:
    return {"bytes": part.hex()} if isinstance(part, bytes) else part


def _decoded(part: object) -> object:
    return bytes.fromhex(part["bytes"]) if isinstance(part, dict) else part
