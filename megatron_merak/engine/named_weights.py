"""Weights of a divided model brought to every rank, a bucket of whole tensors at a time.

Every rank that holds parts of a bucket's tensors sends them in one message to the ranks of its replica:

    bucket   embed [96, 32]    rank 0: rows 0-48 | rank 1: rows 48-96
             norm [32]         rank 0
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.shard import Intervals, Shard, local_shape
from ..parallel.agree import gather_json
from ..parallel.mesh import Mesh

_ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class _Part:
    """What one rank of a replica sends of a tensor."""

    rank: int
    dim: int | None
    intervals: Intervals

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return local_shape(whole, self.dim, self.intervals)


@dataclass(frozen=True)
class Whole:
    """A tensor of the model."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[_Part, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class NamedWeights:
    """The tensors that ``shards`` are parts of, in the order of ``names`` and what they do not name behind.

    shards: of this rank. dtype: what floating tensors are cast to, before they travel; None: they are as they are.
    ``wholes``: of all tensors. Making it, and iterating over `buckets` to the end, is collective over all ranks.
    """

    def __init__(self, shards: Sequence[Shard], names: Sequence[str], mesh: Mesh, dtype: torch.dtype | None = None):
        self.mesh, self._mine = mesh, {shard.name: shard for shard in shards}
        told = [
            (s.name, s.shape, str(s.tensor.dtype).removeprefix("torch."), s.dim, s.intervals) for s in shards if s.owner
        ]
        kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        parts: dict[str, list[_Part]] = {}
        for rank, reports in enumerate(gather_json(told, mesh.control, "cpu")):
            tp, cp, _, pp = mesh.grid.coordinates(rank)  # owners are of the first replica; this one is divided alike
            for name, shape, kind, dim, intervals in reports:
                held = getattr(torch, kind)
                kinds[name] = tuple(shape), held if dtype is None or not held.is_floating_point else dtype
                part = _Part(mesh.grid.rank(tp, cp, mesh.dp_rank, pp), dim, tuple(map(tuple, intervals)))
                parts.setdefault(name, []).append(part)
        order = [name for name in names if name in parts]
        order += sorted(parts.keys() - {*order})
        self.wholes = tuple(Whole(name, *kinds[name], tuple(parts[name])) for name in order)

    def buckets(self, nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Names and tensors, on this rank's device, of at most ``nbytes`` together unless a single one has more."""
        bucket: list[Whole] = []
        for whole in self.wholes:
            if bucket and sum(each.nbytes for each in bucket) + whole.nbytes > nbytes:
                yield self._brought(bucket)
                bucket = []
            bucket.append(whole)
        if bucket:
            yield self._brought(bucket)

    @torch.no_grad()
    def _brought(self, bucket: list[Whole]) -> list[tuple[str, Tensor]]:
        device = self.mesh.device
        found = {whole.name: torch.empty(whole.shape, dtype=whole.dtype, device=device) for whole in bucket}
        for rank in sorted({part.rank for whole in bucket for part in whole.parts}):
            sent = [(whole, part) for whole in bucket for part in whole.parts if part.rank == rank]
            message, views = _laid_out(sent, device)
            for (whole, _), view in zip(sent, views, strict=True) if rank == self.mesh.rank else ():
                shard = self._mine[whole.name]
                if shard.fetch is not None:
                    shard.fetch()
                view.copy_(shard.tensor.detach())
            if self.mesh.model is not None:
                dist.broadcast(message, rank, group=self.mesh.model)
            for (whole, part), view in zip(sent, views, strict=True):
                _place(found[whole.name], part, view)
        return list(found.items())


def _laid_out(sent: Sequence[tuple[Whole, _Part]], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """One message, and where in it each part lies."""
    starts, end = [], 0
    sizes = [torch.Size(part.shape(whole.shape)).numel() * whole.dtype.itemsize for whole, part in sent]
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    message = torch.zeros(end, dtype=torch.uint8, device=device)
    views = [
        message[start : start + size].view(whole.dtype).view(part.shape(whole.shape))
        for start, size, (whole, part) in zip(starts, sizes, sent, strict=True)
    ]
    return message, views


def _place(whole: Tensor, part: _Part, values: Tensor) -> None:
    if part.dim is None:
        whole.copy_(values)
        return
    offset = 0
    for start, stop in part.intervals:
        whole.narrow(part.dim, start, stop - start).copy_(values.narrow(part.dim, offset, stop - start))
        offset += stop - start
