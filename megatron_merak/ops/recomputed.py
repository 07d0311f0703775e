"""Linear layers, those of experts too, whose input, an activation, is recomputed in the backward from
its own inputs instead of saved.

saved by autograd   gate_up [.., 2f]    silu(gate) up [.., f]
saved here          gate_up [.., 2f]
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .activation import bias_gelu, gated_halves
from .grouped import gradient_of_weight, product_by_group
from .linear import WeightGradientSink, linear
from .rows import weighted_swiglu


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


class _GroupedOf(torch.autograd.Function):
    """grouped_linear(make(*inputs), weight, ends). ``make``: differentiable and cheap."""

    @staticmethod
    def forward(ctx, make: Callable[..., Tensor], transposed, sink, weight, ends, *inputs):
        ctx.make = make
        ctx.transposed = transposed
        ctx.sink = sink
        ctx.save_for_backward(weight, ends, *inputs)
        return product_by_group(make(*inputs), weight if transposed else weight.mT, ends)

    @staticmethod
    def backward(ctx, grad):
        weight, ends, *inputs = ctx.saved_tensors
        needed = ctx.needs_input_grad[5:]
        grad = grad.contiguous()
        inputs = [x.detach().requires_grad_(needs) for x, needs in zip(inputs, needed, strict=True)]
        with torch.enable_grad():
            activation = ctx.make(*inputs)
        grad_weight = None
        if ctx.needs_input_grad[3]:
            rows = activation.detach()
            grad_weight = gradient_of_weight(weight, rows, grad, ends, ctx.transposed, ctx.sink)
        differentiable = [x for x in inputs if x.requires_grad]
        computed = iter(())
        if differentiable:
            of_rows = product_by_group(grad, weight.mT if ctx.transposed else weight, ends)
            computed = iter(torch.autograd.grad(activation, differentiable, of_rows))
        of_inputs = [next(computed) if needs else None for needs in needed]
        return None, None, None, grad_weight, None, *of_inputs


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


def gated_grouped_linear(
    gate_up: Tensor,
    weight: Tensor,
    ends: Tensor,
    row_weights: Tensor | None,
    activation: str,
    transposed: bool = False,
    sink: WeightGradientSink | None = None,
) -> Tensor:
    """``grouped_linear`` of gated_halves(gate_up, activation), gate_up [n, 2f], or of
    weighted_swiglu(gate_up, row_weights), of which only these inputs are saved: [n, o].

    row_weights:                    [n, 1], with the activation silu; None: rows are not weighted.
    weight, ends, transposed, sink: see ``grouped_linear``.
    """
    if row_weights is not None:
        return _GroupedOf.apply(
            weighted_swiglu, transposed, sink, weight, ends, gate_up, row_weights
        )
    make = partial(gated_halves, activation=activation)
    return _GroupedOf.apply(make, transposed, sink, weight, ends, gate_up)


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
