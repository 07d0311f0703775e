"""Splits a micro-batch into two halves, so that one computes while the collectives of the other are
in flight.
"""

from collections.abc import Mapping

from torch import Tensor


def halve(batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the two halves of a batch's samples; of an odd number the first half has one more.

    Tensors are split along their first dimension; scalars and other values go to both halves. A
    batch that cannot be split (a single sample, or tensors that differ in their first dimension) is
    returned as the only entry.
    """
    sizes = {
        value.shape[0]: None
        for value in batch.values()
        if isinstance(value, Tensor) and value.dim()
    }
    samples = next(iter(sizes), 1)
    if len(sizes) != 1 or samples < 2:
        return [dict(batch)]
    middle = (samples + 1) // 2
    return [
        {
            name: value[rows] if isinstance(value, Tensor) and value.dim() else value
            for name, value in batch.items()
        }
        for rows in (slice(0, middle), slice(middle, samples))
    ]
