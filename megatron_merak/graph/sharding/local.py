"""What a rewritten graph calls besides aten and the marks: one rank's part of a value, with literals for the rank."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import ops


def take(x: Tensor, dim: int, blocks: Sequence[int], rank: int, tp: int, padded: int = 0) -> Tensor:
    """A rank's part of a whole x: of every block along ``dim`` an even share, in order.

    ``padded``: one block is continued with zeros to this extent first, so that it divides.
    """
    if padded:
        extent = x.shape[dim]
        share = padded // tp
        start, stop = min(rank * share, extent), min((rank + 1) * share, extent)
        missing = share - (stop - start)
        part = x.narrow(dim, start, stop - start)
        behind = x.dim() - 1 - dim % x.dim()
        return F.pad(part, [0, 0] * behind + [0, missing]) if missing else part
    parts, begin = [], 0
    for block in blocks:
        share = block // tp
        parts.append(x.narrow(dim, begin + rank * share, share))
        begin += block
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def fill(part: Tensor, dim: int, held: int, filler: float) -> Tensor:
    """A part of which entries from ``held`` on along ``dim`` are padding, with that replaced by ``filler``."""
    missing = part.shape[dim] - held
    behind = part.dim() - 1 - dim % part.dim()
    return F.pad(part.narrow(dim, 0, held), [0, 0] * behind + [0, missing], value=filler) if missing else part


def take_heads(x: Tensor, dim: int, heads: int, repeats: int, rank: int, tp: int) -> Tensor:
    """The key-value heads of a whole x that a rank's share of ``heads`` query heads reads, ``repeats`` to one of them.

    One head per group of query heads where the share consists of whole groups or lies in one, else one per query head.
    """
    share = heads // tp
    needed = [head // repeats for head in range(rank * share, (rank + 1) * share)]
    counts = [needed.count(head) for head in dict.fromkeys(needed)]
    if all(count == counts[0] for count in counts):
        return x.narrow(dim, needed[0], len(counts))
    return x.index_select(dim, torch.tensor(needed, device=x.device))


def spread(part: Tensor, dim: int, blocks: Sequence[int], rank: int, tp: int) -> Tensor:
    """The inverse of ``take``, to be summed over the ranks: the part in its places, zero elsewhere, without padding.

    ``blocks`` are the true extents: one that does not divide was padded.
    """
    places, begin = [], 0
    for block in blocks:
        share = part.shape[dim] if len(blocks) == 1 else block // tp
        start = min(rank * share, block)
        places.append((begin + start, begin + min(start + share, block)))
        begin += block
    shape = list(part.shape)
    pieces, at, used = [], 0, 0
    for start, stop in places:
        pieces += [part.new_zeros([*shape[:dim], start - at, *shape[dim + 1 :]]), part.narrow(dim, used, stop - start)]
        at, used = stop, used + stop - start
    pieces.append(part.new_zeros([*shape[:dim], begin - at, *shape[dim + 1 :]]))
    return torch.cat(pieces, dim)


def embedding_part(weight: Tensor, index: Tensor, start: int, padding_idx: int | None) -> Tensor:
    """Rows start .. start + n of a table, [n, h], looked up by index int64 [...]: [..., h], zero for other rows.

    Row ``padding_idx`` (of the whole table) takes no gradient.
    """
    rows = index - start
    outside = (rows < 0) | (rows >= weight.shape[0])
    own = None if padding_idx is None or not start <= padding_idx < start + weight.shape[0] else padding_idx - start
    return F.embedding(rows.masked_fill(outside, 0), weight, own).masked_fill(outside.unsqueeze(-1), 0.0)


def loss_of_stats(
    stats: Tensor, target: Tensor, ignore_index: int, reduction: int, smoothing: float, dtype: torch.dtype
) -> Tensor:
    """The cross entropy of PyTorch from all ranks' ``ops.cross_entropy_stats``, [tp, ..., 3 or 5], and target [...].

    ``reduction`` 0: per row, 1: mean over rows that are not ignored, 2: sum.
    """
    ignored = target == ignore_index
    loss = ops.loss_of_stats(stats, smoothing, everywhere=True).masked_fill(ignored, 0.0)
    if reduction == 0:
        return loss.to(dtype)
    total = loss.sum()
    return (total / ignored.logical_not().sum() if reduction == 1 else total).to(dtype)


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp_rank):
        ctx.owns = tp_rank == 0
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.owns else torch.zeros_like(grad), None


def own(x: Tensor, tp_rank: int) -> Tensor:
    """x; its gradient counts on rank 0 only.

    For a parameter that is read both in sharded work, where its gradient is partial, and where every rank computes the
    same: one sum over the ranks is then right for both.
    """
    return _Own.apply(x, tp_rank)
