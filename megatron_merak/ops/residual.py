"""Bias, dropout and residual add, which follow every row-parallel linear."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .register import kernels, operation

# SplitMix64: the step of its state, a 64-bit golden ratio, and the factors of its output function.
# Steele et al., 2014.
_STEP, _FIRST, _SECOND = (
    n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)

# Which chunks of sequences a rank has: (number of samples, numbers of its chunks in each sample,
# number of all chunks). In memory full sequences are [samples, chunks, elements of a chunk].
Place = tuple[int, tuple[int, ...], int]


def _shift(z: Tensor, by: int) -> Tensor:
    """z >> by of unsigned numbers."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _random_bits(seed: Tensor, count: int) -> Tensor:
    """Return 32 random bits for each of ``count`` elements, int64: two elements share one number,
    the lower half first.
    """
    z = seed + torch.arange((count + 1) // 2, device=seed.device) * _STEP
    z = (z ^ _shift(z, 30)) * _FIRST
    z = (z ^ _shift(z, 27)) * _SECOND
    z = z ^ _shift(z, 31)
    return torch.stack((z & 0xFFFFFFFF, _shift(z, 32)), -1).flatten()[:count]


def _dropped(x: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """Zero where an element's bits are below p 2^32, scaled by 1 / (1 - p) elsewhere."""
    if seed is None:
        return x
    survives = _random_bits(seed, x.numel()).view(x.shape) >= math.ceil(p * 2**32)
    return torch.where(survives, x * (1 / (1 - p)) if p < 1 else 0.0, 0.0).to(x.dtype)


def _empty(x: Tensor, bias: bool) -> Tensor:
    return x.new_empty((x.shape[-1] if bias else 0,))


@operation(
    "bias_dropout_add_backward",
    lambda grad, p, seed, bias: (grad.new_empty(grad.shape), _empty(grad, bias)),
)
def _bias_dropout_add_backward(
    grad: Tensor, p: float, seed: Tensor | None, bias: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and its sum over rows."""
    grad_x = (
        _dropped(grad, p, seed).contiguous()
        if seed is not None
        else grad.clone(memory_format=torch.contiguous_format)
    )
    return grad_x, grad_x.reshape(-1, grad.shape[-1]).sum(0) if bias else _empty(grad, False)


def _setup(ctx, inputs, output) -> None:
    _, bias, residual, ctx.p, seed = inputs
    ctx.of_bias = None if bias is None else bias.dtype
    ctx.has_residual = residual is not None
    ctx.save_for_backward(seed)


def _backward(ctx, grad):
    (seed,) = ctx.saved_tensors
    grad_x = grad
    grad_bias = None
    with_bias = ctx.of_bias is not None
    if seed is not None:
        grad_x, grad_bias = kernels(grad).bias_dropout_add_backward(grad, ctx.p, seed, with_bias)
    elif with_bias:
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
    grad_bias = grad_bias.to(ctx.of_bias) if with_bias else None
    return grad_x, grad_bias, grad if ctx.has_residual else None, None, None


@operation(
    "bias_dropout_add", lambda x, bias, residual, p, seed: x.new_empty(x.shape), _setup, _backward
)
def _bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, seed: Tensor | None
) -> Tensor:
    output = _dropped(x if bias is None else (x + bias).to(x.dtype), p, seed)
    output = output if residual is None else residual + output
    return (
        output.clone(memory_format=torch.contiguous_format) if output is x else output.contiguous()
    )


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    dropout: float,
    training: bool,
    place: Place | None = None,
) -> Tensor:
    """residual + dropout(x + bias); x and residual [..., h], bias [h]; residual and bias may be
    None.

    place: where x is this rank's part of each sample's sequence, in chunks of an even number of
           elements: the mask is then its part of the full one.

    The mask is a function of a seed, drawn from the default generator of x's device, and of an
    element's index: the backward recomputes it.
    """
    p = dropout if training else 0.0
    if p == 0 and bias is None:
        return x if residual is None else residual + x
    seed = torch.randint(2**63 - 1, (1,), device=x.device) if p > 0 else None
    if seed is not None and place is not None:
        return _of_parts(x, bias, residual, p, seed, place=place)
    return kernels(x, bias, residual).bias_dropout_add(x, bias, residual, p, seed)


def _of_parts(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    seed: Tensor,
    place: Place,
) -> Tensor:
    """The same for parts, which begin somewhere in the full sequence of random numbers."""
    samples, chunks, count = place
    pieces = [(sample, chunk) for sample in range(samples) for chunk in chunks]
    pairs = x.numel() // len(pieces) // 2
    xs = x.reshape(len(pieces), -1, x.shape[-1])
    residuals = [None] * len(pieces) if residual is None else residual.reshape(xs.shape).unbind()
    parts = []
    for (sample, chunk), part, added in zip(pieces, xs.unbind(), residuals, strict=True):
        skipped = (sample * count + chunk) * pairs * _STEP
        own = seed + ((skipped + 2**63) % 2**64 - 2**63)
        parts.append(kernels(part, bias, added).bias_dropout_add(part, bias, added, p, own))
    return (parts[0] if len(parts) == 1 else torch.stack(parts)).view(x.shape)


def dropout_of_parts(x: Tensor, p: float, training: bool, place: Place) -> Tensor:
    """Dropout of a rank's parts of sequences, with its part of the mask that torch draws for all."""
    samples, chunks, count = place
    if not training or p == 0:
        return x
    mask = F.dropout(x.new_ones(samples, count, x.numel() // (samples * len(chunks))), p)
    own = torch.stack([mask[:, chunk] for chunk in chunks], 1)  # the full mask is not kept
    return x * own.view(x.shape)
