"""Activations of the feed-forward block."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, -1)
        torch.mul(F.silu(gate), grad, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_gate_up


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2f], gate first -> silu(gate) * up [..., f]; keeps its input only. Shazeer, 2020."""
    return _SwiGLU.apply(gate_up)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, name):
        ctx.save_for_backward(gate, up)
        ctx.name = name
        return _ACTIVATIONS[name][0](gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        forward, backward = _ACTIVATIONS[ctx.name]
        grad_up = forward(gate).mul_(grad) if ctx.needs_input_grad[1] else None
        return backward(grad * up, gate) if ctx.needs_input_grad[0] else None, grad_up, None


_ACTIVATIONS = {
    "silu": (F.silu, torch.ops.aten.silu_backward),
    "gelu": (F.gelu, torch.ops.aten.gelu_backward),
    "gelu_tanh": (
        partial(F.gelu, approximate="tanh"),
        partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    ),
}


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, all [..., f]; keeps its inputs only. ``activation``: silu, gelu or gelu_tanh."""
    return _Gate.apply(gate, up, activation)


def gelu_tanh(x: Tensor) -> Tensor:
    """x [...] -> GELU by its tanh approximation, the formula of the GPT-2 family. Hendrycks and Gimpel, 2016."""
    return F.gelu(x, approximate="tanh")
