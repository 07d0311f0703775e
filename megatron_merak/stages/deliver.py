"""Send the first rank's weights to the ranks that have shards of them, in messages of bounded size.

The first rank sends every rank of the first replica its shards. Each of these ranks sends them on to the ranks with the
same coordinates in other replicas, along a binary tree. No rank needs more memory than its own shards and one message.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

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
    """The description of a shard, which other ranks get."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None
    intervals: Intervals

    @classmethod
    def of(cls, shard: Shard) -> "_Part":
        return cls(shard.name, tuple(shard.shape), shard.tensor.dtype, shard.dim, shard.intervals)

    def to_json(self) -> list:
        return [self.name, self.shape, str(self.dtype).removeprefix("torch."), self.dim, self.intervals]

    @classmethod
    def from_json(cls, fields: list) -> "_Part":
        name, shape, dtype, dim, intervals = fields
        return cls(name, tuple(shape), getattr(torch, dtype), dim, tuple(map(tuple, intervals)))


@dataclass(frozen=True)
class _Piece:
    """Indices [start, stop) of a tensor along ``dim`` (None: all of it), which begin at ``offset`` in the shard."""

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

    shards: of this rank; ranks that differ only in their replica pass shards with the same description.
    source: read on the first rank only.

    Collective over all ranks, by ``mesh.control``.
    """
    parts = [_Part.of(shard) for shard in shards]
    descriptions = gather_json([part.to_json() for part in parts] if mesh.dp_rank == 0 else None, mesh.control, "cpu")
    tensors = {shard.name: shard.tensor.detach() for shard in shards}
    if mesh.rank == 0:
        assert source is not None, "the first rank reads it"
        fill(shards, source)
        for rank, described in enumerate(descriptions):
            if rank != 0 and described is not None:
                for message in _messages([_Part.from_json(fields) for fields in described]):
                    _send(message, partial(_read, source), rank, mesh)
    elif mesh.dp_rank == 0:
        for message in _messages(parts):
            _receive(message, tensors, 0, mesh)
    broadcast_to_replicas(shards, mesh)


def broadcast_to_replicas(shards: Sequence[Shard], mesh: Mesh) -> None:
    """Copy the values of the first replica's shards to those of all others. Collective over all ranks."""
    parts = [_Part.of(shard) for shard in shards]
    tensors = {shard.name: shard.tensor.detach() for shard in shards}
    tp, cp, dp, pp = mesh.grid.coordinates(mesh.rank)
    span = 1
    while span < mesh.grid.dp:
        if dp < span and dp + span < mesh.grid.dp:
            for message in _messages(parts):
                _send(message, lambda piece: _view(tensors, piece), mesh.grid.rank(tp, cp, dp + span, pp), mesh)
        elif span <= dp < 2 * span:
            for message in _messages(parts):
                _receive(message, tensors, mesh.grid.rank(tp, cp, dp - span, pp), mesh)
        span *= 2


def _messages(parts: Sequence[_Part]) -> Iterator[list[_Piece]]:
    message: list[_Piece] = []
    size = 0
    for part in parts:
        for piece in _pieces(part):
            if message and size + piece.nbytes > MESSAGE:
                yield message
                message = []
                size = 0
            message.append(piece)
            size += piece.nbytes
    if message:
        yield message


def _pieces(part: _Part) -> Iterator[_Piece]:
    if not part.shape:
        yield _Piece(part, None, 0, 0, offset=0)
        return
    dim = 0 if part.dim is None else part.dim
    intervals = ((0, part.shape[0]),) if part.dim is None else part.intervals
    row = torch.Size(part.shape).numel() * part.dtype.itemsize // max(part.shape[dim], 1)
    step = max(1, MESSAGE // max(row, 1))
    offset = 0
    for start, stop in intervals:
        for first in range(start, stop, step):
            last = min(first + step, stop)
            yield _Piece(part, dim, first, last, offset=offset)
            offset += last - first


def _allocate(message: list[_Piece]) -> tuple[Tensor, list[Tensor]]:
    """Memory for a message, and a view of it for every piece."""
    starts = []
    end = 0
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
    data, views = _allocate(message)
    for piece, view in zip(message, views, strict=True):
        view.copy_(values(piece))
    dist.send(data, group=mesh.control, group_dst=rank)


def _receive(message: list[_Piece], tensors: dict[str, Tensor], rank: int, mesh: Mesh) -> None:
    data, views = _allocate(message)
    dist.recv(data, group=mesh.control, group_src=rank)
    for piece, view in zip(message, views, strict=True):
        _view(tensors, piece).copy_(view)


def _view(tensors: dict[str, Tensor], piece: _Piece) -> Tensor:
    tensor = tensors[piece.part.name]
    return tensor if piece.dim is None else tensor.narrow(piece.dim, piece.offset, piece.stop - piece.start)


def _read(source: Source, piece: _Piece) -> Tensor:
    if piece.dim is None:
        return source.read(piece.part.name)
    return source.read(piece.part.name, piece.dim, ((piece.start, piece.stop),))
