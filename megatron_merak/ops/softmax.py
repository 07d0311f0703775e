"""Softmax of scaled and masked attention scores, statistics in fp32 (fp64 for fp64 scores)."""

import torch
from torch import Tensor

from .register import kernels, operation


@operation(
    "masked_softmax_backward",
    lambda grad, probabilities, scale, causal: probabilities.new_empty(grad.shape),
)
def _masked_softmax_backward(
    grad: Tensor, probabilities: Tensor, scale: float, causal: bool
) -> Tensor:
    wide = torch.promote_types(probabilities.dtype, torch.float32)
    product = grad.to(wide) * probabilities
    product.sub_(probabilities * product.sum(-1, keepdim=True)).mul_(scale)
    return product.to(probabilities.dtype).contiguous()


def _setup(ctx, inputs, output) -> None:
    _, _, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(output)


def _backward(ctx, grad):
    (probabilities,) = ctx.saved_tensors
    grad_scores = kernels(probabilities).masked_softmax_backward(
        grad, probabilities, ctx.scale, ctx.causal
    )
    return grad_scores, None, None, None


@operation(
    "masked_softmax",
    lambda scores, mask, scale, causal: scores.new_empty(scores.shape),
    _setup,
    _backward,
)
def _masked_softmax(scores: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    queries, keys = scores.shape[-2:]
    scaled = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if mask is not None:
        scaled.masked_fill_(~mask, -torch.inf)
    if causal:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril_(
            keys - queries
        )
        scaled.masked_fill_(~seen, -torch.inf)
    hidden = (scaled == -torch.inf).all(-1, keepdim=True)
    return scaled.softmax(-1).masked_fill_(hidden, 0.0).to(scores.dtype).contiguous()


def masked_softmax(
    scores: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False
) -> Tensor:
    """Softmax over keys of scale * scores [b, n, s, t], in their dtype.

    mask:   bool [1 or b, 1 or n, 1 or s, t]: False hides a key.
    causal: query i attends to no key after i + t - s.

    A query without visible keys, or with scores of -inf only, gets zeros.
    """
    return kernels(scores).masked_softmax(scores, mask, scale, causal)
