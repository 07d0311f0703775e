"""One part of attention in a ring, by a kernel of torch or in blocks of queries: its result with the
statistics that parts are added up by, and its gradients, given those of all parts.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten

_BLOCK = 128  # queries whose scores are in memory at one time
_ROWS = 32  # the statistics of the memory-efficient kernel are of a multiple of so many queries
_KEYS = 16  # and rows of its mask lie a multiple of so many numbers apart


class End(NamedTuple):
    """What the backward of a part is given of attention to all keys.

    grad, out: gradient and result, [b, n, s, e].
    log:       of the sum of exp of a query's scores, [b, n, s].
    delta:     sum of gradient x result, likewise.
    """

    grad: Tensor
    out: Tensor
    log: Tensor
    delta: Tensor


def part(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return sums [b, n, s, e] and statistics [b, n, s, 2] of a part alone, see ``ring``.

    query: [b, n, s, d]; key: [b, g, t, d]; value: [b, g, t, e].
    mask:  of four dimensions; False hides a key, numbers are added to the scores.
    """
    if isinstance(query, FakeTensor):
        wide = torch.promote_types(query.dtype, torch.float32)
        rows = query.shape[:3]
        sums = query.new_empty((*rows, value.shape[-1]), dtype=wide)
        return sums, query.new_empty((*rows, 2), dtype=wide)
    if has_flash(query, value, mask):
        return flash(query, key, value, causal=causal, scale=scale)
    if has_efficient(query, value):
        return efficient(query, key, value, mask, causal=causal, scale=scale)
    return _blocks(query, key, value, mask, causal=causal, scale=scale)


def part_back(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    end: End,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    if has_flash(query, value, mask):
        return flash_back(query, key, value, end, causal=causal, scale=scale)
    if has_efficient(query, value):
        return efficient_back(query, key, value, mask, end, causal=causal, scale=scale)
    return _blocks_back(query, key, value, mask, end, causal=causal, scale=scale)


# ---- by kernels of torch, on GPUs ----------------------------------------------------------------
def has_flash(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the flash kernel computes a part."""
    width = query.shape[-1]
    half = query.dtype in (torch.float16, torch.bfloat16)
    return has_efficient(query, value) and half and mask is None and width == value.shape[-1] <= 256


def has_efficient(query: Tensor, value: Tensor) -> bool:
    """Whether the memory-efficient kernel computes a part."""
    known = query.dtype in (torch.float16, torch.bfloat16, torch.float32)
    aligned = query.shape[-1] % 8 == value.shape[-1] % 8 == 0
    return query.device.type == "cuda" and known and aligned


def flash(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """See ``part``. Sums are results here, of which each has a sum of exp of 1."""
    found = aten._scaled_dot_product_flash_attention.default(
        query, key, value, 0.0, causal, False, scale=scale
    )
    log = found[1]
    return found[0].float(), torch.stack((log, torch.ones_like(log)), -1)


def flash_back(
    query: Tensor, key: Tensor, value: Tensor, end: End, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``part_back``."""
    unread = torch.empty(2, dtype=torch.uint64, device=query.device)  # of dropout, which is none
    return aten._scaled_dot_product_flash_attention_backward.default(
        end.grad,
        query,
        key,
        value,
        end.out,
        end.log.contiguous(),
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        causal,
        unread,
        unread,
        scale=scale,
    )


def efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """See ``part``. Sums are results here; of a query that sees nothing they are zeros."""
    repeats = query.shape[1] // key.shape[1]
    keys = key.repeat_interleave(repeats, 1)
    values = value.repeat_interleave(repeats, 1)
    bias = _bias(mask, query, key)
    out, log, _, _ = aten._scaled_dot_product_efficient_attention.default(
        query, keys, values, bias, True, 0.0, causal, scale=scale
    )
    log = log.narrow(2, 0, query.shape[2])
    seen = log.isfinite()
    sums = torch.where(seen.unsqueeze(-1), out.float(), 0.0)
    return sums, torch.stack((torch.where(seen, log, -torch.inf), seen.to(log.dtype)), -1)


def efficient_back(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    end: End,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``part_back``."""
    repeats = query.shape[1] // key.shape[1]
    keys = key.repeat_interleave(repeats, 1)
    values = value.repeat_interleave(repeats, 1)
    missing = -query.shape[2] % _ROWS
    log = F.pad(end.log, (0, missing), value=torch.inf)
    unread = torch.empty((), dtype=torch.int64, device=query.device)  # of dropout, which is none
    wanted = [True, True, True, False]
    found = aten._scaled_dot_product_efficient_attention_backward.default(
        end.grad,
        query,
        keys,
        values,
        _bias(mask, query, key),
        end.out,
        log,
        unread,
        unread,
        0.0,
        wanted,
        causal,
        scale=scale,
    )
    grad_key, grad_value = (x.unflatten(1, (-1, repeats)).sum(2) for x in found[1:3])
    return found[0], grad_key, grad_value


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return what is added to the scores, as the memory-efficient kernel takes it."""
    if mask is None:
        return None
    bias = mask.to(query.dtype)
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(bias).masked_fill_(mask.logical_not(), -torch.inf)
    keys = key.shape[2]
    rows = bias.expand(*bias.shape[:3], keys).contiguous()
    aligned = F.pad(rows, (0, -keys % _KEYS)).narrow(3, 0, keys)
    return aligned.expand(*query.shape[:3], keys)


# ---- in blocks of queries ------------------------------------------------------------------------
def _blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    queries, keys, values = _by_group(query, key, value)
    found = []
    for _, scores in _scores(queries, keys, mask, causal=causal, scale=scale):
        highest = scores.amax(-1)
        finite = torch.where(highest == -torch.inf, 0.0, highest)
        shares = scores.sub_(finite[..., None]).exp_()
        sums = _joined(shares) @ values[:, :, : shares.shape[-1]]
        stats = torch.stack((highest, shares.sum(-1)), -1)
        found.append((sums.unflatten(2, shares.shape[2:4]).flatten(1, 2), stats.flatten(1, 2)))
    all_sums, all_stats = zip(*found, strict=True)
    return torch.cat(all_sums, 2), torch.cat(all_stats, 2)


def _blocks_back(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    end: End,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys, values = _by_group(query, key, value)
    groups = key.shape[1]
    grads, logs, deltas = (x.unflatten(1, (groups, -1)) for x in (end.grad, end.log, end.delta))
    grad_query = []
    grad_key = torch.zeros_like(keys)
    grad_value = torch.zeros_like(values)
    first = 0
    if isinstance(query, FakeTensor):
        # A plan asks for shapes and the most memory, which the last blocks need, each beside what
        # the one before it left; a long sequence has thousands of blocks.
        last = (queries.shape[3] - 1) // _BLOCK
        first = _BLOCK * max(0, last - 2)
        grad_query.append(torch.empty_like(queries[:, :, :, :first]))
    for start, scores in _scores(queries, keys, mask, causal=causal, scale=scale, first=first):
        stop = start + scores.shape[3]
        seen = scores.shape[-1]
        shares = _joined(scores.sub_(logs[:, :, :, start:stop, None]).exp_())
        rows = _joined(queries[:, :, :, start:stop])
        grad_rows = _joined(grads[:, :, :, start:stop].to(shares.dtype))
        grad_value[:, :, :seen] += shares.mT @ grad_rows
        grad_part = grad_rows @ values[:, :, :seen].mT
        grad_part -= _joined(deltas[:, :, :, start:stop, None])
        grad_scores = grad_part.mul_(shares).mul_(scale)
        found = grad_scores @ keys[:, :, :seen]
        grad_query.append(found.unflatten(2, scores.shape[2:4]))
        grad_key[:, :, :seen] += grad_scores.mT @ rows
    joined = torch.cat(grad_query, 3).flatten(1, 2)
    return joined.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _by_group(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[b, n, s, d], [b, g, t, d], [b, g, t, e] -> [b, g, n / g, s, d], and the others, at least
    fp32.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    queries = query.unflatten(1, (key.shape[1], -1))
    return queries.to(wide), key.to(wide), value.to(wide)


def _joined(x: Tensor) -> Tensor:
    """[b, g, n / g, r, f] -> [b, g, n / g * r, f]: query heads that share a key head are rows of one
    product.
    """
    return x.flatten(2, 3)


def _scores(
    queries: Tensor,
    keys: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    first: int = 0,
) -> Iterator[tuple[int, Tensor]]:
    """Yield the first query of each block, and its scores [b, g, n / g, r, t]; of a causal part to
    the keys up to the last query of the block.

    first: the query at which the first block begins.
    """
    for start in range(first, queries.shape[3], _BLOCK):
        rows = queries[:, :, :, start : start + _BLOCK]
        stop = start + rows.shape[3]
        seen = keys[:, :, :stop] if causal else keys
        scores = (_joined(rows) @ seen.mT).mul_(scale).unflatten(2, rows.shape[2:4])
        if causal:
            later = torch.ones(scores.shape[3:], dtype=torch.bool, device=scores.device)
            scores.masked_fill_(later.triu_(start + 1), -torch.inf)
        if mask is not None:
            own = mask[:, :, start:stop] if mask.shape[2] > 1 else mask
            own = own.unflatten(1, (keys.shape[1], -1)) if own.shape[1] > 1 else own[:, None]
            if own.dtype == torch.bool:
                scores.masked_fill_(~own, -torch.inf)
            else:
                scores += own
        yield start, scores
