"""Rotary position embedding, half-rotation layout."""

import math

import torch
from torch import Tensor


class _Rotary(torch.autograd.Function):
    """A rotation is undone by its inverse, so the backward needs the angles and nothing else."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated, half = 2 * cos.shape[-1], cos.shape[-1]
    out = torch.empty_like(x)
    first, second = x[..., :half], x[..., half:rotated]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:rotated]).addcmul_(first, sin)
    if rotated < x.shape[-1]:
        out[..., rotated:] = x[..., rotated:]
    return out


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [b, s, n, d] turned by the angles of cos, sin [s, 1, r/2]; the last d - r features pass. Su et al., 2021.

    Any layout of x will do for which cos and sin, [..., r/2], broadcast to it.
    """
    return _Rotary.apply(x, cos.to(x.dtype), sin.to(x.dtype))


def rotary_angles(
    length: int, rotary_dim: int, base: float, scaling_factor: float | None = None, original_length: int = 8192
) -> tuple[Tensor, Tensor]:
    """cos and sin, each fp32 [length, 1, rotary_dim / 2].

    With ``scaling_factor`` low frequencies are slowed as in Llama 3.1: wavelengths above ``original_length`` divide by
    the factor, those below a quarter of it stay, those between are blended.
    """
    frequency = base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    if scaling_factor is not None:
        low, high = 1.0, 4.0
        blend = ((original_length * frequency / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        frequency = frequency * blend + frequency / scaling_factor * (1 - blend)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency).unsqueeze(1)
    return angle.cos(), angle.sin()
