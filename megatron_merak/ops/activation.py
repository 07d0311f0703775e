"""Activations of the feed-forward block: silu, gelu and gelu_tanh, alone after a bias, and as
gates.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .register import kernels, operation

# The function and its backward, of (gradient, input).
_ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "silu": (F.silu, torch.ops.aten.silu_backward),
    "gelu": (F.gelu, torch.ops.aten.gelu_backward),
    "gelu_tanh": (
        partial(F.gelu, approximate="tanh"),
        partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    ),
}


def _like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


# ---- gates ---------------------------------------------------------------------------------------
@operation("gated_backward", lambda grad, gate, up, activation: (_like(gate), _like(up)))
def _gated_backward(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    forward, backward = _ACTIVATIONS[activation]
    return backward(grad * up, gate).contiguous(), forward(gate).mul_(grad).contiguous()


def _setup_gated(ctx, inputs, output) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _backward_gated(ctx, grad):
    gate, up = ctx.saved_tensors
    return *kernels(gate).gated_backward(grad, gate, up, ctx.activation), None


@operation("gated", lambda gate, up, activation: _like(gate), _setup_gated, _backward_gated)
def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return _ACTIVATIONS[activation][0](gate).mul_(up).contiguous()


@operation("gated_merged_backward", lambda grad, gate_up, activation: _like(gate_up))
def _gated_merged_backward(grad: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    forward, backward = _ACTIVATIONS[activation]
    grad_gate_up = _like(gate_up)
    grad_gate, grad_up = grad_gate_up.chunk(2, -1)
    torch.mul(forward(gate), grad, out=grad_up)
    grad_gate.copy_(backward(grad * up, gate))
    return grad_gate_up


def _setup_gated_merged(ctx, inputs, output) -> None:
    gate_up, ctx.activation = inputs
    ctx.save_for_backward(gate_up)


def _backward_gated_merged(ctx, grad):
    (gate_up,) = ctx.saved_tensors
    return kernels(gate_up).gated_merged_backward(grad, gate_up, ctx.activation), None


@operation(
    "gated_merged",
    lambda gate_up, activation: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)),
    _setup_gated_merged,
    _backward_gated_merged,
)
def _gated_merged(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return _gated(gate, up, activation)


# ---- behind a bias -------------------------------------------------------------------------------
@operation(
    "bias_gelu_backward",
    lambda grad, x, bias, activation: (
        _like(x),
        x.new_empty((0,)) if bias is None else _like(bias),
    ),
)
def _bias_gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    _, backward = _ACTIVATIONS[activation]
    if bias is None:
        return backward(grad, x).contiguous(), x.new_empty((0,))
    grad_x = backward(grad, (x + bias).to(x.dtype)).contiguous()
    return grad_x, grad_x.reshape(-1, x.shape[-1]).sum(0).to(bias.dtype)


def _setup_bias_gelu(ctx, inputs, output) -> None:
    x, bias, ctx.activation = inputs
    ctx.save_for_backward(x, bias)


def _backward_bias_gelu(ctx, grad):
    x, bias = ctx.saved_tensors
    grad_x, grad_bias = kernels(x, bias).bias_gelu_backward(grad, x, bias, ctx.activation)
    return grad_x, None if bias is None else grad_bias, None


@operation("bias_gelu", lambda x, bias, activation: _like(x), _setup_bias_gelu, _backward_bias_gelu)
def _bias_gelu(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    forward, _ = _ACTIVATIONS[activation]
    return forward(x if bias is None else (x + bias).to(x.dtype)).contiguous()


# ---- faces ---------------------------------------------------------------------------------------
def gated_halves(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [..., 2f], gate first -> activation(gate) * up [..., f]; saves its input only for the
    backward.

    activation: silu, gelu or gelu_tanh.
    """
    return kernels(gate_up).gated_merged(gate_up, activation)


def swiglu(gate_up: Tensor) -> Tensor:
    """``gated_halves`` with silu. Shazeer, 2020."""
    return gated_halves(gate_up, "silu")


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, all [..., f]; saves its inputs only. ``activation``: silu, gelu or
    gelu_tanh.
    """
    return kernels(gate, up).gated(gate, up, activation)


def bias_gelu(x: Tensor, bias: Tensor | None, activation: str = "gelu_tanh") -> Tensor:
    """activation(x + bias), x [..., f], bias [f] or None; saves its inputs only. ``activation``:
    see ``gated``.
    """
    return kernels(x, bias).bias_gelu(x, bias, activation)


def gelu_tanh(x: Tensor) -> Tensor:
    """x [...] -> GELU by its tanh approximation, the formula of the GPT-2 family. Hendrycks and
    Gimpel, 2016.
    """
    return bias_gelu(x, None)
