"""Copies of flat tensors between memory of the host and a rank's device, while the device computes."""

import mmap
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .clock import Clock
from .in_flight import Work


def host_zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros in memory of the host, from and to which ``device`` copies without its help.

    On a GPU that memory is pinned: registered, since the allocator of pinned memory rounds sizes up
    to powers of two.
    """
    if device.type != "cuda" or not count:
        return torch.zeros(count, dtype=dtype)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = _PinnedPages(-1, count * dtype.itemsize, flags=private)
    values = torch.frombuffer(pages, dtype=dtype)  # which keeps them
    pages.pin(values.data_ptr())
    return values


class _PinnedPages(mmap.mmap):
    """Memory that is pinned until it is freed. What is freed while it is registered stays pinned, and
    the next memory at its address cannot be registered.
    """

    def pin(self, address: int) -> None:
        cudart = torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(address, len(self), 0))
        self._unpin = partial(cudart.cudaHostUnregister, address)

    def __del__(self) -> None:
        unpin = getattr(self, "_unpin", None)  # None: it could not be pinned
        if unpin is not None:
            unpin()


class HostLink:
    """One copy at a time in each direction, in the order in which they are started.

    On a GPU each direction has a stream of its own, which begins a copy after the kernels that were
    launched before it. On a CPU, whose memory is that of the host, copies are done at once; a
    modelled clock times them as copies of its device.

    device: of the rank.
    clock:  of the rank.
    """

    def __init__(self, device: torch.device, clock: Clock):
        self.device = device
        self._clock = clock
        on_gpu = device.type == "cuda"
        self._in = torch.cuda.Stream(device) if on_gpu else None
        self._out = torch.cuda.Stream(device) if on_gpu else None

    def load(self, value: Tensor, stored: Tensor) -> Work:
        """Start to copy ``stored`` on the host to ``value`` on the device."""
        return self._copy(value, stored, self._in, back=False)

    def store(self, stored: Tensor, value: Tensor) -> Work:
        """Start to copy ``value`` on the device to ``stored`` on the host; see `settle`."""
        return self._copy(stored, value, self._out, back=True)

    def settle(self) -> None:
        """Block the host until everything is stored, so that it may be read there."""
        if self._out is not None:
            self._out.synchronize()

    def aside(self) -> AbstractContextManager[object]:
        """Return a context in which waiting for a `load`, and what is launched then, lets no other
        work of the device wait.
        """
        if self._in is not None:
            return torch.cuda.stream(self._in)
        return self._clock.side_stream() or nullcontext()

    def _copy(
        self, into: Tensor, source: Tensor, stream: torch.cuda.Stream | None, back: bool
    ) -> Work:
        if stream is None:
            with _disable_current_modes():  # no kernel of the device
                into.copy_(source)
            return self._clock.host_copy(into.nbytes, back)
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
        # Else its memory, once nobody refers to it, is given away while it is still copied.
        (source if back else into).record_stream(stream)
        return _Copied(stream.record_event(), self.device)


class _Copied:
    """The handle of a copy on a stream."""

    def __init__(self, event: torch.cuda.Event, device: torch.device):
        self._event = event
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)
