"""What some units keep for their backward, in host memory until then.

A forward copies what an offloaded unit's tape needs to the host as soon as the unit has run, while
the next ones compute. A backward brings the tapes back one by one: the next one comes while the
units before its own in the backward compute. Here 0 and 2 of four units are offloaded:

forward    | unit 0 | unit 1 | unit 2 | unit 3 |       | unit 3 | unit 2 | unit 1 | unit 0 |
to host             |   0             |   2    |
from host                                              |   2    |   0             |

So at most two tapes are on the device at a time: in a forward that of the running unit and one that
is being copied, in a backward that of the running unit and one that is coming. Copies are no ops of a
schedule, as their places in a pass follow from its units.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..segment import Segment


class KeptStorage:
    """A storage that tapes need. It lives as long as one of them refers to it.

    Attributes:
    storage: on the device; None while it is on the host only.
    host:    its bytes in host memory, uint8; None while these are not needed.
    ready:   of a copy that is under way, what the device has to wait for; None: nothing.
    """

    def __init__(self, storage: torch.UntypedStorage):
        self.storage: torch.UntypedStorage | None = storage
        self.host: Tensor | None = None
        self.ready: torch.cuda.Event | None = None
        # What else holds the storage, a unit that is not offloaded for instance, keeps it alive.
        # This reference lets no other storage have its address.
        self._first = StorageWeakRef(storage)

    def recover(self) -> None:
        """Take the storage that was copied, if something else still holds it."""
        if self.storage is None:
            self.storage = torch.UntypedStorage._new_with_weak_ptr(self._first.cdata)


class Packed(NamedTuple):
    """A tensor on a tape."""

    kept: KeptStorage
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        storage = self.kept.storage
        assert storage is not None, "the tape of a unit is read before it was brought back"
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


class HostMemory:
    """Copies storages of a rank's device to memory of the host and back.

    On a GPU that memory is pinned, and each direction has a stream of its own. On a CPU, whose
    memory is that of the host, copies are done at once.
    """

    def __init__(self, device: torch.device):
        self.device = device
        on_gpu = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if on_gpu else None
        self._in = torch.cuda.Stream(device) if on_gpu else None
        # being copied to the host; their memory on the device is needed until then
        self._leaving: dict[KeptStorage, None] = {}

    def send(self, storages: Collection[KeptStorage]) -> None:
        """Start to copy storages to the host.

        Those that were sent before must have left by then: a slow link lets the device wait
        instead of filling its memory.
        """
        self._settle()
        if not storages:
            return
        with self._beside(self._out):
            for kept in storages:
                assert kept.storage is not None
                size = kept.storage.nbytes()
                pinned = self._out is not None
                kept.host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
                kept.host.copy_(_bytes(kept.storage), non_blocking=True)
        self._mark(storages, self._out)
        self._leaving = dict.fromkeys(storages)
        if self._out is None:
            self._settle()

    def fetch(self, storages: Collection[KeptStorage]) -> None:
        """Start to copy storages back, except those that are on the device."""
        missing = []
        for kept in storages:
            self._leaving.pop(kept, None)
            kept.recover()
            if kept.storage is None:
                missing.append(kept)
            else:
                kept.host = None
        if not missing:
            return
        # Memory comes from the stream that computes, so `_beside` waits for its earlier kernels.
        targets = [_empty(kept, self.device) for kept in missing]
        with self._beside(self._in):
            for kept, target in zip(missing, targets, strict=True):
                assert kept.host is not None
                if self._in is not None:
                    target.record_stream(self._in)
                    if kept.ready is not None:
                        self._in.wait_event(kept.ready)
                target.copy_(kept.host, non_blocking=True)
                # torch reuses pinned memory after the copies that it knows of
                kept.storage, kept.host = target.untyped_storage(), None
        self._mark(missing, self._in)

    def wait(self, kept: KeptStorage) -> None:
        """Let what follows on the device wait for the copy of a storage that is under way."""
        if kept.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(kept.ready)
            kept.ready = None

    def _settle(self) -> None:
        """Free the memory of what was sent last, once it is copied."""
        for kept in self._leaving:
            self.wait(kept)
            kept.storage = None
        self._leaving = {}

    @contextmanager
    def _beside(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Start what is done inside after what was started before, on a stream of its own."""
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield

    def _mark(self, storages: Collection[KeptStorage], stream: torch.cuda.Stream | None) -> None:
        event = None if stream is None else stream.record_event()
        for kept in storages:
            kept.ready = event


class OffloadedTapes:
    """What the offloaded units of one micro-batch, or of a half of it, keep for their backward.

    host:   where it goes.
    units:  which they are.
    common: values from the batch, which stay on the device.
    """

    def __init__(self, host: HostMemory, units: Collection[int], common: Mapping[str, Tensor]):
        self.units = units
        self._host = host
        self._common = [address(value) for value in common.values()]
        self._staying: frozenset[int] = frozenset()
        self._known: WeakValueDictionary[int, KeptStorage] = WeakValueDictionary()
        self._running: dict[KeptStorage, None] = {}
        self._sent: dict[int, list[KeptStorage]] = {}
        self._fetched: dict[int, list[KeptStorage]] = {}

    def recording(self, segment: Segment) -> AbstractContextManager[object]:
        """Return the context of a segment's forward, in which its tape is made."""
        if segment.unit not in self.units:
            return nullcontext()
        # now, as the memory of a parameter may be another one later
        self._staying = frozenset([*self._common, *map(address, segment.parameters)])
        return torch.autograd.graph.saved_tensors_hooks(self.pack, unpack)

    def pack(self, tensor: Tensor) -> Packed | Tensor:
        """Return what a tape keeps in the place of a tensor."""
        if not self._moves(tensor):
            # detached: an output that is on its own tape would keep itself alive
            return tensor.detach()
        storage = tensor.untyped_storage()
        kept = self._known.get(storage._cdata)
        if kept is None:
            kept = self._known[storage._cdata] = KeptStorage(storage)
        self._running[kept] = None
        offset = int(tensor.storage_offset())
        return Packed(kept, tensor.dtype, offset, tensor.shape, stride=tensor.stride())

    def keep(self, segment: Segment, tensor: Tensor) -> Packed | Tensor:
        """Return what a segment's tape keeps of a tensor that autograd does not save."""
        return self.pack(tensor) if segment.unit in self.units else tensor

    def _moves(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and tensor.device.type == self._host.device.type
            and not (tensor.is_conj() or tensor.is_neg())
            and address(tensor) not in self._staying
        )

    def send(self, unit: int, needed: Iterable[Tensor]) -> None:
        """Start to copy to the host what a unit keeps that has run.

        needed: values that stay on the device for another backward.
        """
        if unit not in self.units:
            return
        staying = [address(value) for value in needed]
        own = list(self._running)
        self._running = {}
        self._sent[unit] = own
        # one that an earlier unit keeps, too, is on its way already
        self._host.send(
            [
                kept
                for kept in own
                if kept.host is None and kept.storage and kept.storage._cdata not in staying
            ]
        )

    def take(self, unit: int) -> None:
        """Let the backward of a unit read what it keeps, which autograd frees step by step, and
        start to bring back what the next offloaded unit keeps.

        To be called before the backward of each unit, also of one that is not offloaded.
        """
        if unit in self._sent:
            self._fetch(unit)
        for kept in self._fetched.pop(unit, ()):
            self._host.wait(kept)
        if self._sent and not self._fetched:
            self._fetch(next(reversed(self._sent)))

    def _fetch(self, unit: int) -> None:
        self._fetched[unit] = self._sent.pop(unit)
        self._host.fetch(self._fetched[unit])

    def leftovers(self) -> list[str]:
        """Name the units whose backward has not run."""
        return [f"offloaded tape of unit {unit}" for unit in (*self._sent, *self._fetched)]

    def on_device(self) -> list[Tensor]:
        """Return what is on the device of what was packed, as bytes."""
        return [_bytes(kept.storage) for kept in self._known.values() if kept.storage is not None]

    def on_host(self) -> int:
        """Return the bytes of host memory in use."""
        return sum(kept.host.nbytes for kept in self._known.values() if kept.host is not None)


def unpack(packed: Packed | Tensor) -> Tensor:
    """Return the tensor in whose place a tape keeps ``packed``."""
    return packed.tensor() if isinstance(packed, Packed) else packed


def address(tensor: Tensor) -> int:
    """Return what identifies the storage of a tensor."""
    return tensor.untyped_storage()._cdata


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _empty(kept: KeptStorage, device: torch.device) -> Tensor:
    assert kept.host is not None
    return torch.empty_like(kept.host, device=device, pin_memory=False)
