"""All-gather the weights of a sharded model to every rank, a bucket of full tensors at a time.

Every rank that has shards of a bucket's tensors broadcasts them in one message to the ranks of its
replica:

    bucket   embed [96, 32]    rank 0: rows 0-48 | rank 1: rows 48-96
             norm [32]         rank 0
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.shard import Part, Shard, local_shape, overlaps_of_rectangle, part_of
from ..parallel.agree import gather_json
from ..parallel.mesh import Mesh

_ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class _Part:
    """The shard of a tensor that one rank of a replica sends."""

    rank: int
    part: Part

    def shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        return local_shape(full, *self.part)


@dataclass(frozen=True)
class FullTensor:
    """A full tensor of the model."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[_Part, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class NamedWeights:
    """The full tensors of which ``shards`` are parts: first those of ``names``, in that order, then
    the others.

    shards: of this rank.
    dtype:  to which floating-point tensors are cast before they are sent; None: they keep theirs.

    ``tensors``: name, dtype and shape of each. Creating the object, and iterating over `buckets` to
    the end, is
    collective over all ranks.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        names: Sequence[str],
        mesh: Mesh,
        dtype: torch.dtype | None = None,
    ):
        self.mesh = mesh
        self._own_shards = {shard.name: shard for shard in shards}
        owned = [
            (s.name, s.shape, str(s.tensor.dtype).removeprefix("torch."), *s.part)
            for s in shards
            if s.owner
        ]
        kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        parts: dict[str, list[_Part]] = {}
        for rank, reports in enumerate(gather_json(owned, mesh.control, "cpu")):
            for name, shape, kind, *fields in reports:
                stored = getattr(torch, kind)
                kinds[name] = (
                    tuple(shape),
                    stored if dtype is None or not stored.is_floating_point else dtype,
                )
                part = _Part(_alike(rank, mesh), part_of(*fields))
                parts.setdefault(name, []).append(part)
        order = [name for name in names if name in parts]
        order += sorted(parts.keys() - {*order})
        self.tensors = tuple(FullTensor(name, *kinds[name], tuple(parts[name])) for name in order)

    def buckets(self, nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield lists of names and tensors on this rank's device, ``nbytes`` at most, or one larger
        tensor.
        """
        bucket: list[FullTensor] = []
        for tensor in self.tensors:
            if bucket and sum(each.nbytes for each in bucket) + tensor.nbytes > nbytes:
                yield self._gather(bucket)
                bucket = []
            bucket.append(tensor)
        if bucket:
            yield self._gather(bucket)

    @torch.no_grad()
    def _gather(self, bucket: list[FullTensor]) -> list[tuple[str, Tensor]]:
        device = self.mesh.device
        gathered = {
            tensor.name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            for tensor in bucket
        }
        for rank in sorted({part.rank for tensor in bucket for part in tensor.parts}):
            sent = [
                (tensor, part) for tensor in bucket for part in tensor.parts if part.rank == rank
            ]
            message, views = _message_and_views(sent, device)
            for (tensor, part), view in zip(sent, views, strict=True):
                if not self._fetches(tensor, part):
                    continue
                shard = self._own_shards[tensor.name]
                if shard.fetch is not None:
                    shard.fetch()
                if rank == self.mesh.rank:
                    view.copy_(shard.tensor.detach())
            experts = self.mesh.experts
            group = self.mesh.model if experts is None else experts.weights
            if group is not None:
                dist.broadcast(message, rank, group=group)
            for (tensor, part), view in zip(sent, views, strict=True):
                _place(gathered[tensor.name], part, view)
        return list(gathered.items())

    def _fetches(self, tensor: FullTensor, part: _Part) -> bool:
        """Whether this rank takes part in the gather of what another one, or itself, sends: of those
        that have it, one in each replica sends it, or one in several that divide experts.
        """
        mesh = self.mesh
        if mesh.experts is None or part.rank == mesh.rank:
            return part.rank == mesh.rank
        shard = self._own_shards.get(tensor.name)
        stage = mesh.grid.coordinates(part.rank)[3]
        return shard is not None and stage == mesh.pp_rank and shard.part == part.part


def _alike(owner: int, mesh: Mesh) -> int:
    """Return the rank that has what an owner has, in this rank's replica, or in the replicas that
    divide experts with it. Owners are in the first ones.
    """
    grid = mesh.grid
    tp, cp, _, pp = grid.coordinates(owner)
    if mesh.experts is None:
        return grid.rank(tp, cp, mesh.dp_rank, pp)
    divided = mesh.experts.divided
    copy = mesh.copy_rank // divided * divided + grid.copy_rank(owner)
    same = grid.same_weights(grid.rank(tp, 0, 0, pp))
    return same[copy]


def _message_and_views(
    sent: Sequence[tuple[FullTensor, _Part]], device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Return one message, and views of it for each shard."""
    starts = []
    end = 0
    sizes = [
        torch.Size(part.shape(tensor.shape)).numel() * tensor.dtype.itemsize
        for tensor, part in sent
    ]
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    message = torch.zeros(end, dtype=torch.uint8, device=device)
    views = [
        message[start : start + size].view(tensor.dtype).view(part.shape(tensor.shape))
        for start, size, (tensor, part) in zip(starts, sizes, sent, strict=True)
    ]
    return message, views


def _place(full: Tensor, part: _Part, values: Tensor) -> None:
    whole = [(0, extent) for extent in full.shape]
    for source, target in overlaps_of_rectangle(tuple(full.shape), part.part, whole):
        full[target].copy_(values[source])
