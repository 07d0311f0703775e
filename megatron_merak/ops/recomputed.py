"""Linear layers whose input, an activation, is recomputed in the backward from its own inputs
instead of saved.

saved by autograd   gate_up [.., 2f]    silu(gate) up [.., f]
saved here          gate_up [.., 2f]
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .activation import bias_gelu, gated_halves
from .linear import WeightGradientSink, linear


class _LinearOf(torch.autograd.Function):
    """linear(make(*inputs), weight, bias). ``make``: differentiable and cheap."""

    @staticmethod
    def forward(ctx, make: Callable[..., Tensor], transposed, sink, weight, bias, *inputs):
        ctx.make = make
        ctx.transposed = transposed
        ctx.sink = sink
        ctx.save_for_backward(weight, *inputs)
        return linear(make(*inputs), weight, bias, transposed=transposed)

    @staticmethod
    def backward(ctx, grad):
        weight, *inputs = ctx.saved_tensors
        needed = ctx.needs_input_grad[5:]
        inputs = [x.detach().requires_grad_(needs) for x, needs in zip(inputs, needed, strict=True)]
        with torch.enable_grad():
            activation = ctx.make(*inputs)
        recomputed = activation.detach().reshape(-1, activation.shape[-1])
        rows = grad.reshape(-1, grad.shape[-1])
        of_weight = (recomputed, rows) if ctx.transposed else (rows, recomputed)
        grad_weight = grad_bias = None
        if ctx.sink is not None:
            ctx.sink.matmul(weight, *of_weight)
        elif ctx.needs_input_grad[3]:
            grad_weight = of_weight[0].t() @ of_weight[1]
        if ctx.needs_input_grad[4]:
            grad_bias = rows.sum(0)
        differentiable = [x for x in inputs if x.requires_grad]
        computed = iter(())
        if differentiable:
            grad_activation = grad @ weight.t() if ctx.transposed else grad @ weight
            computed = iter(torch.autograd.grad(activation, differentiable, grad_activation))
        return (
            None,
            None,
            None,
            grad_weight,
            grad_bias,
            *(next(computed) if needs else None for needs in needed),
        )


def gated_linear(
    gate_up: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    transposed: bool = False,
    sink: WeightGradientSink | None = None,
) -> Tensor:
    """``linear`` of gated_halves(gate_up, activation), gate_up [..., 2f], of which only that is
    saved: [..., o].

    weight, bias, transposed, sink: see ``linear``.
    """
    return _LinearOf.apply(
        partial(gated_halves, activation=activation), transposed, sink, weight, bias, gate_up
    )


def gelu_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inner_bias: Tensor | None,
    activation: str,
    transposed: bool = False,
    sink: WeightGradientSink | None = None,
) -> Tensor:
    """``linear`` of bias_gelu(x, inner_bias, activation), x [..., f], of which only that is saved:
    [..., o].

    weight, bias, transposed, sink: see ``linear``.
    """
    inputs = (x,) if inner_bias is None else (x, inner_bias)
    return _LinearOf.apply(
        partial(_gelu, activation=activation), transposed, sink, weight, bias, *inputs
    )


def _gelu(x: Tensor, bias: Tensor | None = None, *, activation: str) -> Tensor:
    return bias_gelu(x, bias, activation)
