"""What a rewritten graph calls for functions along a divided dimension: of one rank's part, and of all ranks' results.

Statistics are at least fp32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def log_total(part: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """What a part adds to a log-sum-exp over ``dims``."""
    return _wide(part).logsumexp(dims, keepdim)


def joined_log_total(totals: Tensor, dtype: torch.dtype) -> Tensor:
    """The log-sum-exp from all ranks' ``log_total``, [tp, ...]."""
    return totals.logsumexp(0).to(dtype)


def log_shares(part: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    """A part of the log-softmax, given the log-sum-exp of the whole."""
    return (_wide(part) - total).to(dtype)


def shares(part: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    """A part of the softmax."""
    return (_wide(part) - total).exp().to(dtype)


def picked(part: Tensor, dim: int, index: Tensor, start: int) -> Tensor:
    """gather(x, dim, index) of the entries that a part from ``start`` on holds, zero for others."""
    rows = index - start
    outside = (rows < 0) | (rows >= part.shape[dim])
    return part.gather(dim, rows.masked_fill(outside, 0)).masked_fill(outside, 0.0)


def picked_at(part: Tensor, indices: Sequence[Tensor], dim: int, start: int, extent: int) -> Tensor:
    """x[indices], one for every dimension, of the entries that a part holds, zero for others; ``extent``: of x."""
    rows = indices[dim] + extent * (indices[dim] < 0) - start
    outside = (rows < 0) | (rows >= part.shape[dim])
    inside = [rows.masked_fill(outside, 0) if place == dim else index for place, index in enumerate(indices)]
    return part[tuple(inside)].masked_fill(outside, 0.0)


def picked_classes(part: Tensor, target: Tensor, start: int) -> Tensor:
    """Of x [n, classes, ...] the entries at target [n, ...] that a part holds, zero for others."""
    dim = min(part.dim() - 1, 1)
    return picked(part, dim, target.unsqueeze(dim), start).squeeze(dim)


def loss_of_picked(chosen: Tensor, target: Tensor, reduction: int, ignored: int) -> Tensor:
    """The negative log-likelihood from the log-probabilities of the targets; ``reduction`` as in ``loss_of_stats``."""
    out = target == ignored
    loss = -chosen.masked_fill(out, 0.0)
    if reduction == 0:
        return loss
    return loss.sum() / out.logical_not().sum() if reduction == 1 else loss.sum()


def ties(part: Tensor, top: Tensor, dims: Sequence[int]) -> Tensor:
    """How often a part holds the maximum of the whole."""
    return (part == top).sum(dims, keepdim=True).to(part.dtype)


def slope_of_top(part: Tensor, top: Tensor, count: Tensor, dims: Sequence[int]) -> Tensor:
    """Zero, with the gradient of a maximum: shared evenly by all entries that are it."""
    return torch.where(part == top, (part - part.detach()) / count, 0.0).sum(dims, keepdim=True)


def place_of_top(part: Tensor, dim: int, start: int) -> Tensor:
    """Where in the whole the first maximum of a part is."""
    return part.argmax(dim, keepdim=True) + start


def joined_place(tops: Tensor, places: Tensor) -> Tensor:
    """Where the first maximum of the whole is, from all ranks' maxima and their places, [tp, ...]."""
    return places.gather(0, tops.argmax(0, keepdim=True)).squeeze(0)


def both(top: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    return top, place
