"""All-reduce of small messages over memory that the GPUs of one host share: one kernel, no library call.

Every rank has a buffer that its peers map. A message is copied into it and summed where it is used: by all ranks at
once (one shot, for the smallest), or each rank sums its part and reads the others' (two shots). See
csrc/kernels/all_reduce.cuh. What does not fit goes to the process group's own all-reduce.
"""

import ctypes
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _native
from .agree import gather_json

logger = logging.getLogger(__name__)

WORLDS = (2, 4, 8)
CAPACITY = 8 << 20  # bytes of the largest message; beyond it a ring that saturates the links wins
PATIENCE = 600.0  # seconds that a kernel waits for a peer's before it gives up, as a process group does
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Up to so many bytes every rank reads all of every peer's message: more traffic, one meeting less.
_ONE_SHOT = {2: CAPACITY, 4: 512 << 10, 8: 256 << 10}
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Kernels(NamedTuple):
    """The C functions of csrc/cuda/launch.h."""

    all_reduce: Callable[..., int]
    bytes: Callable[[int], int]


def load_kernels() -> Kernels | None:
    """The launchers in the compiled library, None where it was not built or is not wanted."""
    path = _native.library("_ops_cuda") if _native.wanted() and torch.version.cuda is not None else None
    if path is None or _native.unfit(path):
        return None
    library = ctypes.CDLL(str(path))
    pointer, number, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    library.merak_all_reduce.argtypes = [pointer, number, number, wide, pointer, pointer, wide, number, number]
    library.merak_all_reduce.argtypes += [ctypes.c_double, pointer]
    library.merak_all_reduce.restype = number
    library.merak_all_reduce_bytes.argtypes, library.merak_all_reduce_bytes.restype = [wide], wide
    return Kernels(library.merak_all_reduce, library.merak_all_reduce_bytes)


class PeerRank:
    """One rank's end: all ranks' buffers (tensors or storages), as this process maps them, in rank order.

    Calls must come in the same order on all ranks, each on a stream of its rank's device. Two that overlap would wait
    for each other for ever, so that a call on another stream first waits (by an event) for the one before.
    """

    def __init__(self, kernels: Kernels, buffers: Sequence[Any], rank: int, device: torch.device, capacity: int):
        assert len(buffers) in WORLDS, len(buffers)
        self._kernels, self._rank, self._device, self.capacity = kernels, rank, device, capacity
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
            status = self._kernels.all_reduce(
                *(self._bases, self._rank, world, self.capacity, tensor.data_ptr(), tensor.data_ptr()),
                *(tensor.numel(), _TYPES[tensor.dtype], int(size > _ONE_SHOT[world]), PATIENCE, stream.cuda_stream),
            )
            if status != 0:
                raise RuntimeError(f"merak_all_reduce did not start: CUDA error {status}")
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
    empty where peer memory serves those that fit. device: this rank's.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, capacity: int = CAPACITY):
        self.group, self.capacity = group, capacity
        self._carrier = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
        self._told: frozenset[str] = frozenset()
        self._rank: PeerRank | None = None
        self._kernels = load_kernels() if device.type == "cuda" else None
        self.reason = self._agree(device)
        if not self.reason:
            self._rank = self._connect(device)
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

    def _agree(self, device: torch.device) -> str:
        """The first problem that any rank has; all ranks return the same."""
        own = {"host": _host(), "uuid": _uuid(device), "problem": self._own_problem(device)}
        everyone = gather_json(own, self.group, self._carrier)
        problems = [rank["problem"] for rank in everyone]
        if len({rank["host"] for rank in everyone}) > 1:
            problems.append("the ranks are on several hosts")
        if not any(problems):
            problems = gather_json(_unreachable(device, [rank["uuid"] for rank in everyone]), self.group, self._carrier)
        return next((problem for problem in problems if problem), "")

    def _own_problem(self, device: torch.device) -> str:
        world = dist.get_world_size(self.group)
        if device.type != "cuda":
            return f"the device is {device.type}"
        if self._kernels is None:
            return "the compiled CUDA library is missing"
        return "" if world in WORLDS else f"{world} ranks are not one of {WORLDS}"

    def _connect(self, device: torch.device) -> PeerRank:
        """Allocate, exchange handles, map."""
        own = torch.zeros(self._kernels.bytes(self.capacity), dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        shared = [_encoded(part) for part in own.untyped_storage()._share_cuda_()]
        everyone = gather_json({"uuid": _uuid(device), "handle": shared}, self.group, self._carrier)
        local, rank = _local_devices(), dist.get_rank(self.group)
        mapped = []
        for number, peer in enumerate(everyone):
            if number == rank:
                mapped.append(own.untyped_storage())
            else:
                handle = [_decoded(part) for part in peer["handle"]]
                mapped.append(torch.UntypedStorage._new_shared_cuda(local[peer["uuid"]], *handle[1:]))
        gather_json(None, self.group, self._carrier)  # all have mapped all before the first kernel writes
        return PeerRank(self._kernels, mapped, rank, device, self.capacity)


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


def _encoded(part: object) -> object:
    return {"bytes": part.hex()} if isinstance(part, bytes) else part


def _decoded(part: object) -> object:
    return bytes.fromhex(part["bytes"]) if isinstance(part, dict) else part
