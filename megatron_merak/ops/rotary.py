"""Rotary position embedding: pairs of features, in two halves or adjacent, rotated by position."""

import math

import torch
from torch import Tensor

from .register import kernels, operation


def _pairs(x: Tensor, rotated: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and the second feature of every pair, each [..., rotated / 2]."""
    if interleaved:
        return x[..., 0:rotated:2], x[..., 1:rotated:2]
    return x[..., : rotated // 2], x[..., rotated // 2 : rotated]


def _setup_rotary(ctx, inputs, output) -> None:
    _, cos, sin, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _backward_rotary(ctx, grad):
    """A rotation is undone by its inverse, so the backward needs the angles and nothing else."""
    cos, sin = ctx.saved_tensors
    turned = kernels(grad, cos, sin).rotary(grad, cos, sin, ctx.interleaved, not ctx.inverse)
    return turned, None, None, None, None


@operation(
    "rotary",
    lambda x, cos, sin, interleaved, inverse: x.new_empty(x.shape),
    _setup_rotary,
    _backward_rotary,
)
def _rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    return _turn(x.new_empty(x.shape), x, cos, sin, interleaved, inverse=inverse)


def _turn(
    out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> Tensor:
    """Write x, rotated, into ``out``, which is separate memory."""
    cos = cos.to(x.dtype)
    sin = sin.to(x.dtype)
    sin = -sin if inverse else sin
    rotated = 2 * cos.shape[-1]
    first, second = _pairs(x, rotated, interleaved)
    to_first, to_second = _pairs(out, rotated, interleaved)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin)
    out[..., rotated:] = x[..., rotated:]
    return out


@operation("rotary_", lambda into, *arguments: None)
def _rotary_(
    into: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> None:
    if into.data_ptr() == x.data_ptr():
        into.copy_(_rotary(x, cos, sin, interleaved, inverse))
    else:
        _turn(into, x, cos, sin, interleaved, inverse=inverse)


class _RotaryHeads(torch.autograd.Function):
    """The result is laid out as attention reads it, and the gradient as the product before it
    does.
    """

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        batch, length, heads, size = x.shape
        # A CPU's products take the rows of a head side by side; kernels of accelerators any strides.
        if x.device.type == "cpu":
            into = x.new_empty((batch, heads, length, size)).transpose(1, 2)
        else:
            into = x.new_empty(x.shape)
        kernels(x, cos, sin).rotary_(into, x, cos, sin, interleaved, False)
        return into

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        turned = grad.new_empty(grad.shape)
        kernels(grad, cos, sin).rotary_(turned, grad, cos, sin, ctx.interleaved, True)
        return turned, None, None, None


def rotary_heads(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """``rotary`` of heads, x [b, s, n, d], as views of what attention on this device copies
    least.
    """
    return _RotaryHeads.apply(x, cos, sin, interleaved)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x [b, s, n, d] rotated by the angles of cos, sin [s, 1, r/2]; the last d - r features stay.
    Su et al., 2021.

    A pair is features j and j + r/2; if ``interleaved`` 2j and 2j + 1. x may have any shape to
    which cos and sin, [..., r/2], broadcast.
    """
    return kernels(x, cos, sin).rotary(x, cos, sin, interleaved, False)


def rotary_(into: Tensor, x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> None:
    """into = x rotated, or with ``inverse`` rotated back, as by ``rotary``. Without gradient.

    into: x itself or separate memory, with contiguous features.
    """
    kernels(into, x, cos, sin).rotary_(into, x, cos, sin, False, inverse)


def rotary_frequencies(
    rotary_dim: int,
    base: float,
    scaling_factor: float | None = None,
    original_length: int = 8192,
) -> Tensor:
    """Return by how much each pair of features turns from one position to the next, fp32
    [rotary_dim / 2].

    scaling_factor: slows low frequencies as in Llama 3.1: wavelengths above ``original_length`` are
                    divided by the factor, those below a quarter of it stay, those between are
                    interpolated.
    """
    frequency = base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    if scaling_factor is not None:
        low = 1.0
        high = 4.0
        blend = ((original_length * frequency / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        frequency = frequency * blend + frequency / scaling_factor * (1 - blend)
    return frequency


def rotary_angles(
    length: int,
    rotary_dim: int,
    base: float,
    scaling_factor: float | None = None,
    original_length: int = 8192,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each fp32 [length, 1, rotary_dim / 2]; see `rotary_frequencies`."""
    frequency = rotary_frequencies(rotary_dim, base, scaling_factor, original_length)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency).unsqueeze(1)
    return angle.cos(), angle.sin()
