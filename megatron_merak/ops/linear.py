"""Linear and embedding whose weight gradient can go straight into ``main_grad`` instead of through autograd."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class WeightGradientSink(Protocol):
    """Takes weight gradients in the form in which the backward finds them."""

    def matmul(self, weight: Tensor, grad_output: Tensor, input: Tensor) -> None:
        """weight [o, i] += grad_output [t, o]^T @ input [t, i], now or later."""

    def rows(self, weight: Tensor, index: Tensor, grad_output: Tensor) -> None:
        """weight[index] += grad_output, with index int64 [t] and grad_output [t, i]."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, sink):
        ctx.save_for_backward(input, weight)
        ctx.sink = sink
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        input, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_input = grad @ weight if ctx.needs_input_grad[0] else None
        ctx.sink.matmul(weight, rows, input.reshape(-1, input.shape[-1]))
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return grad_input, None, grad_bias, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, index, weight, sink):
        ctx.save_for_backward(index, weight)
        ctx.sink = sink
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx, grad):
        index, weight = ctx.saved_tensors
        ctx.sink.rows(weight, index.reshape(-1), grad.reshape(-1, grad.shape[-1]))
        return None, None, None


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, sink: WeightGradientSink | None = None) -> Tensor:
    """input [..., i] @ weight [o, i]^T + bias [o] -> [..., o]. With a ``sink`` autograd has no gradient of weight."""
    if sink is None:
        return F.linear(input, weight, bias)
    return _Linear.apply(input, weight, bias, sink)


def embedding(index: Tensor, weight: Tensor, sink: WeightGradientSink | None = None) -> Tensor:
    """weight [v, h] gathered by index int64 [...] -> [..., h]. With a ``sink`` no dense [v, h] gradient is made."""
    if sink is None:
        return F.embedding(index, weight)
    return _Embedding.apply(index, weight, sink)
