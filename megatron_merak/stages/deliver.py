"""The first rank's weights brought to the ranks that hold parts of them, in messages of bounded size.

The first rank sends every rank of its replica what that rank holds. From there each part goes to the same place of the
other replicas, along a tree. No rank needs more memory than its own parts and one message.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.hf import Source, fill
from ..checkpoint.shard import Intervals, Shard
from ..parallel.agree import gather_json
from ..parallel.mesh import Mesh

MESSAGE = 1 << 26  # bytes, unless one row of a tensor has more
_ALIGNMENT = 16  # bytes; every piece of a message starts at a multiple


@dataclass(frozen=True)
class _Part:
    """A shard without its tensor: what another rank holds."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None
    intervals: Intervals

    @classmethod
    def of(cls, shard: Shard) -> "_Part":
        return cls(shard.name, tuple(shard.shape), shard.tensor.dtype, shard.dim, shard.intervals)

    def told(self) -> list:
        return [self.name, self.shape, str(self.dtype).removeprefix("torch."), self.dim, self.intervals]

    @classmethod
    def heard(cls, told: list) -> "_Part":
        name, shape, dtype, dim, intervals = told
        return cls(name, tuple(shape), getattr(torch, dtype), dim, tuple(map(tuple, intervals)))


@dataclass(frozen=True)
class _Piece:
    """Indices [start, stop) of a tensor along ``dim``, None for all of it; in the part they begin at ``offset``."""

    part: _Part
    dim: int | None
    start: int
    stop: int
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        if self.dim is None:
            return self.part.shape
        return (*self.part.shape[: self.dim], self.stop - self.start, *self.part.shape[self.dim + 1 :])

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.part.dtype.itemsize


def deliver(shards: Sequence[Shard], source: Source | None, mesh: Mesh) -> None:
    """Fill the shards of every rank from the first rank's ``source``, cast to their dtypes.

    shards: of this rank; ranks at the same place of different replicas pass shards of the same description. source:
    read on the first rank only. Collective over all ranks, by ``mesh.control``.
    """
    parts = [_Part.of(shard) for shard in shards]
    wanted = gather_json([part.told() for part in parts] if mesh.dp_rank == 0 else None, mesh.control, "cpu")
    held = {shard.name: shard.tensor.detach() for shard in shards}
    if mesh.rank == 0:
        fill(shards, source)
        for rank, described in enumerate(wanted):
            if rank != 0 and described is not None:
                for message in _messages([_Part.heard(told) for told in described]):
                    _send(message, lambda piece: _read(source, piece), rank, mesh)
    elif mesh.dp_rank == 0:
        for message in _messages(parts):
            _receive(message, held, 0, mesh)
    to_replicas(shards, mesh)


def to_replicas(shards: Sequence[Shard], mesh: Mesh) -> None:
    """Give the shards of every replica the values of the first one's. Collective over all ranks."""
    parts = [_Part.of(shard) for shard in shards]
    held = {shard.name: shard.tensor.detach() for shard in shards}
    tp, cp, place, pp = mesh.grid.coordinates(mesh.rank)
    span = 1
    while span < mesh.grid.dp:
        if place < span and place + span < mesh.grid.dp:
            for message in _messages(parts):
                _send(message, lambda piece: _view(held, piece), mesh.grid.rank(tp, cp, place + span, pp), mesh)
        elif span <= place < 2 * span:
            for message in _messages(parts):
                _receive(message, held, mesh.grid.rank(tp, cp, place - span, pp), mesh)
        span *= 2


def _messages(parts: Sequence[_Part]) -> Iterator[list[_Piece]]:
    message: list[_Piece] = []
    size = 0
    for part in parts:
        for piece in _pieces(part):
            if message and size + piece.nbytes > MESSAGE:
                yield message
                message, size = [], 0
            message.append(piece)
            size += piece.nbytes
    if message:
        yield message


def _pieces(part: _Part) -> Iterator[_Piece]:
    if not part.shape:
        yield _Piece(part, None, 0, 0, 0)
        return
    dim = 0 if part.dim is None else part.dim
    intervals = ((0, part.shape[0]),) if part.dim is None else part.intervals
    row = torch.Size(part.shape).numel() * part.dtype.itemsize // max(part.shape[dim], 1)
    step, offset = max(1, MESSAGE // max(row, 1)), 0
    for start, stop in intervals:
        for first in range(start, stop, step):
            last = min(first + step, stop)
            yield _Piece(part, dim, first, last, offset)
            offset += last - first


def _laid_out(message: list[_Piece]) -> tuple[Tensor, list[Tensor]]:
    """Memory for a message, and its view of every piece."""
    starts, end = [], 0
    for piece in message:
        starts.append(end)
        end += -(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT
    data = torch.zeros(end, dtype=torch.uint8)
    views = [
        data[start : start + piece.nbytes].view(piece.part.dtype).view(piece.shape)
        for piece, start in zip(message, starts, strict=True)
    ]
    return data, views


def _send(message: list[_Piece], values, rank: int, mesh: Mesh) -> None:
    data, views = _laid_out(message)
    for piece, view in zip(message, views, strict=True):
        view.copy_(values(piece))
    dist.send(data, group=mesh.control, group_dst=rank)


def _receive(message: list[_Piece], held: dict[str, Tensor], rank: int, mesh: Mesh) -> None:
    data, views = _laid_out(message)
    dist.recv(data, group=mesh.control, group_src=rank)
    for piece, view in zip(message, views, strict=True):
        _view(held, piece).copy_(view)


def _view(held: dict[str, Tensor], piece: _Piece) -> Tensor:
    tensor = held[piece.part.name]
    return tensor if piece.dim is None else tensor.narrow(piece.dim, piece.offset, piece.stop - piece.start)


def _read(source: Source, piece: _Piece) -> Tensor:
    if piece.dim is None:
        return source.read(piece.part.name)
    return source.read(piece.part.name, piece.dim, ((piece.start, piece.stop),))
