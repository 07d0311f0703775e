"""One pass over flat buffers: AdamW, sums of squares, and additions between tensors of different
types.
"""

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .register import kernels, operation

_ROW = 64


@operation("adamw_", lambda *arguments: None)
def _adamw_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    copy: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    scale: float,
) -> None:
    grad = grad.to(master.dtype)
    moments = [exp_avg.to(master.dtype), exp_avg_sq.to(master.dtype)]
    adamw(
        [master],
        [grad if scale == 1 else grad * scale],
        moments[:1],
        moments[1:],
        max_exp_avg_sqs=[],
        state_steps=[torch.full((), step - 1, dtype=torch.float32, device=master.device)],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
    for stored, moment in zip((exp_avg, exp_avg_sq), moments, strict=True):
        if moment is not stored:
            stored.copy_(moment)
    if copy is not None:
        copy.copy_(master)


@operation("sum_of_squares", lambda x: x.new_empty((), dtype=torch.float64))
def _sum_of_squares(x: Tensor) -> Tensor:
    """Sum rows of 64 in fp32, and the rows in fp64: a long fp32 sum loses small values."""
    flat = x.reshape(-1)
    rows = flat[: len(flat) // _ROW * _ROW].view(-1, _ROW)
    wide = torch.promote_types(x.dtype, torch.float32)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=wide).double()
    rest = flat[rows.numel() :].double()
    return norms.dot(norms) + rest.dot(rest)


@operation("accumulate_", lambda into, x, scale: None)
def _accumulate_(into: Tensor, x: Tensor, scale: float) -> None:
    into.add_(x, alpha=scale)


@operation("cast_", lambda into, x, scale: None)
def _cast_(into: Tensor, x: Tensor, scale: float) -> None:
    into.copy_(x if scale == 1 else x.to(torch.promote_types(x.dtype, torch.float32)) * scale)


@operation("add_rows_", lambda into, index, rows: None)
def _add_rows_(into: Tensor, index: Tensor, rows: Tensor) -> None:
    into.index_add_(0, index, rows.to(into.dtype))


def adamw_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    copy: Tensor | None = None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    scale: float = 1.0,
) -> None:
    """Take the ``step``-th step, from 1, of AdamW (https://arxiv.org/abs/1711.05101) on contiguous
    fp32 [n].

    The gradient [n] is multiplied by ``scale``. ``copy`` [n], if not None, gets the new values
    rounded to its dtype. Moments [n] may be bf16: they are updated, and update the values, in fp32,
    and are rounded to nearest where they are stored. The update of a value is bitwise independent
    of its position and neighbours.
    """
    kernels(master, grad, copy).adamw_(
        master, exp_avg, exp_avg_sq, grad, copy, lr, *betas, eps, weight_decay, step, scale
    )


def sum_of_squares(x: Tensor) -> Tensor:
    """The squared 2-norm of all of x: fp64 scalar, to 1e-7 of itself however many values
    there are.
    """
    return kernels(x).sum_of_squares(x)


def accumulate_(into: Tensor, x: Tensor, scale: float = 1.0) -> None:
    """into += scale * x: tensors of one shape, of any two dtypes."""
    kernels(into, x).accumulate_(into, x, scale)


def cast_(into: Tensor, x: Tensor, scale: float = 1.0) -> None:
    """into = scale * x, rounded once to its dtype; tensors of one shape."""
    kernels(into, x).cast_(into, x, scale)


def add_rows_(into: Tensor, index: Tensor, rows: Tensor) -> None:
    """into[index] += rows: into [v, h], index [t] of integers, rows [t, h] of any dtype; rows of
    one index in order.
    """
    kernels(into, rows).add_rows_(into, index.long(), rows)
