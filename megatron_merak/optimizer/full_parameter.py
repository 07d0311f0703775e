"""A sharded parameter, gathered for an optimizer step that needs the full tensor."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.buffers import ParameterBuffer
from ..parallel.scattered import own_span
from ..plan import TensorSharding
from ..tensor_parallel.sequence import stack


class FullParameter:
    """Gathers and splits tensors in the shape of one parameter, of which this rank may own a shard.

    Its methods exchange fp32 tensors: ``shards`` are flat and are what this rank owns of several
    such tensors.

    name:        of the parameter in ``buffer``.
    tensor:      how it is sharded over tensor-parallel ranks.
    tp:          these ranks; None for a single one.
    shard_group: the data-parallel ranks that the buffer is sharded over; None where it is not
                 sharded.

    Attributes:
    sharded:      whether this rank owns less than the full parameter.
    participates: whether this rank takes part in stepping it. False if another data-parallel rank
                  owns all of it.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        name: str,
        tensor: TensorSharding,
        tp: dist.ProcessGroup | None,
        shard_group: dist.ProcessGroup | None,
    ):
        slot = buffer.slots[name]
        self.shape = tensor.shape
        self.stored = torch.Size(slot.shape)
        self._tensor = tensor
        self.tp = tp if tensor.dim is not None else None
        self.spans = [(slot.start, slot.stop)]
        bucket = next(
            bucket for bucket in buffer.buckets if bucket.start <= slot.start < bucket.stop
        )
        if bucket.sharded:
            count = dist.get_world_size(shard_group)
            length = (bucket.stop - bucket.start) // count
            starts = [bucket.start + number * length for number in range(count)]
            self.spans = [(max(slot.start, low), min(slot.stop, low + length)) for low in starts]
        self.spans = [(low - slot.start, max(high, low) - slot.start) for low, high in self.spans]
        owners = [number for number, (low, high) in enumerate(self.spans) if low < high]
        self.owner = owners[0] if owners else 0  # the first data-parallel rank that owns some of it
        self.shard_group = shard_group if len(owners) > 1 else None
        own = own_span(buffer, name)
        self._span = (own[0] - slot.start, own[1] - slot.start)
        self.participates = own[0] < own[1] or self.shard_group is not None
        self.sharded = (
            self.tp is not None or self.shard_group is not None or self.stored != self.shape
        )

    def gather(self, shards: Sequence[Tensor]) -> Tensor:
        """Return n full tensors [n, *shape], given this rank's shards. Collective over the ranks
        that have shards.
        """
        local = self._local(shards)
        return self._join(local[None] if self.tp is None else stack(local, self.tp))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that exchange `outgoing` shards; other ranks may have copies of these
        shards.
        """
        return self.shard_group if self.tp is None else self.tp

    def outgoing(self, shards: Sequence[Tensor]) -> Tensor:
        """Return what this rank sends to the rank that assembles the full tensors."""
        return (
            torch.stack([shard.flatten() for shard in shards])
            if self.tp is None
            else self._local(shards)
        )

    def lengths(self, count: int) -> list[int]:
        """Return how many elements each rank of `group` sends, and gets back, of ``count``
        tensors.
        """
        if self.tp is None:
            return [count * (high - low) for low, high in self.spans]
        return [count * self.stored.numel()] * self.tp.size()

    def assemble(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the full tensors [n, *shape], given the `outgoing` pieces of all ranks of
        `group`.
        """
        if self.tp is not None:
            return self._join(torch.stack([piece.view(-1, *self.stored) for piece in pieces]))
        spans = [high - low for low, high in self.spans]
        flat = [piece.view(-1, span) for piece, span in zip(pieces, spans, strict=True) if span]
        return self._join(torch.cat(flat, 1).view(1, -1, *self.stored))

    def split(self, full: Tensor) -> list[Tensor]:
        """Split full tensors [n, *shape] into what each rank of `group` gets back, flat; the
        inverse of `assemble`.
        """
        ranks = 1 if self.tp is None else self.tp.size()
        shards = (
            [full]
            if self._tensor.dim is None
            else [self._cut(full, rank, ranks) for rank in range(ranks)]
        )
        if self.tp is not None:
            return [local.flatten() for local in shards]
        return [shards[0].flatten(1)[:, low:high].flatten() for low, high in self.spans]

    def store(self, piece: Tensor, shards: Sequence[Tensor]) -> None:
        """Copy what this rank got back into its shards, except their padding."""
        if self.tp is None:
            values = piece.view(len(shards), -1)
        else:
            low, high = self._span
            values = piece.view(len(shards), -1)[:, low:high]
        inside = self._inside(piece.device)
        for new, shard in zip(values, shards, strict=True):
            shard.copy_(new if inside is None else torch.where(inside, new, shard))

    def _inside(self, device: torch.device) -> Tensor | None:
        """Return the mask of this rank's elements that are not padding; None if none is."""
        rank, ranks = (0, 1) if self.tp is None else (self.tp.rank(), self.tp.size())
        dim = self._tensor.dim
        length = (
            0
            if dim is None
            else sum(stop - start for start, stop in self._tensor.intervals(rank, ranks))
        )
        if dim is None or length == self.stored[dim]:
            return None
        inside = torch.zeros(self.stored, dtype=torch.bool, device=device)
        inside.narrow(dim, 0, length).fill_(True)
        low, high = self._span
        return inside.view(-1)[low:high]

    def _local(self, shards: Sequence[Tensor]) -> Tensor:
        """Return this tensor-parallel rank's tensors [n, *stored]. Collective over
        `shard_group`.
        """
        local = torch.stack([shard.flatten() for shard in shards])
        if self.shard_group is not None:
            most = max(high - low for low, high in self.spans)
            padded = torch.nn.functional.pad(local, (0, most - local.shape[1]))
            gathered = stack(padded, self.shard_group)
            local = torch.cat(
                [of[:, : high - low] for of, (low, high) in zip(gathered, self.spans, strict=True)],
                1,
            )
        return local.view(-1, *self.stored)

    def _join(self, ranks: Tensor) -> Tensor:
        """Return the full tensors [n, *shape], given those of all tensor-parallel ranks [ranks, n,
        *stored].
        """
        if self._tensor.dim is None:
            return ranks[0]
        full = ranks.new_empty(ranks.shape[1], *self.shape)
        for rank, local in enumerate(ranks):
            for local_view, full_view in self._views(rank, len(ranks), local, full):
                full_view.copy_(local_view)
        return full

    def _cut(self, full: Tensor, rank: int, ranks: int) -> Tensor:
        """Return the shard of a tensor-parallel rank, padded with zeros: [n, *stored] of [n,
        *shape].
        """
        local = full.new_zeros(full.shape[0], *self.stored)
        for local_view, full_view in self._views(rank, ranks, local, full):
            local_view.copy_(full_view)
        return local

    def extract(self, full: Tensor, shard: Tensor) -> None:
        """Copy what this rank owns of one full tensor into ``shard``, except its padding; the
        inverse of `gather`.
        """
        low, high = self._span
        if self._tensor.dim is None:
            shard.copy_(full.flatten()[low:high])
            return
        local = shard.new_zeros(self.stored)
        local.view(-1)[low:high] = shard
        rank, ranks = (0, 1) if self.tp is None else (self.tp.rank(), self.tp.size())
        for local_view, full_view in self._views(rank, ranks, local[None], full[None]):
            local_view.copy_(full_view)
        shard.copy_(local.view(-1)[low:high])

    def _views(
        self, rank: int, ranks: int, local: Tensor, full: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of views of the same elements in a rank's tensors [n, *stored] and in [n,
        *shape].
        """
        assert self._tensor.dim is not None, "a replicated tensor has no views of its parts"
        dim = self._tensor.dim + 1
        spans = self._tensor.intervals(rank, ranks)
        if self._tensor.within is not None:
            ((first, last),) = spans
            full = full.narrow(dim, first, last - first)
            dim = self._tensor.within + 1
            spans = self._tensor.features(rank)
        views = []
        offset = 0
        for start, stop in spans:
            length = stop - start
            views.append((local.narrow(dim, offset, length), full.narrow(dim, start, length)))
            offset += length
        return views
