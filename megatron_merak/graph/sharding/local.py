"""Functions that a rewritten graph calls beside aten and marks: of one rank's shard, with literals
for the rank.
"""

from collections.abc import Sequence
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import ops
from ...errors import ConfigError
from ..capture.empty import is_fake


def take(x: Tensor, dim: int, blocks: Sequence[int], rank: int, tp: int, padded: int = 0) -> Tensor:
    """Return a rank's shard of a replicated x: an even share of every block along ``dim``, in
    order.

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


def take_ends(x: Tensor, dim: int, blocks: Sequence[int], rank: int, tp: int) -> Tensor:
    """Return two chunks of every block along ``dim``, of 2 tp in each: the one that is as far from
    the start as the other is from the end. So ranks have as much of a causal mask as one another.

        tp = 2    rank 0: chunks 0 and 3    rank 1: chunks 1 and 2

    blocks: extents along ``dim``.
    """
    pieces = []
    begin = 0
    for block in blocks:
        size = block // (2 * tp)
        for chunk in ends_of(rank, tp):
            pieces.append(x.narrow(dim, begin + chunk * size, size))
        begin += block
    return torch.cat(pieces, dim)


def ends_of(rank: int, tp: int) -> tuple[int, int]:
    """Return the numbers of a rank's chunks, see ``take_ends``."""
    return rank, 2 * tp - 1 - rank


def by_rank(x: Tensor, dim: int, blocks: Sequence[int], tp: int) -> Tensor:
    """Return x with the chunks of each rank, see ``take_ends``, side by side in each block.

    blocks: equal extents along ``dim``.
    """
    halves = x.unflatten(dim, (len(blocks), 2, tp, blocks[0] // (2 * tp)))
    first, last = halves.unbind(dim + 1)
    return torch.stack((first, last.flip(dim + 1)), dim + 2).flatten(dim, dim + 3)


def by_position(x: Tensor, dim: int, blocks: Sequence[int], tp: int) -> Tensor:
    """Undo ``by_rank``."""
    chunks = x.unflatten(dim, (len(blocks), tp, 2, blocks[0] // (2 * tp)))
    first, last = chunks.unbind(dim + 2)
    return torch.stack((first, last.flip(dim + 1)), dim + 1).flatten(dim, dim + 3)


by_position_unkept = ops.moved(by_position)


def fill(shard: Tensor, dim: int, valid: int, value: float) -> Tensor:
    """Return a shard with ``value`` in place of its padding, which are the entries along ``dim``
    from ``valid`` on.
    """
    missing = shard.shape[dim] - valid
    dims_after = shard.dim() - 1 - dim % shard.dim()
    if not missing:
        return shard
    return F.pad(shard.narrow(dim, 0, valid), [0, 0] * dims_after + [0, missing], value=value)


def take_heads(x: Tensor, dim: int, heads: int, repeats: int, rank: int, tp: int) -> Tensor:
    """Return the key-value heads of a replicated x that a rank's share of the query heads reads.

    heads:   number of query heads.
    repeats: number of query heads that read one key-value head.

    One head per group of query heads where the share consists of full groups or lies in one, else
    one per query head.
    """
    share = heads // tp
    needed = [head // repeats for head in range(rank * share, (rank + 1) * share)]
    counts = [needed.count(head) for head in dict.fromkeys(needed)]
    if all(count == counts[0] for count in counts):
        return x.narrow(dim, needed[0], len(counts))
    return x.index_select(dim, torch.tensor(needed, device=x.device))


def embed_in_zeros(shard: Tensor, dim: int, blocks: Sequence[int], rank: int, tp: int) -> Tensor:
    """Return a full-size tensor with the shard in its place and zeros elsewhere; the sum over ranks
    is the full tensor.

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


def joined(stacked: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a value of ``shape`` from all ranks' parts, [tp, samples, length / tp, ...]."""
    return stacked.transpose(0, 1).reshape(*shape)


def shares(x: Tensor, dim: int, blocks: Sequence[int], tp: int) -> Tensor:
    """Return the share of every rank along ``dim``, [tp, ...].

    blocks: equal extents along ``dim``, of each of which every rank has an even share.
    """
    divided = x.unflatten(dim, (len(blocks), tp, blocks[0] // tp))
    return divided.movedim(dim + 1, 0).flatten(dim + 1, dim + 2).contiguous()


def united(pieces: Tensor, dim: int, blocks: Sequence[int]) -> Tensor:
    """Return the value of which [tp, ...] are the ranks' shares along ``dim``; see ``shares``."""
    tp = len(pieces)
    divided = pieces.unflatten(dim + 1, (len(blocks), blocks[0] // tp))
    return divided.movedim(0, dim + 1).flatten(dim, dim + 2)


def row_counts(own: Tensor, got: Tensor) -> Tensor:
    """Return how many rows are sent to each rank, and got of each, [2, tp].

    own: rows of this rank for each rank's experts, [tp, experts / tp].
    got: rows of each rank for this rank's experts, likewise.
    """
    return torch.stack([own.sum(1), got.sum(1)])


def rows_to_send(x: Tensor, counts: Tensor) -> Tensor:
    """Return x, when it is known how many of its rows go to each rank."""
    return x


def rows_to_shards(x: Tensor, counts: Tensor, shards: int) -> Tensor:
    """Return the rows of x that are sent to any rank, those for the same experts once for each of
    ``shards`` neighbours, which have parts of these. The host waits for their number.

    counts: see ``row_counts``.
    """
    if is_fake(counts):
        return torch.cat([x] * shards)
    lengths = counts[0, ::shards].tolist()
    pieces = x.narrow(0, 0, sum(lengths)).split(lengths)
    return torch.cat([piece for piece in pieces for _ in range(shards)])


def sums_of_shards(rows: Tensor, counts: Tensor, shards: int) -> Tensor:
    """Undo ``rows_to_shards``: add up what neighbours computed for each row."""
    if is_fake(counts):
        return rows.narrow(0, 0, len(rows) // shards)
    pieces = rows.split(counts[0].tolist())
    return torch.cat(
        [sum(pieces[at + 1 : at + shards], pieces[at]) for at in range(0, len(pieces), shards)]
    )


def on_first(x: Tensor, shard: int) -> Tensor:
    """Return x on the first of some neighbours, and zeros on others."""
    return x if shard == 0 else torch.zeros_like(x)


def counted_rows(x: Tensor, counts: Tensor) -> Tensor:
    """Return the rows of x that are sent to any rank: the first ones, or all while a plan is made.
    The host waits for their number. counts: see ``row_counts``.
    """
    if is_fake(counts):
        return x
    return x.narrow(0, 0, sum(counts[0].tolist()))


def with_dropped_rows(rows: Tensor, ids: Tensor) -> Tensor:
    """Return rows by expert with zeros behind them for those of no expert. ids: of all rows."""
    return F.pad(rows, [0, 0] * (rows.dim() - 1) + [0, len(ids) - len(rows)])


def order_by_expert(got: Tensor, rows: Tensor) -> Tensor:
    """Return the number of each row by expert, int64 [rows].

    got:  see ``row_counts``.
    rows: that lie by the rank that they came from, and then by expert.
    """
    tp, experts = got.shape
    expert = torch.arange(experts, device=got.device).repeat(tp)
    of_row = expert.repeat_interleave(got.flatten(), output_size=len(rows))
    return of_row.argsort(stable=True)


def expert_offsets(got: Tensor) -> Tensor:
    """Return where the rows of each expert end, int32 [experts / tp]."""
    return got.sum(0).cumsum(0).to(torch.int32)


def expert_ids(got: Tensor, first: int, rows: Tensor) -> Tensor:
    """Return the expert of each of ``rows``, and one of its experts for those behind the last.

    first: this rank's first expert.
    """
    ends = got.sum(0).cumsum(0)
    numbers = torch.arange(len(rows), device=got.device)
    own = torch.searchsorted(ends, numbers, right=True)
    return first + own.clamp(max=len(ends) - 1)


def room_for(rows: int, parts: int, factor: float) -> int:
    """Return how many rows a rank has room for that it sends to a rank of each part of the experts.

    rows:   that it has of its own.
    parts:  of the experts.
    factor: of ``--moe-expert-rank-capacity-factor``.
    """
    return min(rows, ceil(rows / parts * min(factor, parts)))


def padded_source(own: Tensor, shards: int, rows: int, factor: float) -> Tensor:
    """Return the number of the row in each place of what is sent, and -1 where there is none, int64
    [ranks / shards * room]. The host reads none of them, but on a CPU whether there is room.

    own:    see ``row_counts``; likewise for neighbours that have the same experts.
    shards: number of these neighbours.
    rows:   number of this rank's rows.
    factor: see ``room_for``.

    Raises ConfigError if a rank gets more rows than it has room for; on a GPU the device fails.
    """
    counts = own[::shards].sum(1)
    _check_room(counts, rows, factor)
    places = torch.arange(room_for(rows, len(counts), factor), device=own.device)
    first = counts.cumsum(0) - counts
    numbers = first[:, None] + places
    return torch.where(places < counts[:, None], numbers, -1).flatten()


def _check_room(counts: Tensor, rows: int, factor: float) -> None:
    if is_fake(counts):
        return
    flag = "--moe-expert-rank-capacity-factor"
    parts = len(counts)
    room = room_for(rows, parts, factor)
    if counts.device.type != "cpu":
        fits = (counts <= room).all()
        text = f"{flag} {factor}: a rank has more rows for one rank than the {room} it has room for"
        torch._assert_async(fits, f"{text}. Use a larger one, or leave it out.")
        return
    most = int(counts.max())
    if most > room:
        reason = f"this rank has {most} rows for the experts of one rank, and room for {room}"
        tenths = ceil(10 * factor)
        while room_for(rows, parts, tenths / 10) < most:
            tenths += 1
        raise ConfigError(flag, factor, reason, f"Use {tenths / 10:g} or more, or leave it out")


def padded_places(own: Tensor, shards: int, rows: int, factor: float) -> Tensor:
    """Return where each of ``rows`` is in what is sent, and -1 for rows of no expert, int64 [rows].

    For the arguments see ``padded_source``.
    """
    counts = own[::shards].sum(1)
    room = room_for(rows, len(counts), factor)
    ends = counts.cumsum(0)
    numbers = torch.arange(rows, device=own.device)
    part = torch.searchsorted(ends, numbers, right=True).clamp(max=len(ends) - 1)
    places = part * room + numbers - (ends - counts)[part]
    return torch.where(numbers < ends[-1], places, -1)


def copies_for_shards(rows: Tensor, parts: int, shards: int) -> Tensor:
    """Return the rows of each of ``parts`` once for each of ``shards`` neighbours."""
    # whose gradients are added up one by one, as those of ``rows_to_shards``: to the same bits
    return torch.stack([rows.unflatten(0, (parts, -1))] * shards, 1).flatten(0, 2)


def sums_of_copies(rows: Tensor, parts: int, shards: int) -> Tensor:
    """Undo ``copies_for_shards``: add up what neighbours computed for each row."""
    pieces = rows.unflatten(0, (parts, shards, -1)).unbind(1)
    return sum(pieces[1:], pieces[0]).flatten(0, 1)


def padded_order(got: Tensor, shards: int, rows: int, factor: float) -> Tensor:
    """Return the number of each row by expert, and of the places without one behind them, int64 [ranks
    * room].

    got: see ``row_counts``.

    For the other arguments see ``padded_source``.
    """
    room = room_for(rows, len(got) // shards, factor)
    places = torch.arange(room, device=got.device).expand(len(got), room).contiguous()
    expert = torch.searchsorted(got.cumsum(1), places, right=True)
    return expert.flatten().argsort(stable=True)


def filled_rows(rows: Tensor, ends: Tensor) -> Tensor:
    """Return rows with zeros behind the last group, so that no gradient comes of what is there.

    ends: where the rows of each expert end.
    """
    there = torch.arange(len(rows), device=rows.device) < ends[-1]
    return torch.where(there.view(-1, *[1] * (rows.dim() - 1)), rows, 0)


def pick_rows(x: Tensor, counts: Tensor, rank: int) -> Tensor:
    """Return those of all rows that are of a rank's experts. The host waits for their number.

    x:      rows by expert.
    counts: rows of each rank's experts, [tp, experts / tp].
    """
    of_ranks = counts.sum(1).tolist()
    return x.narrow(0, sum(of_ranks[:rank]), of_ranks[rank])


def place_rows(rows: Tensor, counts: Tensor, rank: int) -> Tensor:
    """Undo ``pick_rows``, with zeros for the rows of other ranks' experts."""
    of_ranks = counts.sum(1).tolist()
    before = sum(of_ranks[:rank])
    after = sum(of_ranks[rank + 1 :])
    return F.pad(rows, [0, 0] * (rows.dim() - 1) + [before, after])


def loss_of_stats(
    stats: Tensor,
    target: Tensor,
    ignore_index: int,
    reduction: int,
    smoothing: float,
    dtype: torch.dtype,
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

    For a parameter that is read both by sharded work, where its gradient is a partial sum, and by
    replicated work, where every rank computes the same gradient: one all-reduce is then right for
    both.
    """
    return _GradOnRank0.apply(x, tp_rank)
