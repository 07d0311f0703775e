"""Linear and embedding whose weight gradient can go straight into ``main_grad`` instead of through
autograd.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


def adds_in_product(device: torch.device) -> bool:
    """Whether ``torch.addmm`` of a device adds a product of 16-bit matrices to an fp32 matrix
    without rounding it.
    """
    key = device.type.upper()
    return key in dir(torch._C.DispatchKey) and torch._C._dispatch_has_kernel_for_dispatch_key(
        "aten::addmm.dtype_out", key
    )


class WeightGradientSink(Protocol):
    """Receives weight gradients as the operands that the backward has."""

    def matmul(self, weight: Tensor, grad_output: Tensor, input: Tensor, now: bool = False) -> None:
        """weight [o, i] += grad_output [t, o]^T @ input [t, i]; the sink may defer it, unless
        ``now``.
        """

    def grouped(self, weight: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> None:
        """weight [e, a, b] += left [n, a]^T @ right [n, b] of the rows of each group, see
        ``add_products_``; the sink may defer it.
        """

    def product(self, weight: Tensor, product: Callable[[torch.dtype], Tensor]) -> None:
        """weight [o, i] += product(dtype); the sink may defer it."""

    def rows(self, weight: Tensor, index: Tensor, grad_output: Tensor) -> None:
        """weight[index] += grad_output, with index int64 [t] and grad_output [t, i]."""

    def getter(self, input: Tensor) -> Callable[[], Tensor] | None:
        """Return what gathers ``input`` for the backward of a linear layer; None: the layer has to
        save it.
        """

    def again(self, result: Tensor, get: Callable[[], Tensor]) -> None:
        """Let the backward call ``get`` for ``result``, which was moved from a gathered value."""

    def unkept(self) -> AbstractContextManager[object]:
        """Return a context in which no tape keeps what ``getter`` and ``again`` know."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, transposed, sink):
        ctx.get_input = sink.getter(input)
        ctx.save_for_backward(None if ctx.get_input else input, weight)
        ctx.transposed = transposed
        ctx.sink = sink
        return _product(input, weight, bias) if transposed else F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        input, weight = ctx.saved_tensors
        grad_input = None
        if ctx.needs_input_grad[0]:
            grad_input = grad @ weight.t() if ctx.transposed else grad @ weight
        input = ctx.get_input() if ctx.get_input else input
        rows = grad.reshape(-1, grad.shape[-1])
        inputs = input.reshape(-1, input.shape[-1])
        if ctx.transposed:
            ctx.sink.matmul(weight, inputs, rows)
        else:
            ctx.sink.matmul(weight, rows, inputs)
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return grad_input, None, grad_bias, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, index, weight, padding, sink):
        ctx.save_for_backward(index, weight)
        ctx.padding = padding
        ctx.sink = sink
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx, grad):
        index, weight = ctx.saved_tensors
        if ctx.padding is not None:
            grad = grad.masked_fill((index == ctx.padding).unsqueeze(-1), 0.0)
        ctx.sink.rows(weight, index.reshape(-1), grad.reshape(-1, grad.shape[-1]))
        return None, None, None, None


def _product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return input @ weight
    return torch.addmm(bias, input.reshape(-1, input.shape[-1]), weight).view(*input.shape[:-1], -1)


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    sink: WeightGradientSink | None = None,
    transposed: bool = False,
) -> Tensor:
    """input [..., i] @ weight [o, i]^T + bias [o] -> [..., o]. With a ``sink`` autograd has no
    gradient of weight.

    A ``transposed`` weight is stored as [i, o], as GPT-2 stores it.
    """
    if sink is not None:
        return _Linear.apply(input, weight, bias, transposed, sink)
    return _product(input, weight, bias) if transposed else F.linear(input, weight, bias)


def embedding(
    index: Tensor,
    weight: Tensor,
    sink: WeightGradientSink | None = None,
    padding: int | None = None,
) -> Tensor:
    """weight [v, h] gathered by index int64 [...] -> [..., h]. With a ``sink`` no dense [v, h]
    gradient is created.

    The row ``padding`` gets no gradient.
    """
    if sink is None:
        return F.embedding(index, weight, padding)
    return _Embedding.apply(index, weight, padding, sink)


def embedding_part(
    index: Tensor,
    weight: Tensor,
    start: int,
    sink: WeightGradientSink | None = None,
    padding: int | None = None,
) -> Tensor:
    """Rows start .. start + n of a table, weight [n, h], gathered by index int64 [...]: [..., h],
    zero for other rows.

    The row ``padding`` of the full table gets no gradient.
    """
    rows = index - start
    outside = (rows < 0) | (rows >= weight.shape[0])
    pads = None
    if padding is not None and start <= padding < start + weight.shape[0]:
        pads = padding - start
    output = embedding(rows.masked_fill(outside, 0), weight, sink, pads)
    return output.masked_fill(outside.unsqueeze(-1), 0.0)
