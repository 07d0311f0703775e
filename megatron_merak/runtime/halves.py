"""Splitting a micro-batch into two halves that take turns: one computes while the other's collectives are under way."""

from collections.abc import Mapping

from torch import Tensor


def halve(batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The first and the second half of the samples, the first one larger by one where they are odd in number.

    Tensors of one dimension or more have a sample per entry of their first; numbers go to both halves. A batch that
    does not split (a single sample, tensors of other leading extents) is returned whole.
    """
    extents = {value.shape[0]: None for value in batch.values() if isinstance(value, Tensor) and value.dim()}
    samples = next(iter(extents), 1)
    if len(extents) != 1 or samples < 2:
        return [dict(batch)]
    middle = (samples + 1) // 2
    return [
        {name: value[rows] if isinstance(value, Tensor) and value.dim() else value for name, value in batch.items()}
        for rows in (slice(0, middle), slice(middle, samples))
    ]
