"""State stored per parameter, where a flat tensor of all parameters would waste memory."""

from collections.abc import Collection, Mapping, Sequence

import torch

from .buffers import Bucket, Flat, ParameterBuffer


class Scattered:
    """One kind of state of some parameters of ``buffer``, fp32, of their shape.

    names: the parameters that have it, on any of the ranks that the buffer is sharded over.
    parts: this rank's shard of each parameter of which it owns something: flat, see `own_span`.
    """

    def __init__(
        self, buffer: ParameterBuffer, names: Collection[str], parts: Mapping[str, torch.Tensor]
    ):
        self.buffer = buffer
        self.names = names
        self.parts = parts

    def spread(self, buckets: Sequence[Bucket] | None = None) -> Flat:
        """Copy this rank's shards to their positions in `buffer.main_grad`, and return that.

        Other elements are unchanged.

        buckets: copy only these, for which memory is allocated; None: all.
        """
        flat = self.buffer.main_grad
        buckets = self.buffer.buckets if buckets is None else buckets
        self.buffer.allocate(flat, buckets)
        for (start, stop), part in self._spans(buckets):
            flat[start:stop].copy_(part)
        return flat

    def take(self, buckets: Sequence[Bucket]) -> None:
        """Copy from `buffer.main_grad` to this rank's shards, the inverse of `spread`."""
        for (start, stop), part in self._spans(buckets):
            part.copy_(self.buffer.main_grad[start:stop])

    def _spans(self, buckets: Sequence[Bucket]) -> list[tuple[tuple[int, int], torch.Tensor]]:
        names = (name for bucket in buckets for name in bucket.names if name in self.parts)
        return [(own_span(self.buffer, name), self.parts[name]) for name in names]


def own_span(buffer: ParameterBuffer, name: str) -> tuple[int, int]:
    """Return the elements [start, stop) of the flat tensors that this rank owns of a parameter.

    The span is empty where other ranks own all of it.
    """
    slot = buffer.slots[name]
    for start, stop, _ in buffer.owned:
        first = max(start, slot.start)
        last = min(stop, slot.stop)
        if first < last:
            return first, last
    return slot.start, slot.start
