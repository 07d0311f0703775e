"""A flat tensor of which only the pieces in use have memory."""

import mmap
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor


def whole(flat: "Tensor | Pieces") -> Tensor:
    """Return a flat tensor that is not in pieces, by how its buffer is sharded."""
    assert isinstance(flat, Tensor)
    return flat


def in_pieces(flat: "Tensor | Pieces") -> "Pieces":
    """Return a flat tensor that is in pieces, by how its buffer is sharded."""
    assert isinstance(flat, Pieces)
    return flat


class Pieces:
    """A flat tensor in pieces that are allocated and freed independently.

    Views of a piece can be made while it is allocated, and remain valid afterwards: once it is
    allocated again they refer to its new memory, which is uninitialised. ``pieces[start:stop]`` is
    a view within one piece.

    bounds: [start, stop) of each piece, contiguous from 0.
    named:  name -> (start, stop, shape) of views that are created now; attribute ``named`` has
            them.
    paged:  free memory with madvise, which requires a CPU and is the default there, because its
            allocator would keep much of the freed memory; otherwise by resizing storages.
    """

    def __init__(
        self,
        bounds: Sequence[tuple[int, int]],
        named: Mapping[str, tuple[int, int, tuple[int, ...]]],
        dtype: torch.dtype,
        device: torch.device | str,
        paged: bool | None = None,
    ):
        self.dtype = dtype
        self._starts = [start for start, _ in bounds]
        paged = torch.device(device).type == "cpu" if paged is None else paged
        lengths = [stop - start for start, stop in bounds]
        self._memory: _Pages | _Storages = (
            _Pages(lengths, dtype) if paged else _Storages(lengths, dtype, device)
        )
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
        """The number of pieces."""
        return len(self._allocated)

    def __getitem__(self, span: slice) -> Tensor:
        number = self._piece_at(span.start)
        start = self._starts[number]
        piece = self.piece(number)
        assert span.stop - start <= len(piece), f"{span} is not within a piece"
        return piece[span.start - start : span.stop - start]

    def _piece_at(self, offset: int) -> int:
        return bisect_right(self._starts, offset) - 1

    def piece(self, number: int) -> Tensor:
        return self._memory.pieces[number]

    def allocated(self, number: int) -> bool:
        return self._allocated[number]

    def allocate(self, number: int) -> None:
        """Allocate memory for a piece that has none."""
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
    """One storage per piece, resized to allocate and free it."""

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype, device: torch.device | str):
        self.pieces = [torch.empty(length, dtype=dtype, device=device) for length in lengths]

    def allocate(self, number: int) -> None:
        self.pieces[number].untyped_storage().resize_(self.pieces[number].nbytes)

    def release(self, number: int) -> None:
        self.pieces[number].untyped_storage().resize_(0)


class _Pages:
    """One address range in which every piece starts at a page. Writing allocates pages; `release`
    frees them.
    """

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype):
        spans = [-(-length * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE for length in lengths]
        starts = [sum(spans[:number]) for number in range(len(spans))]
        self._spans = [*zip(starts, spans, strict=True)]
        self._map = mmap.mmap(
            -1, max(sum(spans), mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # not supported by the kernel
                # every visit writes all of a piece: 512 times fewer page faults
                self._map.madvise(mmap.MADV_HUGEPAGE)
        flat = torch.frombuffer(self._map, dtype=dtype)
        at = [start // dtype.itemsize for start in starts]
        self.pieces = [
            flat[start : start + length] for start, length in zip(at, lengths, strict=True)
        ]

    def allocate(self, number: int) -> None:
        pass

    def release(self, number: int) -> None:
        start, span = self._spans[number]
        if span:
            self._map.madvise(mmap.MADV_DONTNEED, start, span)
