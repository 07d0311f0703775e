"""Tensors of all ranks stacked, and tensors sharded along the sequence.

These are x [b, s, ...] in as many parts [b, s / n, ...] as there are ranks. A collective wants the
ranks' parts one behind the other, [n, b, s / n, ...]. Of a single sample that is x itself; of more
it is a copy.
"""

import torch.distributed as dist
from torch import Tensor

# Names since torch 2.13, and before.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def stacked(x: Tensor, parts: int) -> Tensor:
    """x [b, s, ...] -> its parts [n, b, s / n, ...], contiguous."""
    return x.unflatten(1, (parts, -1)).transpose(0, 1).contiguous()


def unstacked(parts: Tensor) -> Tensor:
    """[n, b, s / n, ...] -> [b, s, ...]: a view where b or n is 1."""
    return parts.transpose(0, 1).flatten(1, 2)


def stack(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' x [...], one behind the other: [n, ...]."""
    parts = x.new_empty(group.size(), *x.shape)
    gather_single(parts.flatten(0, 1), x.contiguous(), group=group)
    return parts
