"""A flat tensor that has memory only where it is in use."""

import mmap
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor


class Pieces:
    """A flat tensor in pieces that are allocated and released one by one. Views of a piece, which can be made while it
    is allocated, stay valid: they read its new memory once it is allocated again, which has arbitrary values.

    bounds: [start, stop) of each piece, contiguous from 0 on. named: (start, stop, shape) of views to be made at once,
    name -> view in ``named``. ``pieces[start:stop]``: a view, within one piece. paged: give memory back by pages, which
    needs a CPU's and is the default there (its allocator would keep much of what is freed in pieces of many sizes);
    else by storages that are resized.
    """

    def __init__(
        self,
        bounds: Sequence[tuple[int, int]],
        named: Mapping[str, tuple[int, int, tuple[int, ...]]],
        dtype: torch.dtype,
        device: torch.device | str,
        paged: bool | None = None,
    ):
        self.dtype, self._starts = dtype, [start for start, _ in bounds]
        paged = torch.device(device).type == "cpu" if paged is None else paged
        lengths = [stop - start for start, stop in bounds]
        self._memory: _Pages | _Storages = _Pages(lengths, dtype) if paged else _Storages(lengths, dtype, device)
        self._allocated = [True] * len(bounds)
        self.named: dict[str, Tensor] = {}
        within: dict[int, list[str]] = {}
        for name, (start, _, _) in named.items():
            within.setdefault(self._piece_at(start), []).append(name)
        for number in range(len(bounds)):
            for name in within.get(number, ()):
                first, last, shape = named[name]
                self.named[name] = self[first:last].view(shape)
            self.release(number)

    def __len__(self) -> int:
        """How many pieces there are."""
        return len(self._allocated)

    def __getitem__(self, span: slice) -> Tensor:
        number = self._piece_at(span.start)
        start, piece = self._starts[number], self.piece(number)
        assert span.stop - start <= len(piece), f"{span} is not within a piece"
        return piece[span.start - start : span.stop - start]

    def _piece_at(self, place: int) -> int:
        return bisect_right(self._starts, place) - 1

    def piece(self, number: int) -> Tensor:
        return self._memory.pieces[number]

    def allocated(self, number: int) -> bool:
        return self._allocated[number]

    def allocate(self, number: int) -> None:
        """Give a piece memory, if it has none."""
        if not self._allocated[number]:
            self._memory.allocate(number)
            self._allocated[number] = True

    def release(self, number: int) -> None:
        if self._allocated[number]:
            self._memory.release(number)
            self._allocated[number] = False

    def release_all(self) -> None:
        for number in range(len(self)):
            self.release(number)


class _Storages:
    """A storage for each piece, which is resized."""

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype, device: torch.device | str):
        self.pieces = [torch.empty(length, dtype=dtype, device=device) for length in lengths]

    def allocate(self, number: int) -> None:
        self.pieces[number].untyped_storage().resize_(self.pieces[number].nbytes)

    def release(self, number: int) -> None:
        self.pieces[number].untyped_storage().resize_(0)


class _Pages:
    """One range of addresses, in which every piece begins a page. What is written gets memory; release takes it."""

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype):
        spans = [-(-length * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE for length in lengths]
        starts = [sum(spans[:number]) for number in range(len(spans))]
        self._spans = [*zip(starts, spans, strict=True)]
        self._map = mmap.mmap(-1, max(sum(spans), mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                self._map.madvise(mmap.MADV_HUGEPAGE)  # a piece is written anew at every visit: 512 times fewer faults
        flat = torch.frombuffer(self._map, dtype=dtype)
        at = [start // dtype.itemsize for start in starts]
        self.pieces = [flat[start : start + length] for start, length in zip(at, lengths, strict=True)]

    def allocate(self, number: int) -> None:
        pass

    def release(self, number: int) -> None:
        start, span = self._spans[number]
        if span:
            self._map.madvise(mmap.MADV_DONTNEED, start, span)
