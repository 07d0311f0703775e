"""RMSNorm and LayerNorm over the last dimension, statistics in fp32 (fp64 for fp64 inputs)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .register import kernels, operation


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@operation("rms_norm_backward", lambda grad, x, weight, rstd: (x.new_empty(x.shape), weight.new_empty(weight.shape)))
def _rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """With n = x r and g = grad w: r (g - n mean(g n)), and the sum over rows of grad n."""
    rstd = rstd.unsqueeze(-1)
    normed = x * rstd
    grad_weight = (grad * normed).reshape(-1, x.shape[-1]).sum(0)
    inner = grad.to(rstd.dtype) * weight
    dot = (inner * normed).mean(-1, keepdim=True)
    grad_x = normed.mul_(-dot).add_(inner).mul_(rstd)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


def _setup_rms_norm(ctx, inputs, output) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])


def _backward_rms_norm(ctx, grad, _):
    x, weight, rstd = ctx.saved_tensors
    return *kernels(x, weight).rms_norm_backward(grad, x, weight, rstd), None


@operation(
    "rms_norm",
    lambda x, weight, eps: (x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=_wide(x))),
    _setup_rms_norm,
    _backward_rms_norm,
)
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x r w with r = (mean(x^2) + eps)^-1/2, and r."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_wide(x))
    rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * rstd).mul_(weight).to(x.dtype).contiguous(), rstd.squeeze(-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., h], weight [h] -> [..., h] in x's dtype. Zhang and Sennrich, 2019."""
    return kernels(x, weight).rms_norm(x, weight, eps)[0]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [..., h], weight and bias [h] -> [..., h] in x's dtype. Ba et al., 2016."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
