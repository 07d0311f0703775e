"""The conjugate pairs between replicated and sharded regions: what each does forward, its partner
does backward.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3. ``group`` None, or of one rank, makes each
the identity.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .sequence import stack

Group = dist.ProcessGroup | None
Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


def group_size(group: Group) -> int:
    return 1 if group is None else group.size()


def group_rank(group: Group) -> int:
    return 0 if group is None else group.rank()


def _reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def _split(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size(), -1)[group.rank()].contiguous()


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, -1)


def _own_entry(stacked: Tensor, group: dist.ProcessGroup) -> Tensor:
    return stacked[group.rank()]


def _identity(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, forward, backward):
        ctx.group = group
        ctx.pair = backward
        return forward(x, group)

    @staticmethod
    def backward(ctx, grad):
        return ctx.pair(grad, ctx.group), None, None, None


def paired(x: Tensor, group: Group, forward: Collective, backward: Collective) -> Tensor:
    """Apply ``forward`` to x, and ``backward`` to its gradient; neither in a group of one rank."""
    if group is None or group.size() == 1:
        return x
    return _Pair.apply(x, group, forward, backward)


def copy_to_tensor_model_parallel_region(x: Tensor, group: Group) -> Tensor:
    """Identity; backward sums the gradient over ``group``."""
    return paired(x, group, _identity, _reduce)


def reduce_from_tensor_model_parallel_region(x: Tensor, group: Group) -> Tensor:
    """Sum over ``group``; backward is the identity."""
    return paired(x, group, _reduce, _identity)


def scatter_to_tensor_model_parallel_region(x: Tensor, group: Group) -> Tensor:
    """This rank's slice [..., h / n] of the last dimension of x [..., h]; backward gathers."""
    return paired(x, group, _split, _gather)


def gather_from_tensor_model_parallel_region(x: Tensor, group: Group) -> Tensor:
    """All slices x [..., h / n] side by side, [..., h]; backward takes this rank's slice."""
    return paired(x, group, _gather, _split)


def stack_over_tensor_model_parallel_region(x: Tensor, group: Group) -> Tensor:
    """All ranks' x [...], one behind the other: [n, ...].

    Backward takes this rank's gradient: every rank must compute the same from what is stacked.
    """
    return x.unsqueeze(0) if group_size(group) == 1 else _Pair.apply(x, group, stack, _own_entry)
