"""Attention to keys and values that come by part by part, as ranks pass them on in a ring.

A part adds what its queries see of the keys at hand to sums, and the end divides these:

    sums  += exp(scores - highest) values      [b, n, s, e], at least fp32
    stats  = (highest score, sum of exp)       [b, n, s, 2], likewise

Kept for the backward are a rank's queries, its own keys and values, the result and one statistic per
query, however many parts there are. So the backward of a part needs what no forward has at its time:
the gradient and the result, the statistics of all parts, and keys and values that have gone on since.
All of these come to it in place of gradients. A part returns, beside its sums, values without memory:

    stats    gets  (log of the sum of exp, sum of gradient x result)
    message  gets  (gradient, result)          [2, b, n, s, e]
    hole     gets  the keys and values         like them

The end gives them out in its backward, and parts hand them on. ``pass_back`` joins the holes, of which
each is for a part: ranks rotate what it gives to the hole before it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .one_kernel import priced
from .ring_parts import End, part, part_back

Span = tuple[int, int, int, int, bool]  # queries from, to; keys from, to; whether they are causal


class _View(NamedTuple):
    """What a part is of: for the fields see ``ring_part``."""

    query: Tensor
    both: Tensor
    mask: Tensor | None
    span: Span
    scale: float

    def seen(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys, values and mask of the span."""
        start, stop, begin, end, _ = self.span
        width = self.query.shape[-1]
        key, value = self.both[:, :, begin:end].split((width, self.both.shape[-1] - width), -1)
        mask = self.mask
        if mask is not None:
            mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
            mask = mask[..., start:stop, :] if mask.shape[2] > 1 else mask
            mask = mask[..., begin:end] if mask.shape[3] > 1 else mask
        return self.query[:, :, start:stop], key, value, mask


class _RingPart(torch.autograd.Function):
    """What ``ring_part`` does. The first part has its keys and values in its tape, and no hole."""

    @staticmethod
    def forward(ctx, query, both, mask, sums, stats, message, span, scale):
        first = sums is None
        ctx.save_for_backward(query, both if first else None, mask)
        ctx.span = span
        ctx.scale = scale
        if first:
            sums, stats = _nothing(query, both)
            message = query.new_zeros(()).expand(2, *sums.shape)
        else:
            message = message.view_as(message)
        sums, stats = _added(_View(query, both, mask, span, scale=scale), sums, stats)
        ctx.mark_non_differentiable(sums)
        hole = None if first else both.new_zeros(()).expand(both.shape)
        return sums, stats, message, hole

    @staticmethod
    def backward(ctx, _, stats, message, hole):
        query, both, mask = ctx.saved_tensors
        first = both is not None
        both = both if first else hole
        view = _View(query, both, mask, ctx.span, scale=ctx.scale)
        grad_query, grad_both = _gradients(view, stats, message)
        before = (None, None, None) if first else (None, stats, message)
        return grad_query, grad_both, None, *before, None, None


def ring_part(
    query: Tensor,
    both: Tensor,
    mask: Tensor | None,
    before: Sequence[Tensor],
    span: Span,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Add what queries see of some keys; return (sums, stats, message), and a hole if there is a
    part before.

    query:  [b, n, s, d].
    both:   keys and values side by side, [b, g, t, d + e] with n a multiple of g.
    mask:   [1 or b, 1 or n, 1 or s, t], without gradient: False hides a key, numbers are added to
            the scores.
    before: (sums, stats, message) of the part before; empty for the first.
    span:   the queries that see any of these keys, and the keys that any of them sees; causal where
            query i sees the keys up to i.
    scale:  of the scores; None: 1 / sqrt(d).
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    sums, stats, message = before or (None, None, None)
    found = _RingPart.apply(query, both, mask, sums, stats, message, span, scale)
    return found if before else found[:3]


def ring_arrive(both: Tensor, stats: Tensor) -> Tensor:
    """Return keys and values that have come, when the part before has computed ``stats``: they are
    sent on before the next part computes with them.
    """
    return both.view_as(both)


class _PassBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hole, before):
        return hole.view_as(hole)

    @staticmethod
    def backward(ctx, both):
        return both, both if ctx.needs_input_grad[1] else None


def ring_pass_back(hole: Tensor, before: Tensor | None = None) -> Tensor:
    """Return a value whose gradient, keys and values, is for a part and goes on to the one before.

    before: what this returned for that one; None: it has its own.
    """
    return _PassBack.apply(hole, before)


class _RingEnd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sums, stats, message, both, hole):
        highest, total = stats.unbind(-1)
        seen = total > 0
        # Of a query that sees nothing the result is zero, and so is each exp(score - log).
        log = torch.where(seen, highest + total.log(), torch.finfo(total.dtype).max / 2)
        out = sums / torch.where(seen, total, 1.0)[..., None]
        out = out.to(message.dtype).transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(out, log, both)
        return out

    @staticmethod
    def backward(ctx, grad):
        out, log, both = ctx.saved_tensors
        delta = (grad * out).sum(-1, dtype=log.dtype)
        return None, torch.stack((log, delta), -1), torch.stack((grad, out)), None, both


def ring_end(sums: Tensor, stats: Tensor, message: Tensor, both: Tensor, hole: Tensor) -> Tensor:
    """Return attention of all parts, [b, n, s, e], of the strides of ``attention``.

    both: this rank's own keys and values.
    hole: of ``ring_pass_back`` for the last part.
    """
    return _RingEnd.apply(sums, stats, message, both, hole)


# ---- a part --------------------------------------------------------------------------------------
def _nothing(query: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums and statistics of queries that have seen nothing."""
    wide = torch.promote_types(query.dtype, torch.float32)
    rows = query.shape[:3]
    sums = query.new_zeros((*rows, both.shape[-1] - query.shape[-1]), dtype=wide)
    stats = query.new_zeros((*rows, 2), dtype=wide)
    stats[..., 0] = -torch.inf
    return sums, stats


def _added(view: _View, sums: Tensor, stats: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums and statistics to which a part is added."""
    start, stop, _, _, causal = view.span
    if start == stop:
        return sums.detach(), stats.clone()
    rows, key, value, mask = view.seen()
    found, own = priced(
        lambda: part(rows, key, value, mask, causal=causal, scale=view.scale),
        (rows, key, value, mask),
        causal,
        back=False,
    )
    before = stats[:, :, start:stop]
    highest = torch.maximum(before[..., 0], own[..., 0])
    # of queries that have seen nothing: -inf less -inf is nan
    finite = torch.where(highest == -torch.inf, 0.0, highest)
    old = (before[..., 0] - finite).exp()
    new = (own[..., 0] - finite).exp()
    joined = sums[:, :, start:stop] * old[..., None] + found * new[..., None]
    total = before[..., 1] * old + own[..., 1] * new
    both_stats = torch.stack((highest, total), -1)
    if stop - start == view.query.shape[2]:
        return joined, both_stats
    sums = sums.clone()
    stats = stats.clone()
    sums[:, :, start:stop] = joined
    stats[:, :, start:stop] = both_stats
    return sums, stats


def _gradients(view: _View, stats: Tensor, message: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries, and of keys and values.

    stats, message: what comes to them, see the module.
    """
    start, stop, begin, end, _ = view.span
    if (start, stop, begin, end) == (0, view.query.shape[2], 0, view.both.shape[2]):
        return _gradients_of_seen(view, stats, message)
    grad_query = torch.zeros_like(view.query)
    grad_both = view.both.new_zeros(view.both.shape)
    if start < stop:
        rows, pair = _gradients_of_seen(view, stats, message)
        grad_query[:, :, start:stop] = rows
        grad_both[:, :, begin:end] = pair
    return grad_query, grad_both


def _gradients_of_seen(view: _View, stats: Tensor, message: Tensor) -> tuple[Tensor, Tensor]:
    start, stop, _, _, causal = view.span
    rows, key, value, mask = view.seen()
    log, delta = stats[:, :, start:stop].unbind(-1)
    grad, out = message[:, :, :, start:stop].unbind(0)
    given = End(grad, out, log, delta)
    grad_rows, grad_key, grad_value = priced(
        lambda: part_back(rows, key, value, mask, given, causal=causal, scale=view.scale),
        (rows, key, value, mask, grad, out),
        causal,
        back=True,
    )
    return grad_rows, torch.cat((grad_key, grad_value), -1)
