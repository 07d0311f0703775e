"""RMSNorm and LayerNorm over the last dimension, statistics in fp32 (fp64 for fp64 inputs)."""

import torch
import torch.nn.functional as F
from torch import Tensor


class _RMSNorm(torch.autograd.Function):
    """y = x r w with r = (mean(x^2) + eps)^-1/2; only x, w and one r per row are kept."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (x * rstd).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, rstd = ctx.saved_tensors
        normed = x * rstd
        grad_weight = (grad * normed).reshape(-1, x.shape[-1]).sum(0)
        inner = grad.to(rstd.dtype) * weight
        dot = (inner * normed).mean(-1, keepdim=True)
        grad_x = normed.mul_(-dot).add_(inner).mul_(rstd)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., h], weight [h] -> [..., h] in x's dtype. Zhang and Sennrich, 2019."""
    return _RMSNorm.apply(x, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [..., h], weight and bias [h] -> [..., h] in x's dtype. Ba et al., 2016."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
