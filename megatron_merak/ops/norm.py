"""RMSNorm and LayerNorm over the last dimension, also of a sum; statistics in fp32 (fp64 for fp64
inputs).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .register import kernels, operation


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _per_row(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=_wide(x))


def _keep(ctx, x: Tensor, weight: Tensor, statistics: Sequence[Tensor]) -> None:
    """Save for the backward the normalized input, and its statistics, which have no gradient."""
    ctx.set_materialize_grads(False)  # else an unread sum has a gradient of zeros, read and added
    ctx.mark_non_differentiable(*statistics)
    ctx.save_for_backward(x, weight, *statistics)


def _setup(ctx, inputs, output) -> None:
    _keep(ctx, inputs[0], inputs[1], output[1:])


def _setup_of_sum(ctx, inputs, output) -> None:
    _keep(ctx, output[1], inputs[2], output[2:])


# ---- RMSNorm -------------------------------------------------------------------------------------
@operation("rms_norm_backward", lambda grad, x, weight, rstd: (_like(x), _like(weight)))
def _rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """With n = x r and g = grad w: r (g - n mean(g n)), and the sum over rows of grad n."""
    rstd = rstd.unsqueeze(-1)
    normed = x * rstd
    grad_weight = (grad * normed).reshape(-1, x.shape[-1]).sum(0)
    inner = grad.to(rstd.dtype) * weight
    dot = (inner * normed).mean(-1, keepdim=True)
    grad_x = normed.mul_(-dot).add_(inner).mul_(rstd)
    return grad_x.to(x.dtype).contiguous(), grad_weight.to(weight.dtype)


def _backward_rms_norm(ctx, grad, _):
    x, weight, rstd = ctx.saved_tensors
    if grad is None:
        return None, None, None
    return *kernels(x, weight).rms_norm_backward(grad, x, weight, rstd), None


@operation("rms_norm", lambda x, weight, eps: (_like(x), _per_row(x)), _setup, _backward_rms_norm)
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x r w with r = (mean(x^2) + eps)^-1/2, and r."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_wide(x))
    rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * rstd).mul_(weight).to(x.dtype).contiguous(), rstd.squeeze(-1)


def _plus(grad: Tensor, more: Tensor | None) -> Tensor:
    return grad if more is None else grad + more


@operation(
    "add_rms_norm_backward", lambda grad, grad_sum, sum, weight, rstd: (_like(sum), _like(weight))
)
def _add_rms_norm_backward(
    grad: Tensor, grad_sum: Tensor | None, sum: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = _rms_norm_backward(grad, sum, weight, rstd)
    return _plus(grad_x, grad_sum), grad_weight


def _backward_add_rms_norm(ctx, grad, grad_sum, _):
    sum, weight, rstd = ctx.saved_tensors
    if grad is None:
        return grad_sum, grad_sum, None, None
    grad_x, grad_weight = kernels(sum, weight).add_rms_norm_backward(
        grad, grad_sum, sum, weight, rstd
    )
    return grad_x, grad_x, grad_weight, None


@operation(
    "add_rms_norm",
    lambda x, residual, weight, eps: (_like(x), _like(x), _per_row(x)),
    _setup_of_sum,
    _backward_add_rms_norm,
)
def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    sum = (residual + x).contiguous()
    y, rstd = _rms_norm(sum, weight, eps)
    return y, sum, rstd


# ---- LayerNorm -----------------------------------------------------------------------------------
@operation(
    "layer_norm_backward",
    lambda grad, x, weight, mean, rstd: (_like(x), _like(weight), _like(weight)),
)
def _layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    wide = rstd.dtype
    grad_x, *of_weights = torch.ops.aten.native_layer_norm_backward(
        grad.to(wide),
        x.to(wide),
        x.shape[-1:],
        mean.unsqueeze(-1),
        rstd.unsqueeze(-1),
        weight.to(wide),
        weight.to(wide),
        [True, True, True],
    )
    return grad_x.to(x.dtype).contiguous(), *(each.to(weight.dtype) for each in of_weights)


def _backward_layer_norm(ctx, grad, *_):
    x, weight, mean, rstd = ctx.saved_tensors
    if grad is None:
        return None, None, None, None
    return *kernels(x, weight).layer_norm_backward(grad, x, weight, mean, rstd), None


@operation(
    "layer_norm",
    lambda x, weight, bias, eps: (_like(x), _per_row(x), _per_row(x)),
    _setup,
    _backward_layer_norm,
)
def _layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(x - m) r w + b with r = (mean((x - m)^2) + eps)^-1/2, m and r."""
    wide = _wide(x)
    y, mean, rstd = torch.native_layer_norm(
        x.to(wide), x.shape[-1:], weight.to(wide), bias.to(wide), eps
    )
    return y.to(x.dtype).contiguous(), mean.squeeze(-1), rstd.squeeze(-1)


@operation(
    "add_layer_norm_backward",
    lambda grad, grad_sum, sum, weight, mean, rstd: (_like(sum), _like(weight), _like(weight)),
)
def _add_layer_norm_backward(
    grad: Tensor, grad_sum: Tensor | None, sum: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_weight, grad_bias = _layer_norm_backward(grad, sum, weight, mean, rstd=rstd)
    return _plus(grad_x, grad_sum), grad_weight, grad_bias


def _backward_add_layer_norm(ctx, grad, grad_sum, *_):
    sum, weight, mean, rstd = ctx.saved_tensors
    if grad is None:
        return grad_sum, grad_sum, None, None, None
    computed = kernels(sum, weight).add_layer_norm_backward(grad, grad_sum, sum, weight, mean, rstd)
    return computed[0], *computed, None


@operation(
    "add_layer_norm",
    lambda x, residual, weight, bias, eps: (_like(x), _like(x), _per_row(x), _per_row(x)),
    _setup_of_sum,
    _backward_add_layer_norm,
)
def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sum = (residual + x).contiguous()
    y, mean, rstd = _layer_norm(sum, weight, bias, eps)
    return y, sum, mean, rstd


# ---- faces ---------------------------------------------------------------------------------------
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., h], weight [h] -> [..., h] in x's dtype. Zhang and Sennrich, 2019."""
    return kernels(x, weight).rms_norm(x, weight, eps)[0]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [..., h], weight and bias [h] -> [..., h] in x's dtype. Ba et al., 2016."""
    return kernels(x, weight, bias).layer_norm(x, weight, bias, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x and residual [..., h] of one dtype -> RMSNorm of their sum, and the sum, rounded before it
    is normalized.
    """
    return kernels(x, residual, weight).add_rms_norm(x, residual, weight, eps)[:2]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x and residual [..., h] of one dtype -> LayerNorm of their sum, and the sum, rounded before
    it is normalized.
    """
    return kernels(x, residual, weight, bias).add_layer_norm(x, residual, weight, bias, eps)[:2]
