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
        local = torch.stack([part.flatten() for part in parts])
        if self.sharing is not None:
            most = max(high - low for low, high in self.spans)
            padded = torch.nn.functional.pad(local, (0, most - local.shape[1]))
            found = stack(padded, self.sharing)
            local = torch.cat([of[:, : high - low] for of, (low, high) in zip(found, self.spans, strict=True)], 1)
        local = local.view(-1, *self.stored)
        if self._tensor.dim is None:
            return local
        ranks = local[None] if self.tp is None else stack(local, self.tp)
        whole = local.new_empty(len(parts), *self.shape)
        for rank, part in enumerate(ranks):
            for here, there in self._places(rank, len(ranks), part, whole):
                there.copy_(here)
        return whole

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
