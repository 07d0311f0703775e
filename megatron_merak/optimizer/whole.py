"""A parameter that ranks have parts of, brought together for a step that needs all of it."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.buffers import ParameterBuffer
from ..parallel.scattered import own_span
from ..plan import TensorSharding
from ..tensor_parallel.sequence import stack


class Whole:
    """Parameter ``name`` of ``buffer``, and how to gather tensors of its shape.

    tensor: how tensor-parallel ranks divide it. tp: these ranks, None for one. sharing: the data-parallel ranks that
    share the buffer, None where it is not sharded.

    divided: this rank does not have all of it by itself. here: whether this rank steps it: where one data-parallel rank
    owns a parameter alone, the others have nothing to do with it.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        name: str,
        tensor: TensorSharding,
        tp: dist.ProcessGroup | None,
        sharing: dist.ProcessGroup | None,
    ):
        slot = buffer.slots[name]
        self.shape, self.stored, self._tensor = tensor.shape, torch.Size(slot.shape), tensor
        self.tp = tp if tensor.dim is not None else None
        self.spans = [(slot.start, slot.stop)]
        bucket = next(bucket for bucket in buffer.buckets if bucket.start <= slot.start < bucket.stop)
        if buffer.sharded and bucket.sharded:
            count = dist.get_world_size(sharing)
            length = (bucket.stop - bucket.start) // count
            starts = [bucket.start + number * length for number in range(count)]
            self.spans = [(max(slot.start, low), min(slot.stop, low + length)) for low in starts]
        self.spans = [(low - slot.start, max(high, low) - slot.start) for low, high in self.spans]
        owners = [number for number, (low, high) in enumerate(self.spans) if low < high]
        self.owner = owners[0] if owners else 0  # the first data-parallel rank that owns some of it
        self.sharing = sharing if len(owners) > 1 else None
        own = own_span(buffer, name)
        self._span = (own[0] - slot.start, own[1] - slot.start)
        self.here = own[0] < own[1] or self.sharing is not None
        self.divided = self.tp is not None or self.sharing is not None or self.stored != self.shape

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """What this rank owns of several tensors, flat fp32, as all of them: [n, *shape]. Collective over the ranks
        that have parts."""
        local = self._local(parts)
        return self._join(local[None] if self.tp is None else stack(local, self.tp))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks among which `sent` and its inverses exchange parts; others may have copies of these parts."""
        return self.sharing if self.tp is None else self.tp

    def sent(self, parts: Sequence[Tensor]) -> Tensor:
        """What this rank gives to one that puts several tensors together, flat. Parts are what it owns, flat fp32."""
        return torch.stack([part.flatten() for part in parts]) if self.tp is None else self._local(parts)

    def lengths(self, count: int) -> list[int]:
        """How many elements of ``count`` tensors each rank of `group` gives, and takes back."""
        if self.tp is None:
            return [count * (high - low) for low, high in self.spans]
        return [count * self.stored.numel()] * self.tp.size()

    def put_together(self, pieces: Sequence[Tensor]) -> Tensor:
        """What all ranks of `group` have `sent`, as all of the tensors: [n, *shape]."""
        if self.tp is not None:
            return self._join(torch.stack([piece.view(-1, *self.stored) for piece in pieces]))
        spans = [high - low for low, high in self.spans]
        flat = [piece.view(-1, span) for piece, span in zip(pieces, spans, strict=True) if span]
        return self._join(torch.cat(flat, 1).view(1, -1, *self.stored))

    def taken_apart(self, whole: Tensor) -> list[Tensor]:
        """The inverse: of tensors [n, *shape], what each rank of `group` takes back, flat."""
        ranks = 1 if self.tp is None else self.tp.size()
        found = [whole] if self._tensor.dim is None else [self._cut(whole, rank, ranks) for rank in range(ranks)]
        if self.tp is not None:
            return [local.flatten() for local in found]
        return [found[0].flatten(1)[:, low:high].flatten() for low, high in self.spans]

    def take(self, piece: Tensor, parts: Sequence[Tensor]) -> None:
        """Copy what this rank took back into the parts that it owns, whose padding stays."""
        if self.tp is None:
            found = piece.view(len(parts), -1)
        else:
            low, high = self._span
            found = piece.view(len(parts), -1)[:, low:high]
        inside = self._inside(piece.device)
        for new, part in zip(found, parts, strict=True):
            part.copy_(new if inside is None else torch.where(inside, new, part))

    def _inside(self, device: torch.device) -> Tensor | None:
        """Which of the elements that this rank owns are not padding; None: all."""
        rank, ranks = (0, 1) if self.tp is None else (self.tp.rank(), self.tp.size())
        dim = self._tensor.dim
        length = 0 if dim is None else sum(stop - start for start, stop in self._tensor.intervals(rank, ranks))
        if dim is None or length == self.stored[dim]:
            return None
        inside = torch.zeros(self.stored, dtype=torch.bool, device=device)
        inside.narrow(dim, 0, length).fill_(True)
        low, high = self._span
        return inside.view(-1)[low:high]

    def _local(self, parts: Sequence[Tensor]) -> Tensor:
        """What this tensor-parallel rank has of several tensors, [n, *stored]. Collective over `sharing`."""
        local = torch.stack([part.flatten() for part in parts])
        if self.sharing is not None:
            most = max(high - low for low, high in self.spans)
            padded = torch.nn.functional.pad(local, (0, most - local.shape[1]))
            found = stack(padded, self.sharing)
            local = torch.cat([of[:, : high - low] for of, (low, high) in zip(found, self.spans, strict=True)], 1)
        return local.view(-1, *self.stored)

    def _join(self, ranks: Tensor) -> Tensor:
        """The parts of all tensor-parallel ranks [ranks, n, *stored] as [n, *shape]."""
        if self._tensor.dim is None:
            return ranks[0]
        whole = ranks.new_empty(ranks.shape[1], *self.shape)
        for rank, part in enumerate(ranks):
            for here, there in self._places(rank, len(ranks), part, whole):
                there.copy_(here)
        return whole

    def _cut(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """The part of a tensor-parallel rank of tensors [n, *shape], padded with zeros: [n, *stored]."""
        local = whole.new_zeros(whole.shape[0], *self.stored)
        for here, there in self._places(rank, ranks, local, whole):
            here.copy_(there)
        return local

    def own(self, whole: Tensor, part: Tensor) -> None:
        """The inverse, for one tensor: what this rank owns of ``whole`` into ``part``, whose padding stays."""
        low, high = self._span
        if self._tensor.dim is None:
            part.copy_(whole.flatten()[low:high])
            return
        local = part.new_zeros(self.stored)
        local.view(-1)[low:high] = part
        rank, ranks = (0, 1) if self.tp is None else (self.tp.rank(), self.tp.size())
        for here, there in self._places(rank, ranks, local[None], whole[None]):
            here.copy_(there)
        part.copy_(local.view(-1)[low:high])

    def _places(self, rank: int, ranks: int, local: Tensor, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Views of the same elements in a rank's part and in all, both with a dimension in front."""
        dim, found, offset = self._tensor.dim + 1, [], 0
        for start, stop in self._tensor.intervals(rank, ranks):
            length = stop - start
            found.append((local.narrow(dim, offset, length), whole.narrow(dim, start, length)))
            offset += length
        return found
