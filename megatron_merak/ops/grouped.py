"""Products of rows with the weight of their group, such as rows of tokens with that of their expert.

Rows of a group lie side by side, and ``ends``, int32 or int64 [e], says where those of each end. The
gradient of the weights can go straight into ``main_grad``, see ``linear``: a product for each group,
which is added there.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .flat import accumulate_, cast_
from .linear import WeightGradientSink
from .register import operation


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        ends: Tensor,
        transposed: bool,
        sink: WeightGradientSink | None,
    ) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight, ends)
        ctx.transposed = transposed
        ctx.sink = sink
        return torch.ops.merak.product_by_group(rows, weight if transposed else weight.mT, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        rows, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = None
        grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = gradient_of_rows(weight, grad, ends, ctx.transposed)
        if ctx.needs_input_grad[1]:
            grad_weight = gradient_of_weight(
                weight, rows, grad, ends, transposed=ctx.transposed, sink=ctx.sink
            )
        return grad_rows, grad_weight, None, None, None


def grouped_linear(
    rows: Tensor,
    weight: Tensor,
    ends: Tensor,
    transposed: bool = False,
    sink: WeightGradientSink | None = None,
) -> Tensor:
    """Multiply rows [n, i] with the weight of their group, of [e, o, i], as `linear`: [n, o]. Rows
    beyond the last group become zeros, but in bf16 on a GPU, where they are not written.

    With a ``sink`` autograd has no gradient of weight. A ``transposed`` weight is stored as
    [e, i, o].
    """
    return _Grouped.apply(rows, weight, ends, transposed, sink)


def gradient_of_rows(weight: Tensor, grad: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """Return the gradient of the rows, [n, i].

    grad: of the products, [n, o].

    For the other arguments see ``grouped_linear``.
    """
    return torch.ops.merak.product_by_group(grad, weight.mT if transposed else weight, ends)


def gradient_of_weight(
    weight: Tensor,
    rows: Tensor,
    grad: Tensor,
    ends: Tensor,
    transposed: bool,
    sink: WeightGradientSink | None,
) -> Tensor | None:
    """Pass the gradient of a weight on to a sink, or return it if there is none.

    grad: of the products, [n, o].

    For the other arguments see ``grouped_linear``.
    """
    left = rows if transposed else grad
    right = grad if transposed else rows
    if sink is not None:
        sink.grouped(weight, left, right, ends)
        return None
    total = torch.empty_like(weight)
    add_products_(total, left, right, ends, add=False)
    return total


def add_products_(into: Tensor, left: Tensor, right: Tensor, ends: Tensor, add: bool) -> None:
    """into[g] (+)= left^T @ right of the rows of each group g.

    into:  [e, a, b], fp32 or as the rows.
    left:  [n, a].
    right: [n, b].
    add:   whether to add to what ``into`` has; else it is overwritten, with zeros for a group
           without rows.
    """
    torch.ops.merak.add_products_(into, left, right, ends, add)


@operation(
    "product_by_group",
    lambda rows, weights, ends: rows.new_empty((len(rows), weights.shape[2])),
)
def _product_by_group(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    if _in_one_kernel(rows):
        return torch._grouped_mm(rows, weights, offs=ends.int())
    product = rows.new_empty((len(rows), weights.shape[2]))
    end = 0
    for group, start, end in _spans(ends):
        torch.mm(rows[start:end], weights[group], out=product[start:end])
    product[end:].zero_()
    return product


@operation("add_products_", lambda into, left, right, ends, add: None)
def _add_products_(into: Tensor, left: Tensor, right: Tensor, ends: Tensor, add: bool) -> None:
    write = accumulate_ if add else cast_
    if _in_one_kernel(left):
        write(into, torch._grouped_mm(left.t(), right, offs=ends.int()))
        return
    for group, start, end in _spans(ends):
        if start == end:
            if not add:
                into[group].zero_()
        elif into.dtype == left.dtype:
            into[group].addmm_(left[start:end].t(), right[start:end], beta=int(add))
        else:
            write(into[group], left[start:end].t() @ right[start:end])


def _in_one_kernel(rows: Tensor) -> bool:
    """Whether a device has a kernel for all groups; elsewhere the host reads where groups end."""
    return rows.device.type != "cpu" and rows.dtype == torch.bfloat16


def _spans(ends: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (group, first row, row behind the last) of each group."""
    start = 0
    for group, end in enumerate(ends.tolist()):
        yield group, start, end
        start = end
