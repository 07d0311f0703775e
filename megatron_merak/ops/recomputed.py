"""Linear layers, those of experts too, whose input, an activation, is recomputed in the backward from
its own inputs instead of saved.

saved by autograd   gate_up [.., 2f]    silu(gate) up [.., f]
saved here          gate_up [.., 2f]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .activation import bias_gelu, gated_halves
from .grouped import gradient_of_rows, gradient_of_weight, grouped_linear
from .linear import WeightGradientSink, linear
from .rows import weighted_swiglu


@dataclass(frozen=True)
class _How:
    """What a product is of, and where the gradient of its weight goes.

    make:             computes the activation of its inputs; differentiable and cheap.
    transposed, sink: see ``linear``.
    """

    make: Callable[..., Tensor]
    transposed: bool
    sink: WeightGradientSink | None


class _Again:
    """An activation computed again, for the gradients of its inputs.

    needed: whether each of ``inputs`` takes a gradient.
    """

    def __init__(self, how: _How, inputs: Sequence[Tensor], needed: Sequence[bool]):
        pairs = zip(inputs, needed, strict=True)
        self._leaves = [x.detach().requires_grad_(needs) for x, needs in pairs]
        with torch.enable_grad():
            self._activation = how.make(*self._leaves)

    @property
    def value(self) -> Tensor:
        return self._activation.detach()

    def gradients(self, of_activation: Callable[[], Tensor]) -> list[Tensor | None]:
        """Return those of the inputs; None for one that takes none.

        of_activation: returns the gradient of the activation, if any input takes one.
        """
        wanted = [x for x in self._leaves if x.requires_grad]
        if not wanted:
            return [None] * len(self._leaves)
        found = iter(torch.autograd.grad(self._activation, wanted, of_activation()))
        return [next(found) if x.requires_grad else None for x in self._leaves]


class _LinearOf(torch.autograd.Function):
    """linear(make(*inputs), weight, bias)."""

    @staticmethod
    def forward(ctx, how: _How, weight, bias, *inputs):
        ctx.how = how
        ctx.save_for_backward(weight, *inputs)
        return linear(how.make(*inputs), weight, bias, transposed=how.transposed)

    @staticmethod
    def backward(ctx, grad):
        weight, *inputs = ctx.saved_tensors
        how = ctx.how
        again = _Again(how, inputs, ctx.needs_input_grad[3:])
        recomputed = again.value.reshape(-1, again.value.shape[-1])
        rows = grad.reshape(-1, grad.shape[-1])
        of_weight = (recomputed, rows) if how.transposed else (rows, recomputed)
        grad_weight = grad_bias = None
        if how.sink is not None:
            how.sink.matmul(weight, *of_weight)
        elif ctx.needs_input_grad[1]:
            grad_weight = of_weight[0].t() @ of_weight[1]
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        of_inputs = again.gradients(lambda: grad @ (weight.t() if how.transposed else weight))
        return None, grad_weight, grad_bias, *of_inputs


class _GroupedOf(torch.autograd.Function):
    """grouped_linear(make(*inputs), weight, ends)."""

    @staticmethod
    def forward(ctx, how: _How, weight, ends, *inputs):
        ctx.how = how
        ctx.save_for_backward(weight, ends, *inputs)
        return grouped_linear(how.make(*inputs), weight, ends, how.transposed)

    @staticmethod
    def backward(ctx, grad):
        weight, ends, *inputs = ctx.saved_tensors
        how = ctx.how
        grad = grad.contiguous()
        again = _Again(how, inputs, ctx.needs_input_grad[3:])
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = gradient_of_weight(
                weight, again.value, grad, ends, transposed=how.transposed, sink=how.sink
            )
        of_inputs = again.gradients(lambda: gradient_of_rows(weight, grad, ends, how.transposed))
        return None, grad_weight, None, *of_inputs


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
    how = _How(partial(gated_halves, activation=activation), transposed, sink)
    return _LinearOf.apply(how, weight, bias, gate_up)


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
        how = _How(weighted_swiglu, transposed, sink)
        return _GroupedOf.apply(how, weight, ends, gate_up, row_weights)
    how = _How(partial(gated_halves, activation=activation), transposed, sink)
    return _GroupedOf.apply(how, weight, ends, gate_up)


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
    how = _How(partial(_gelu, activation=activation), transposed, sink)
    return _LinearOf.apply(how, weight, bias, *inputs)


def _gelu(x: Tensor, bias: Tensor | None = None, *, activation: str) -> Tensor:
    return bias_gelu(x, bias, activation)
