"""Output layer and cross entropy as one operation that touches the logits once after their product."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import WeightGradientSink

_CACHED_BYTES = 1 << 20


class _LinearCrossEntropy(torch.autograd.Function):
    """Keeps e = exp(logits - max) less the row sum at the target: the gradient of the logits but for a factor per row.

    The factor is applied to the small side of the backward's two products, so they read e as it is.
    """

    @staticmethod
    def forward(ctx, x, weight, target, classes, sink):
        exponents = F.linear(x, weight)
        wide = torch.promote_types(x.dtype, torch.float32)
        loss, total = torch.empty_like(x[:, 0], dtype=wide), torch.empty_like(x[:, 0], dtype=wide)
        rows = max(1, _CACHED_BYTES // (4 * weight.shape[0])) if x.device.type == "cpu" else len(x)
        for part, at, of_loss, of_total in zip(*(t.split(rows) for t in (exponents, target, loss, total)), strict=True):
            _exponentiate(part, at.unsqueeze(-1), classes, of_loss, of_total)
        ctx.save_for_backward(x, weight, exponents, total)
        ctx.sink = sink
        return loss

    @staticmethod
    def backward(ctx, grad):
        x, weight, exponents, total = ctx.saved_tensors
        scale = (grad / total).unsqueeze(-1)
        grad_x = (exponents @ weight).mul_(scale)
        scaled = (x * scale).to(x.dtype)
        if ctx.sink is None:
            return grad_x, exponents.t() @ scaled, None, None, None
        ctx.sink.matmul(weight, exponents, scaled)
        return grad_x, None, None, None, None


def _exponentiate(logits: Tensor, target: Tensor, classes: int, loss: Tensor, total: Tensor) -> None:
    """Turn logits [t, V] into e in place; fill loss and total [t]. target int64 [t, 1]."""
    logits[:, classes:] = -torch.inf
    shifted = logits.to(loss.dtype)
    shifted.sub_(shifted.amax(-1, keepdim=True))
    chosen = shifted.gather(-1, target).squeeze(-1)
    torch.sum(shifted.exp_(), -1, out=total)
    torch.sub(total.log(), chosen, out=loss)
    shifted.scatter_add_(-1, target, -total.unsqueeze(-1))
    if shifted is not logits:
        logits.copy_(shifted)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, classes: int | None = None, sink: WeightGradientSink | None = None
) -> Tensor:
    """Cross entropy of x [t, h] weight [V, h]^T against target int64 [t]: fp32 (fp64 for fp64 inputs) [t].

    Rows of ``weight`` from ``classes`` on are padding and take no part. With a ``sink`` autograd returns no weight
    gradient.
    """
    return _LinearCrossEntropy.apply(x, weight, target, weight.shape[0] if classes is None else classes, sink)
