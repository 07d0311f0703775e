"""Attention on heads: causal, and with a mask."""

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from .documents import spans
from .linear import WeightGradientSink
from .moved import moved
from .one_kernel import AsOneKernel, pricing
from .register import kernels
from .softmax import masked_softmax

# Up to this length a CPU is faster with whole rows of scores than with torch's tiled kernel;
# measured on AVX-512 cores.
_SHORT = 512
_SHORT_MASKED = 256
_BLOCK = 128


class _ShortCausal(torch.autograd.Function):
    """Blocks of queries against all keys up to the block's end; the backward recomputes
    probabilities.

    Only query, key and value are saved. Query heads that share a key head are rows of one product.
    Queries are those of the last positions of the keys, if there are fewer.
    """

    @staticmethod
    def forward(ctx, query, key, value, scale):
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        queries, keys, values = _by_group(query, key, value)
        before = keys.shape[1] - queries.shape[2]
        context = queries.new_empty(*queries.shape[:3], values.shape[-1])
        for start in range(0, queries.shape[2], _BLOCK):
            part, stop = _probabilities(queries, keys, start, scale)
            context[:, :, start:stop] = torch.bmm(part, values[:, : before + stop]).unflatten(
                1, (queries.shape[1], -1)
            )
        return (
            context.view(query.shape[0], query.shape[2], *context.shape[2:])
            .transpose(1, 2)
            .flatten(2)
        )

    @staticmethod
    def backward(ctx, grad):
        query, key, value = ctx.saved_tensors
        queries, keys, values = _by_group(query, key, value)
        grads, _, _ = _by_group(grad.unflatten(2, (query.shape[2], -1)), key, value)
        before = keys.shape[1] - queries.shape[2]
        grad_queries = torch.empty_like(queries)
        grad_keys = torch.zeros_like(keys)
        grad_values = torch.zeros_like(values)
        scale = ctx.scale
        for start in range(0, queries.shape[2], _BLOCK):
            part, stop = _probabilities(queries, keys, start, scale)
            rows, grad_rows = (x[:, :, start:stop].flatten(1, 2) for x in (queries, grads))
            seen = before + stop
            grad_values[:, :seen].baddbmm_(part.transpose(1, 2), grad_rows)
            grad_part = torch.bmm(grad_rows, values[:, :seen].transpose(1, 2))
            grad_heads = grad_part.unflatten(1, (queries.shape[1], -1))
            heads = part.unflatten(1, (queries.shape[1], -1))
            grad_scores = (
                kernels(part).masked_softmax_backward(grad_heads, heads, scale, True).flatten(1, 2)
            )
            grad_block = torch.bmm(grad_scores, keys[:, :seen])
            grad_queries[:, :, start:stop] = grad_block.unflatten(1, (queries.shape[1], -1))
            grad_keys[:, :seen].baddbmm_(grad_scores.transpose(1, 2), rows)
        back = (grad_queries.flatten(0, 1), grad_keys, grad_values)
        return *(x.unflatten(0, (query.shape[0], -1)).transpose(1, 2) for x in back), None


def _by_group(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[b, s, n, d], [b, t, g, d], [b, t, g, e] -> [b g, n / g, s, d], [b g, t, d], [b g, t, e],
    contiguous.
    """
    batch, length, heads, dim = query.shape
    groups = key.shape[2]
    queries = query.transpose(1, 2).reshape(batch * groups, heads // groups, length, dim)
    keys = key.transpose(1, 2).reshape(batch * groups, *key.shape[1::2])
    values = value.transpose(1, 2).reshape(batch * groups, *value.shape[1::2])
    return queries, keys, values


def _probabilities(queries: Tensor, keys: Tensor, start: int, scale: float) -> tuple[Tensor, int]:
    """Softmax of the queries start:stop over the keys that any of them sees, [b g, n / g (stop -
    start), seen], and stop.
    """
    stop = min(start + _BLOCK, queries.shape[2])
    seen = keys.shape[1] - queries.shape[2] + stop
    rows = queries[:, :, start:stop].flatten(1, 2)
    scores = _scores(rows, keys[:, :seen]).unflatten(1, (queries.shape[1], -1))
    return masked_softmax(scores, None, scale, causal=True).to(queries.dtype).flatten(1, 2), stop


def _scores(rows: Tensor, keys: Tensor) -> Tensor:
    """rows @ keys.T; in fp32 for fp16, whose range is too small for some scores."""
    wide = torch.float32 if rows.dtype == torch.float16 else rows.dtype
    return rows.to(wide) @ keys.to(wide).mT


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """query [b, s, n, d], key and value [b, s, g, d] with n a multiple of g -> [b, s, n * d].

    scale: of the scores, None for 1 / sqrt(d).
    """
    if pricing() is not None:
        heads = (x.transpose(1, 2) for x in (query, key, value))
        return AsOneKernel.apply(
            partial(_causal_on_heads, dropout=dropout, scale=scale), True, *heads, None
        )
    return _causal(query, key, value, dropout, scale=scale)


def _causal_on_heads(
    query: Tensor, key: Tensor, value: Tensor, _, dropout: float, scale: float | None
) -> Tensor:
    return _causal(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), dropout, scale=scale
    )


def _causal(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float | None
) -> Tensor:
    if query.device.type == "cpu" and dropout == 0 and query.shape[1] <= _SHORT:
        return _ShortCausal.apply(
            query, key, value, 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        )
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        dropout_p=dropout,
        is_causal=True,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.transpose(1, 2).flatten(2)


def causal_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Sequence[int],
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Causal attention of chunks of a sequence: query [b, n, r, d], key [b, g, t, d], value [b, g,
    t, e] with n a multiple of g -> [b, n, r, e], of the strides of ``attention``.

    starts: the position of the first query of each chunk; chunks are of one length.
    scale:  of the scores, None for 1 / sqrt(d).
    """
    size = query.shape[2] // len(starts)
    found = []
    for start, chunk in zip(starts, query.split(size, 2), strict=True):
        seen = start + size
        part = _chunk(chunk, key[:, :, :seen], value[:, :, :seen], dropout, scale=scale)
        found.append(part.transpose(1, 2))
    return (torch.cat(found, 1) if len(found) > 1 else found[0].contiguous()).transpose(1, 2)


def _chunk(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float | None
) -> Tensor:
    """Causal attention of the last queries."""
    if pricing() is None:
        return _last_queries(query, key, value, None, dropout=dropout, scale=scale)
    run = partial(_last_queries, dropout=dropout, scale=scale)
    return AsOneKernel.apply(run, True, query, key, value, None)


def _last_queries(
    query: Tensor, key: Tensor, value: Tensor, _, dropout: float, scale: float | None
) -> Tensor:
    queries = query.shape[2]
    keys = key.shape[2]
    on_cpu = query.device.type == "cpu"
    if on_cpu and dropout == 0 and keys <= _SHORT:
        rows = (x.transpose(1, 2) for x in (query, key, value))
        joined = _ShortCausal.apply(*rows, query.shape[-1] ** -0.5 if scale is None else scale)
        return joined.unflatten(2, (query.shape[1], -1)).transpose(1, 2)
    mask: Tensor
    if on_cpu:
        mask = torch.ones(queries, keys, dtype=torch.bool).tril_(keys - queries)
    else:
        mask = causal_lower_right(queries, keys)  # which kernels know without its values
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    apart: Tensor | None = None,
    sink: WeightGradientSink | None = None,
) -> Tensor:
    """query [b, n, s, d], key [b, g, t, d], value [b, g, t, e] with n a multiple of g -> [b, n, s,
    e], of the strides that torch's kernels give it: a graph may view the heads of a token as one.

    mask:  [1 or b, 1 or n, 1 or s, t], without gradient: False hides a key, numbers are added to
           the scores.
    scale: of the scores; None: 1 / sqrt(d).
    apart: ``documents(mask)``, if known: documents are computed one by one.
    sink:  of which the backward gets keys and values again, in a context of ``sink.unkept``.
    """
    if pricing() is not None:
        return AsOneKernel.apply(
            partial(_masked, dropout=dropout, scale=scale), False, query, key, value, mask
        )
    if mask is not None and apart is not None and dropout == 0 and (rows := spans(apart)):
        rows = rows * (len(query) // len(rows))
        found = _by_documents(query, key, value, mask, scale=scale, rows=rows)
    else:
        key, value = (_as_read_again(x, query, mask, sink=sink) for x in (key, value))
        found = _masked(query, key, value, mask, dropout=dropout, scale=scale)
    return found.transpose(1, 2).contiguous().transpose(1, 2)


def _by_documents(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, rows: list
) -> Tensor:
    """Attention inside each document, with causal kernels where the mask is causal. rows: of
    ``spans``.
    """
    outputs = []
    for place, (causal, bounds) in enumerate(rows):
        here = slice(place, place + 1)
        parts = []
        sizes = [end - begin for begin, end in bounds]
        hidden = mask[here] if len(mask) > 1 else mask
        pieces = (x[here].split(sizes, 2) for x in (query, key, value))
        for (begin, end), q, k, v in zip(bounds, *pieces, strict=True):
            if causal and value.shape[-1] == query.shape[-1]:
                joined = _causal(
                    q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, scale=scale
                )
                parts.append(joined.unflatten(2, (query.shape[1], -1)).transpose(1, 2))
            else:
                parts.append(
                    _masked(q, k, v, hidden[..., begin:end, begin:end], dropout=0.0, scale=scale)
                )
        outputs.append(torch.cat(parts, 2))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float | None,
) -> Tensor:
    key, value = (_as_read(x, query, mask) for x in (key, value))
    if _in_whole_rows(query):
        return _whole_rows(
            query,
            key,
            value,
            mask,
            dropout=dropout,
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
        )
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout, False, scale=scale, enable_gqa=grouped
    )


def _in_whole_rows(query: Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[2] <= _SHORT_MASKED


def _as_read(x: Tensor, query: Tensor, mask: Tensor | None) -> Tensor:
    """Return keys or values as what computes masked attention reads them."""
    if _in_whole_rows(query):
        return x.contiguous()
    repeats = query.shape[1] // x.shape[1]
    if repeats > 1 and mask is not None and query.device.type != "cpu":
        # Beside a mask no fused kernel of an accelerator shares heads.
        return x.repeat_interleave(repeats, 1)
    return x


_as_read_again = moved(_as_read)


def _whole_rows(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scale: float
) -> Tensor:
    batch, heads, length, dim = query.shape
    rows = query.reshape(batch, key.shape[1], -1, dim)
    scores = _scores(rows, key).view(batch, heads, length, -1)
    if mask is not None and mask.dtype != torch.bool:
        scores = torch.add(mask, scores, alpha=scale)
        mask = None
        scale = 1.0
    part = masked_softmax(scores, mask, scale).to(query.dtype)
    part = F.dropout(part, dropout) if dropout > 0 else part
    return (part.view(*rows.shape[:3], -1) @ value).view(batch, heads, length, -1)
