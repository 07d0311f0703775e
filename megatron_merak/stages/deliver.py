"""Send the first rank's weights to the ranks that have shards of them, in messages of bounded size.

The first rank sends every rank of the first replica its shards. Each of these ranks sends them on
to the ranks with the same coordinates in other replicas, along a binary tree. No rank needs more
memory than its own shards and one message.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.hf import Source, fill
from ..checkpoint.shard import Part, Shard, local_shape, part_of
from ..parallel.agree import gather_json
from ..parallel.mesh import Mesh

MESSAGE = 1 << 26  # bytes, unless one row of a tensor has more
_ALIGNMENT = 16  # bytes; every piece of a message starts at a multiple


@dataclass(frozen=True)
class _ShardHeader:
    """The description of a shard, which other ranks get."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    part: Part

    @classmethod
    def of(cls, shard: Shard) -> "_ShardHeader":
        return cls(shard.name, tuple(shard.shape), shard.tensor.dtype, shard.part)

    def to_json(self) -> list:
        return [
            self.name,
            self.shape,
            str(self.dtype).removeprefix("torch."),
            *self.part,
        ]

    @classmethod
    def from_json(cls, fields: list) -> "_ShardHeader":
        name, shape, dtype, *part = fields
        return cls(name, tuple(shape), getattr(torch, dtype), part_of(*part))


@dataclass(frozen=True)
class _Piece:
    """Indices [start, stop) of a tensor along ``dim`` (None: all of it), which begin at ``offset``
    in the shard.
    """

    header: _ShardHeader
    dim: int | None
    start: int
    stop: int
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        slab = self.header.part[2]
        return local_shape(self.header.shape, self.dim, ((self.start, self.stop),), slab)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.header.dtype.itemsize


def deliver(
    shards: Sequence[Shard], source: Source | None, mesh: Mesh, experts: bool = False
) -> None:
    """Fill the shards of every rank from the first rank's ``source``, cast to their dtypes.

    shards:  of this rank; ranks that have the same weights pass shards with the same description.
    source:  read on the first rank only.
    experts: whether they are of experts that copies of a layer divide.

    Collective over all ranks, by ``mesh.control``.
    """
    headers = [_ShardHeader.of(shard) for shard in shards]
    first = mesh.same(experts)[0] == 0
    descriptions = gather_json(
        [header.to_json() for header in headers] if first else None,
        mesh.control,
        "cpu",
    )
    tensors = {shard.name: shard.tensor.detach() for shard in shards}
    if mesh.rank == 0:
        assert source is not None, "the first rank reads it"
        fill(shards, source)
        for rank, described in enumerate(descriptions):
            if rank != 0 and described is not None:
                for message in _messages([_ShardHeader.from_json(fields) for fields in described]):
                    _send(message, partial(_read, source), rank, mesh)
    elif first:
        for message in _messages(headers):
            _receive(message, tensors, 0, mesh)
    broadcast_to_replicas(shards, mesh, experts)


def broadcast_to_replicas(shards: Sequence[Shard], mesh: Mesh, experts: bool = False) -> None:
    """Copy the values of shards from the first of the ranks that have the same to the others.
    Collective over all ranks. experts: see ``deliver``.
    """
    headers = [_ShardHeader.of(shard) for shard in shards]
    tensors = {shard.name: shard.tensor.detach() for shard in shards}
    same = mesh.ranks_with_same(experts)
    place = same.index(mesh.rank)
    span = 1
    while span < len(same):
        if place < span and place + span < len(same):
            for message in _messages(headers):
                _send(
                    message,
                    lambda piece: _view(tensors, piece),
                    same[place + span],
                    mesh,
                )
        elif span <= place < 2 * span:
            for message in _messages(headers):
                _receive(message, tensors, same[place - span], mesh)
        span *= 2


def _messages(headers: Sequence[_ShardHeader]) -> Iterator[list[_Piece]]:
    message: list[_Piece] = []
    size = 0
    for header in headers:
        for piece in _pieces(header):
            if message and size + piece.nbytes > MESSAGE:
                yield message
                message = []
                size = 0
            message.append(piece)
            size += piece.nbytes
    if message:
        yield message


def _pieces(header: _ShardHeader) -> Iterator[_Piece]:
    if not header.shape:
        yield _Piece(header, None, 0, 0, offset=0)
        return
    dim, intervals, _ = header.part
    if dim is None:
        dim = 0
        intervals = ((0, header.shape[0]),)
    row = torch.Size(header.shape).numel() * header.dtype.itemsize // max(header.shape[dim], 1)
    step = max(1, MESSAGE // max(row, 1))
    offset = 0
    for start, stop in intervals:
        for first in range(start, stop, step):
            last = min(first + step, stop)
            yield _Piece(header, dim, first, last, offset=offset)
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
        data[start : start + piece.nbytes].view(piece.header.dtype).view(piece.shape)
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
    tensor = tensors[piece.header.name]
    return (
        tensor
        if piece.dim is None
        else tensor.narrow(piece.dim, piece.offset, piece.stop - piece.start)
    )


def _read(source: Source, piece: _Piece) -> Tensor:
    if piece.dim is None:
        return source.read(piece.header.name)
    values = source.read(piece.header.name, piece.dim, ((piece.start, piece.stop),))
    slab = piece.header.part[2]
    return values if slab is None else values.narrow(slab[0], slab[1], slab[2] - slab[1])
