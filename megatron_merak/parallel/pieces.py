"""A flat tensor that has memory only where it is in use."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Pieces:
    """A flat tensor in pieces that are allocated and released one by one. Views of a piece, which can be made while it
    is allocated, stay valid: they read its new memory once it is allocated again, which has arbitrary values.

    bounds: [start, stop) of each piece, contiguous from 0 on. named: (start, stop, shape) of views to be made at once,
    name -> view in ``named``. ``pieces[start:stop]``: a view, within one piece.
    """

    def __init__(
        self,
        bounds: Sequence[tuple[int, int]],
        named: Mapping[str, tuple[int, int, tuple[int, ...]]],
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        self._starts = [start for start, _ in bounds]
        self._pieces: list[Tensor] = []
        self.named: dict[str, Tensor] = {}
        within: dict[int, list[str]] = {}
        for name, (start, _, _) in named.items():
            within.setdefault(self._piece_at(start), []).append(name)
        for number, (start, stop) in enumerate(bounds):
            self._pieces.append(torch.empty(stop - start, dtype=dtype, device=device))
            for name in within.get(number, ()):
                first, last, shape = named[name]
                self.named[name] = self[first:last].view(shape)
            self.release(number)

    def __len__(self) -> int:
        """How many pieces there are."""
        return len(self._pieces)

    def __getitem__(self, span: slice) -> Tensor:
        number = self._piece_at(span.start)
        start = self._starts[number]
        assert span.stop - start <= len(self._pieces[number]), f"{span} is not within a piece"
        return self._pieces[number][span.start - start : span.stop - start]

    def _piece_at(self, place: int) -> int:
        return bisect_right(self._starts, place) - 1

    def piece(self, number: int) -> Tensor:
        return self._pieces[number]

    def allocated(self, number: int) -> bool:
        piece = self._pieces[number]
        return not len(piece) or piece.untyped_storage().nbytes() > 0

    def allocate(self, number: int) -> None:
        """Give a piece memory, if it has none."""
        if not self.allocated(number):
            piece = self._pieces[number]
            piece.untyped_storage().resize_(piece.nbytes)

    def release(self, number: int) -> None:
        self._pieces[number].untyped_storage().resize_(0)

    def release_all(self) -> None:
        for number in range(len(self)):
            self.release(number)
