"""Functions of a rewritten graph that work along the sharded dimension: of one rank's shard, or of
all ranks' results.

Statistics are at least fp32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def log_sum_exp(shard: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """Return the log-sum-exp of a shard over ``dims``, at least fp32."""
    return _wide(shard).logsumexp(dims, keepdim)


def combined_log_sum_exp(totals: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the log-sum-exp of the full tensor, from ``log_sum_exp`` of all ranks, [tp, ...]."""
    return totals.logsumexp(0).to(dtype)


def log_softmax_shard(shard: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the shard of the log-softmax. total: log-sum-exp of the full tensor."""
    return (_wide(shard) - total).to(dtype)


def softmax_shard(shard: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the shard of the softmax. total: log-sum-exp of the full tensor."""
    return (_wide(shard) - total).exp().to(dtype)


def gather_own(shard: Tensor, dim: int, index: Tensor, start: int) -> Tensor:
    """Return x.gather(dim, index), with zeros for entries that this rank's shard of x does not
    have.

    start: where the shard starts along ``dim``.
    """
    rows = index - start
    outside = (rows < 0) | (rows >= shard.shape[dim])
    return shard.gather(dim, rows.masked_fill(outside, 0)).masked_fill(outside, 0.0)


def index_own(
    shard: Tensor, indices: Sequence[Tensor], dim: int, start: int, extent: int
) -> Tensor:
    """Return x[indices], with zeros for entries that this rank's shard of x does not have.

    indices: one for every dimension of x.
    start:   where the shard starts along ``dim``.
    extent:  of ``dim`` of x.
    """
    rows = indices[dim] + extent * (indices[dim] < 0) - start
    outside = (rows < 0) | (rows >= shard.shape[dim])
    inside = [
        rows.masked_fill(outside, 0) if axis == dim else index for axis, index in enumerate(indices)
    ]
    return shard[tuple(inside)].masked_fill(outside, 0.0)


def gather_own_classes(shard: Tensor, target: Tensor, start: int) -> Tensor:
    """Return the entries of x [n, classes, ...] at target [n, ...], with zeros for classes of other
    ranks' shards.
    """
    dim = min(shard.dim() - 1, 1)
    return gather_own(shard, dim, target.unsqueeze(dim), start).squeeze(dim)


def nll_of_log_probs(
    log_probs: Tensor, target: Tensor, reduction: int, ignore_index: int
) -> Tensor:
    """Return the negative log-likelihood from the log-probabilities of the targets. reduction: see
    ``local.loss_of_stats``."""
    ignored = target == ignore_index
    loss = -log_probs.masked_fill(ignored, 0.0)
    if reduction == 0:
        return loss
    return loss.sum() / ignored.logical_not().sum() if reduction == 1 else loss.sum()


def count_of_max(shard: Tensor, maximum: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return how often a shard has the maximum of the full tensor."""
    return (shard == maximum).sum(dims, keepdim=True).to(shard.dtype)


def gradient_of_max(shard: Tensor, maximum: Tensor, count: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return zeros whose gradient is that of the maximum: shared evenly by all ``count`` entries
    that equal it.
    """
    return torch.where(shard == maximum, (shard - shard.detach()) / count, 0.0).sum(
        dims, keepdim=True
    )


def own_argmax(shard: Tensor, dim: int, start: int) -> Tensor:
    """Return the index, in the full tensor, of the first maximum of a shard. start: where the shard
    starts.
    """
    return shard.argmax(dim, keepdim=True) + start


def combined_argmax(maxima: Tensor, indices: Tensor) -> Tensor:
    """Return the index of the first maximum, from all ranks' maxima and ``own_argmax``, both [tp,
    ...].
    """
    return indices.gather(0, maxima.argmax(0, keepdim=True)).squeeze(0)


def max_and_index(maximum: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return what torch.max(x, dim) returns."""
    return maximum, index
