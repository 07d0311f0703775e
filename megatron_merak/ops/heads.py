"""Query, key and value heads as views of one product, with rotary embedding in place."""

import torch
from torch import Tensor

from .rotary import rotary_

Angles = tuple[Tensor, Tensor]


class _SplitHeads(torch.autograd.Function):
    """The heads are views of ``qkv``, so only that is saved; their gradients are written into one
    tensor.
    """

    @staticmethod
    def forward(ctx, qkv, heads, groups, cos, sin):
        ctx.sizes = heads, groups, groups
        ctx.save_for_backward(cos, sin)
        parts = qkv.detach().unflatten(-1, (heads + 2 * groups, -1))
        if cos is not None:
            turned = parts[:, :, : heads + groups]
            rotary_(turned, turned, cos, sin)
            torch.autograd.graph.increment_version(qkv)
        return parts.split(ctx.sizes, 2)

    @staticmethod
    def backward(ctx, *grads):
        cos, sin = ctx.saved_tensors
        batch, length, _, dim = grads[0].shape
        grad_merged = grads[0].new_empty((batch, length, sum(ctx.sizes), dim))
        into = grad_merged.split(ctx.sizes, 2)
        for part, grad in zip(into[:2], grads[:2], strict=True):
            if cos is None:
                part.copy_(grad)
            else:
                rotary_(part, grad, cos, sin, inverse=True)
        into[2].copy_(grads[2])
        return grad_merged.flatten(2), None, None, None, None


def split_heads(
    qkv: Tensor, heads: int, groups: int, angles: Angles | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [b, s, (n + 2 g) d] -> query [b, s, n, d], key and value [b, s, g, d]: views of ``qkv``,
    which nothing else may read.

    angles: cos and sin [s, 1, r/2]; they rotate queries and keys in place, like ``rotary``.

    It moves 2 (n + g) d values per token, its backward 2 (n + 2 g) d; only ``qkv`` is saved.
    """
    return _SplitHeads.apply(qkv, heads, groups, *(angles or (None, None)))
