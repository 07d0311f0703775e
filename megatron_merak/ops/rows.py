"""Rows of tokens by expert: in the order of a sort, back in their own order, and weighted.

Each of ``k`` experts of a token has a row. Rows are numbered in their own order, token by token;
``order`` lists these numbers by expert, and ``inverse`` says where each row is in that list.
No backward adds rows up where they fall, as that of an index does: each gathers what it needs, in
an order that does not depend on the device.
"""

from typing import Any

import torch
from torch import Tensor

from .activation import gated_halves
from .register import kernels, operation


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return _rows_or_zeros(rows, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return _rows_or_zeros(grad, place), None, None


def _rows_or_zeros(rows: Tensor, numbers: Tensor) -> Tensor:
    """Return the rows of these numbers, and zeros for those below 0."""
    beside = [1] * (rows.dim() - 1)
    chosen = rows.index_select(0, numbers.clamp(min=0))
    return chosen.masked_fill_((numbers < 0).view(-1, *beside), 0)


class _RowsByExpert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return _sums(grad, inverse, ctx.k, grad.dtype), None, None, None


class _SumsOfRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, k: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        ctx.dtype = rows.dtype
        return _sums(rows, inverse, k, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (order,) = ctx.saved_tensors
        return grad.to(ctx.dtype).index_select(0, order // ctx.k), None, None, None, None


def _sums(rows: Tensor, inverse: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    if dtype == rows.dtype and rows.dim() == 2:
        return kernels(rows).sums_of_rows(rows, inverse, k)
    own = rows.index_select(0, inverse)
    return own.unflatten(0, (len(own) // k, k)).sum(1, dtype=dtype)


@operation(
    "sums_of_rows", lambda rows, places, k: rows.new_empty((len(places) // k, rows.shape[1]))
)
def _sums_of_rows(rows: Tensor, places: Tensor, k: int) -> Tensor:
    own = rows.index_select(0, places)
    return own.unflatten(0, (len(own) // k, k)).sum(1)


class _WeightedSwiglu(torch.autograd.Function):
    """Computes the activation again in the backward, which needs it for the weights' gradient."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        # not in place: a weight of fp32 makes a product in fp32, which is rounded once
        return (gated_halves(gate_up, "silu") * weights).to(gate_up.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate_up, weights = ctx.saved_tensors
        grad_weights = None
        if ctx.needs_input_grad[1]:
            products = gated_halves(gate_up, "silu").mul_(grad)
            grad_weights = products.sum(-1, keepdim=True, dtype=weights.dtype)
        of_activation = (grad * weights).to(gate_up.dtype)
        backward = kernels(gate_up).gated_merged_backward
        return backward(of_activation, gate_up, "silu"), grad_weights


def inverse_order(order: Tensor) -> Tensor:
    """Return where each row is in an order, int64 [n]. order: numbers of all rows, int64 [n]."""
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def permuted(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return ``rows[order]``.

    rows:    [n, ...].
    order:   numbers of all rows, int64 [n].
    inverse: where each row is in ``order``, int64 [n].
    """
    return _Permuted.apply(rows, order, inverse)


def placed(rows: Tensor, source: Tensor, place: Tensor) -> Tensor:
    """Return ``rows[source]``, and zeros where ``source`` is -1.

    rows:   [n, ...].
    source: the number of the row that is in each place, or -1, int64 [m]; a row is in one place at
            most.
    place:  where each row is, or -1, int64 [n].
    """
    return _Placed.apply(rows, source, place)


def rows_by_expert(x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
    """Return the tokens of rows, by expert: ``x[order // k]``.

    x:       a row for each token, [t, ...].
    order:   numbers of rows by expert, int64 [t k].
    inverse: where each row is in ``order``, int64 [t k].
    k:       experts of a token.
    """
    return _RowsByExpert.apply(x, order, inverse, k)


def sums_of_rows(
    rows: Tensor, order: Tensor, inverse: Tensor, k: int, dtype: torch.dtype
) -> Tensor:
    """Return the sum of each token's rows, [t, ...], in fp32 or wider and then rounded to ``dtype``.

    rows: by expert, [t k, ...].

    For the other arguments see ``rows_by_expert``.
    """
    return _SumsOfRows.apply(rows, order, inverse, k, dtype)


def weighted_swiglu(gate_up: Tensor, weights: Tensor) -> Tensor:
    """Return silu(gate) * up * weights, [n, f]; saves its inputs only for the backward.

    gate_up: gate first, [n, 2f].
    weights: of each row, [n, 1].
    """
    return _WeightedSwiglu.apply(gate_up, weights)
