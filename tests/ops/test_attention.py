"""Attention against its formula in float64, on lengths of one block, of several, and past the short
ones.
"""

import pytest
import torch

from megatron_merak.ops import attention, causal_attention, documents

TOLERANCES = [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)]


def formula(query, key, value, scale=None):
    """Softmax of the scaled scores below the diagonal; query head n reads group n // (heads /
    groups).
    """
    s, ratio = query.shape[1], query.shape[2] // key.shape[2]
    keys, values = (t.repeat_interleave(ratio, 2) for t in (key, value))
    scores = torch.einsum("bqnd,bknd->bnqk", query, keys) * (scale or query.shape[-1] ** -0.5)
    weights = scores.masked_fill(torch.ones(s, s).triu(1).bool(), -torch.inf).softmax(-1)
    return torch.einsum("bnqk,bknd->bqnd", weights, values).flatten(2)


def problem(length, groups, dtype, heads=4, dim=8):
    generator = torch.Generator().manual_seed(length + groups)
    shapes = [(2, length, n, dim) for n in (heads, groups, groups)]
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return inputs, torch.randn(2, length, heads * dim, generator=generator).to(dtype)


def gradients(fn, inputs, upstream):
    inputs = [t.detach().requires_grad_() for t in inputs]
    out = fn(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, upstream)


@pytest.mark.parametrize(
    ("length", "groups"), [(1, 4), (6, 4), (6, 2), (6, 1), (128, 2), (300, 2), (513, 1)]
)
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_it_is_the_formula(length, groups, dtype, tolerance):
    inputs, upstream = problem(length, groups, dtype)
    exact = gradients(formula, [t.double() for t in inputs], upstream.double())
    for ours, truth in zip(gradients(causal_attention, inputs, upstream), exact, strict=True):
        assert ours.dtype == dtype and ours.shape == truth.shape
        assert (ours.double() - truth).abs().max() <= tolerance * truth.abs().max()


@pytest.mark.parametrize("length", [6, 200, 513])
def test_another_scale(length):
    inputs, upstream = problem(length, 2, torch.float64)
    exact = gradients(lambda *x: formula(*x, scale=0.7), inputs, upstream)
    for ours, truth in zip(
        gradients(lambda *x: causal_attention(*x, scale=0.7), inputs, upstream), exact, strict=True
    ):
        torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("length", [6, 200, 513])
def test_slices_of_one_tensor_and_strided_gradients(length):
    """Query, key and value are parts of a fused projection; a gradient comes in any layout."""
    (query, key, value), upstream = problem(length, 2, torch.float32)
    fused = torch.cat((query, key, value), 2)
    parts = fused.split((4, 2, 2), 2)
    strided = upstream.transpose(1, 2).contiguous().transpose(1, 2)
    expected = gradients(causal_attention, (query, key, value), upstream)
    for ours, other in zip(gradients(causal_attention, parts, strided), expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6)


def test_large_scores_do_not_overflow():
    (query, key, value), upstream = problem(200, 2, torch.float32)
    results = gradients(causal_attention, (1000 * query, 1000 * key, value), upstream)
    assert all(result.isfinite().all() for result in results)


@pytest.mark.parametrize("length", [64, 600])
def test_dropout_is_drawn_from_the_default_stream_and_keeps_the_mean(length):
    (query, key, value), _ = problem(length, 4, torch.float32)
    expected = causal_attention(query, key, torch.ones_like(value))
    torch.testing.assert_close(expected, torch.ones_like(expected))
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(causal_attention(query, key, torch.ones_like(value), 0.3))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert drawn[0].mean().item() == pytest.approx(1.0, abs=0.05)


def general_formula(query, key, value, mask, scale):
    keys, values = (t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
    scores = query @ keys.mT * (scale or query.shape[-1] ** -0.5)
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
    return scores.softmax(-1) @ values


MASKS = {
    "none": lambda s, t: None,
    "window": lambda s, t: torch.ones(s, t).tril(t - s).triu(t - s - 3).bool().view(1, 1, s, t),
    "keys": lambda s, t: (torch.arange(t) < t - 2).view(1, 1, 1, t).repeat(2, 1, 1, 1),
    "per head": lambda s, t: torch.randn(1, 4, s, t, dtype=torch.float64),
}


@pytest.mark.parametrize(("length", "keys"), [(6, 6), (6, 9), (300, 300)])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_attention_with_any_mask(length, keys, groups, name, dtype, tolerance):
    generator = torch.Generator().manual_seed(length + groups)
    shapes = [(2, 4, length, 8), (2, groups, keys, 8), (2, groups, keys, 8)]
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    upstream, mask = (
        torch.randn(2, 4, length, 8, generator=generator).to(dtype),
        MASKS[name](length, keys),
    )
    given = mask.to(dtype) if mask is not None and mask.dtype != torch.bool else mask
    wide = given.double() if given is not None and given.dtype != torch.bool else given
    exact = gradients(
        lambda *x: general_formula(*x, wide, 0.7), [t.double() for t in inputs], upstream.double()
    )
    found = gradients(lambda *x: attention(*x, given, scale=0.7), inputs, upstream)
    for ours, truth in zip(found, exact, strict=True):
        assert (
            ours.dtype == dtype
            and (ours.double() - truth).abs().max() <= tolerance * truth.abs().max()
        )


@pytest.mark.parametrize("length", [6, 300])
def test_a_query_without_any_key_gives_zero(length):
    inputs = [torch.randn(1, 2, length, 8) for _ in range(3)]
    mask = torch.ones(length, length).tril(-1).bool().view(1, 1, length, length)
    out, *grads = gradients(lambda *x: attention(*x, mask), inputs, torch.ones(1, 2, length, 8))
    assert not out[:, :, 0].any() and all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("length", [6, 300])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_heads_of_a_token_are_viewed_as_one(length, dropout):
    """As those of torch's kernels, whose result a captured model may view without a copy."""
    heads = [torch.randn(2, 4, length, 8) for _ in range(3)]
    mask = torch.ones(length, length).tril().bool().expand(2, 1, length, length)
    for given in (mask, None):
        attention(*heads, given, dropout).transpose(1, 2).view(2, length, 32)
    attention(*heads, mask, apart=documents(mask)).transpose(1, 2).view(2, length, 32)


@pytest.mark.parametrize("length", [64, 300])
def test_dropout_of_masked_attention(length):
    query, key = torch.randn(2, 4, length, 8), torch.randn(2, 2, length, 8)
    torch.manual_seed(3)
    out = attention(query, key, torch.ones_like(key), dropout=0.3)
    assert out.mean().item() == pytest.approx(1.0, abs=0.05) and out.std() > 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("length", [40, 300, 600])
def test_the_sum_of_a_softmax_is_fp32(length, dropout, dtype):
    """Over equal scores: a sum of ones in bf16 stops at 256, one in fp16 at 2048."""
    torch.manual_seed(1)
    heads = torch.ones(2, 4, length, 8, dtype=dtype)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool)
    causal = causal_attention(*(heads.transpose(1, 2) for _ in range(3)), dropout)
    for out in (
        causal,
        attention(heads, heads, heads, mask, dropout),
        attention(heads, heads, heads, None, dropout),
    ):
        assert out.float().mean().item() == pytest.approx(1, abs=0.05 if dropout else 1e-3)
        assert dropout or ((out.float() - 1).abs() <= 2**-8).all()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("length", [40, 300, 600])
def test_scores_that_fp16_does_not_hold(length, dropout):
    """What comes of --apply-query-key-layer-scaling: 64 x 60^2, which is scaled to 28,800 only
    then.
    """
    heads = [
        torch.full((1, 2, length, 64), value, dtype=torch.float16) for value in (60.0, 60.0, 1.0)
    ]
    seen = torch.ones(1, 1, length, length).tril()
    masks = (seen.bool(), torch.where(seen > 0, 0.0, -torch.inf).half())
    turned = [x.transpose(1, 2) for x in heads]
    found = gradients(
        lambda *x: causal_attention(*x, dropout), turned, torch.ones(1, length, 128).half()
    )
    for mask in masks:
        upstream = torch.ones(1, 2, length, 64).half()
        found += gradients(lambda *x, mask=mask: attention(*x, mask, dropout), heads, upstream)
    assert all(result.isfinite().all() for result in found)
