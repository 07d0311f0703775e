"""Device memory that every rank of a host maps: a buffer on each rank's GPU, by CUDA's handles between processes."""

import socket
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from .agree import gather_json
from .peer_kernels import Kernels, load_kernels

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class PeerBuffers:
    """A buffer of zeros on the device of every rank of ``group``, as this process maps them, and what works on them.

    Making them is collective and waits for all ranks. nbytes: of ``kernels``, the buffer's bytes, alike on all ranks.
    problem: why this rank cannot take part. ``reason``: why there are none, the same on all ranks; empty where there
    are. ``tensors``: uint8, in rank order, each mapped for this rank's device, whichever device holds it.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, nbytes: Callable[[Kernels], int], problem: str = ""
    ):
        self._group, self._device = group, device
        self.kernels = load_kernels() if device.type == "cuda" else None
        self._carrier = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
        self.tensors: list[Tensor] = []
        self.reason = self._agree(problem)
        if not self.reason:
            self.tensors = self._connect(nbytes(self.kernels))

    def _gather(self, value: object) -> list:
        return gather_json(value, self._group, self._carrier)

    def _agree(self, problem: str) -> str:
        """The first problem that any rank has."""
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
        """Allocate, exchange handles, map.

        A handle is opened with this rank's device current: its kernels are what reads and writes there, and opening
        grants access to the device that is current. A peer's would grant it to the peer, and cost a context there.
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
                mapped.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:nbytes])
        self._gather(None)  # all have mapped all before the first kernel writes
        return mapped


def _host() -> str:
    """This boot of this host; containers on it share it."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _local_devices() -> dict[str, int]:
    """Identity of a device -> its number in this process."""
    return {_uuid(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}


def _unreachable(device: torch.device, uuids: list[str]) -> str:
    """Which of the ranks' devices this process cannot map; empty when it can map all."""
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
