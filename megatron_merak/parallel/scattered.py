"""State of parameters that lies parameter by parameter, where a flat tensor of all of them would be a waste."""

from collections.abc import Collection, Mapping, Sequence

import torch

from .buffers import Bucket, Flat, ParameterBuffer


class Scattered:
    """One kind of state of some parameters of ``buffer``, fp32, of their shape.

    names: the parameters that have it, on whatever rank of those that share the buffer. parts: of each that this rank
    owns something of, that: flat, as `own_span` cuts it.
    """

    def __init__(self, buffer: ParameterBuffer, names: Collection[str], parts: Mapping[str, torch.Tensor]):
        self.buffer, self.names, self.parts = buffer, names, parts

    def spread(self, buckets: Sequence[Bucket] | None = None) -> Flat:
        """`buffer.main_grad` with what this rank owns at its places; its other elements stay. Of ``buckets``, all by
        default, which have memory then."""
        flat = self.buffer.main_grad
        buckets = self.buffer.buckets if buckets is None else buckets
        self.buffer.allocate(flat, buckets)
        for (start, stop), part in self._places(buckets):
            flat[start:stop].copy_(part)
        return flat

    def take(self, buckets: Sequence[Bucket]) -> None:
        """The inverse."""
        for (start, stop), part in self._places(buckets):
            part.copy_(self.buffer.main_grad[start:stop])

    def _places(self, buckets: Sequence[Bucket]) -> list[tuple[tuple[int, int], torch.Tensor]]:
        names = (name for bucket in buckets for name in bucket.names if name in self.parts)
        return [(own_span(self.buffer, name), self.parts[name]) for name in names]


def own_span(buffer: ParameterBuffer, name: str) -> tuple[int, int]:
    """Elements [start, stop) of the flat tensors that this rank owns of a parameter, which lies in one bucket; empty
    where others own all of it."""
    slot = buffer.slots[name]
    for start, stop, _ in buffer.owned:
        first, last = max(start, slot.start), min(stop, slot.stop)
        if first < last:
            return first, last
    return slot.start, slot.start
