"""Functions that a rewritten graph calls beside aten and marks: of one rank's shard, with literals for the rank."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import ops


def take(x: Tensor, dim: int, blocks: Sequence[int], rank: int, tp: int, padded: int = 0) -> Tensor:
    """Return a rank's shard of a replicated x: an even share of every block along ``dim``, in order.

    blocks: extents along ``dim``.
    padded: extent to which the one block is padded with zeros first; 0: no padding.
    """
    if padded:
        extent = x.shape[dim]
        share = padded // tp
        start = min(rank * share, extent)
        stop = min((rank + 1) * share, extent)
        missing = share - (stop - start)
        shard = x.narrow(dim, start, stop - start)
        dims_after = x.dim() - 1 - dim % x.dim()
        return F.pad(shard, [0, 0] * dims_after + [0, missing]) if missing else shard
    pieces = []
    begin = 0
    for block in blocks:
        share = block // tp
        pieces.append(x.narrow(dim, begin + rank * share, share))
        begin += block
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def fill(shard: Tensor, dim: int, valid: int, value: float) -> Tensor:
    """Return a shard with ``value`` in place of its padding, which are the entries along ``dim`` from ``valid`` on."""
    missing = shard.shape[dim] - valid
    dims_after = shard.dim() - 1 - dim % shard.dim()
    if not missing:
        return shard
    return F.pad(shard.narrow(dim, 0, valid), [0, 0] * dims_after + [0, missing], value=value)


def take_heads(x: Tensor, dim: int, heads: int, repeats: int, rank: int, tp: int) -> Tensor:
    """Return the key-value heads of a replicated x that a rank's share of the query heads reads.

    heads:   number of query heads.
    repeats: number of query heads that read one key-value head.

    One head per group of query heads where the share consists of full groups or lies in one, else one per query head.
    """
    share = heads // tp
    needed = [head // repeats for head in range(rank * share, (rank + 1) * share)]
    counts = [needed.count(head) for head in dict.fromkeys(needed)]
    if all(count == counts[0] for count in counts):
        return x.narrow(dim, needed[0], len(counts))
    return x.index_select(dim, torch.tensor(needed, device=x.device))


def embed_in_zeros(shard: Tensor, dim: int, blocks: Sequence[int], rank: int, tp: int) -> Tensor:
    """Return a full-size tensor with the shard in its place and zeros elsewhere; the sum over ranks is the full tensor.

    blocks: full extents along ``dim``, without padding; the padding of the shard is dropped.
    """
    ranges = []
    begin = 0
    for block in blocks:
        share = shard.shape[dim] if len(blocks) == 1 else block // tp
        start = min(rank * share, block)
        ranges.append((begin + start, begin + min(start + share, block)))
        begin += block
    shape = list(shard.shape)
    pieces = []
    end = 0
    used = 0
    for start, stop in ranges:
        pieces.append(shard.new_zeros([*shape[:dim], start - end, *shape[dim + 1 :]]))
        pieces.append(shard.narrow(dim, used, stop - start))
        end = stop
        used = used + stop - start
    pieces.append(shard.new_zeros([*shape[:dim], begin - end, *shape[dim + 1 :]]))
    return torch.cat(pieces, dim)


def embedding_part(weight: Tensor, index: Tensor, start: int, padding_idx: int | None) -> Tensor:
    """Return the embeddings [..., h] of index int64 [...], with zeros for rows that this rank does not have.

    weight:      the rank's shard of the table, [n, h].
    start:       row of the table that the shard starts with.
    padding_idx: row of the full table that takes no gradient.
    """
    return ops.embedding_part(index, weight, start, padding=padding_idx)


def loss_of_stats(
    stats: Tensor, target: Tensor, ignore_index: int, reduction: int, smoothing: float, dtype: torch.dtype
) -> Tensor:
    """Return PyTorch's cross entropy.

    stats:     ``ops.cross_entropy_stats`` of all ranks, [tp, ..., 3 or 5].
    target:    class numbers, int64 [...].
    reduction: 0: loss per row, 1: mean over rows that are not ignored, 2: sum.
    smoothing: PyTorch's label_smoothing.
    """
    ignored = target == ignore_index
    loss = ops.loss_of_stats(stats, smoothing, everywhere=True).masked_fill(ignored, 0.0)
    if reduction == 0:
        return loss.to(dtype)
    total = loss.sum()
    return (total / ignored.logical_not().sum() if reduction == 1 else total).to(dtype)


class _GradOnRank0(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp_rank):
        ctx.first = tp_rank == 0
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.first else torch.zeros_like(grad), None


def grad_on_rank_0(x: Tensor, tp_rank: int) -> Tensor:
    """Return x; its gradient is zero on all ranks but the first.

    For a parameter that is read both by sharded work, where its gradient is a partial sum, and by replicated work,
    where every rank computes the same gradient: one all-reduce is then right for both.
    """
    return _GradOnRank0.apply(x, tp_rank)
