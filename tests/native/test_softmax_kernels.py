"""The CUDA kernels of the masked softmax on a CPU, against float64."""

import ctypes

import pytest
import torch

from tests.native.shim import NEEDED, ROUNDING, TINY, TYPES, load, shifted

pytestmark = NEEDED
INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# fp32 inside: scores of up to 10 are rounded by 10 * 2^-24, which exp turns into a relative error;
# sums add a few more.
INSIDE = 3e-6


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def forward(kernels, scores, mask=None, scale=0.5, causal=False):
    out, strides = torch.full_like(scores, NAN), (ctypes.c_int64 * 3)()
    if mask is not None:
        strides = (ctypes.c_int64 * 3)(
            *(0 if mask.shape[d] == 1 else mask.stride(d) for d in range(3))
        )
    kernels(
        "merak_masked_softmax",
        TYPES[scores.dtype],
        scores,
        mask,
        strides,
        out,
        *scores.shape,
        scale,
        causal,
    )
    return out


def backward(kernels, grad, probabilities, scale=0.5, causal=False):
    out, (batch, heads, queries, keys) = torch.full_like(grad, NAN), grad.shape
    sizes = batch * heads, queries, keys
    kernels(
        "merak_masked_softmax_backward",
        TYPES[grad.dtype],
        grad,
        probabilities,
        out,
        *sizes,
        scale,
        causal,
    )
    return out


def shown(scores, mask, causal):
    """bool [b, n, s, t]: which keys count."""
    queries, keys = scores.shape[-2:]
    seen = torch.ones(scores.shape, dtype=torch.bool)
    if mask is not None:
        seen &= mask
    return seen.tril(keys - queries) if causal else seen


def exact(scores, mask=None, scale=0.5, causal=False):
    hidden = ~shown(scores, mask, causal)
    wide = (scores.double() * scale).masked_fill(hidden, -INF)
    return wide.softmax(-1).masked_fill((wide == -INF).all(-1, keepdim=True), 0.0)


def exact_backward(grad, probabilities, scale=0.5):
    p, g = probabilities.double(), grad.double()
    return scale * p * (g - (p * g).sum(-1, keepdim=True))


def assert_close(found, truth, inside=INSIDE):
    """Each number to its own rounding, beside what fp32 arithmetic adds in relation to the row's
    largest.
    """
    dtype = found.dtype
    allowed = (
        ROUNDING[dtype] * truth.abs() + inside * truth.abs().amax(-1, keepdim=True) + TINY[dtype]
    )
    off = (found.double() - truth).abs()
    assert bool((off <= allowed).all()), f"{(off / allowed).max():.3g} times what is allowed"


def check(kernels, dtype, keys, causal=False, mask=None, queries=5, unaligned=False):
    scores = (3 * randn(2, 2, queries, keys, seed=keys)).to(dtype)
    grad = randn(2, 2, queries, keys, seed=keys + 1).to(dtype)
    if unaligned:
        scores, grad = shifted(scores), shifted(grad)
    out = forward(kernels, scores, mask, causal=causal)
    assert_close(out, exact(scores, mask, causal=causal))
    assert bool((out[~shown(scores, mask, causal)] == 0).all())
    probabilities = exact(scores, mask, causal=causal).to(dtype)
    found = backward(kernels, grad, probabilities, causal=causal)
    assert_close(found, exact_backward(grad, probabilities), 2 * INSIDE)


@pytest.fixture(scope="module")
def kernels():
    return load("softmax")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "keys", [1, 7, 8, 33, 256, 257, 1000, 1024, 1025, 2056, 3001, 8192, 8200, 9001]
)
def test_rows_of_any_length(kernels, dtype, keys):
    check(kernels, dtype, keys, queries=1 if keys > 2000 else 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("queries", "keys"), [(5, 5), (64, 64), (9, 40), (40, 9), (3, 1200), (2, 8208)]
)
def test_causal_rows_end_at_the_diagonal(kernels, dtype, queries, keys):
    """With more queries than keys the first see nothing."""
    check(kernels, dtype, keys, causal=True, queries=queries)


@pytest.mark.parametrize("keys", [40, 41, 1100, 8256])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 3), (1, 2, 1), (2, 2, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_broadcast(kernels, keys, shape, causal):
    if keys == 8256 and shape != (2, 1, 3):
        shape = (1, 2, 3)
    mask = randn(*shape, keys, seed=4) > 0.3
    mask[-1, -1, -1] = False
    check(kernels, torch.bfloat16, keys, causal, mask, queries=3)


def test_a_mask_at_any_address_and_with_strides(kernels):
    mask = randn(2, 3, 2, 41, seed=5) > 0
    check(kernels, torch.bfloat16, 40, mask=mask[..., 1:].transpose(1, 2), queries=3)
    check(kernels, torch.float32, 40, mask=mask[:, :1, :1, :40].expand(2, 2, 3, 40), queries=3)


@pytest.mark.parametrize("keys", [40, 1600])
def test_unaligned_scores(kernels, keys):
    check(kernels, torch.bfloat16, keys, unaligned=True)


@pytest.mark.parametrize("keys", [24, 700, 2048, 8200])
def test_extremes(kernels, keys):
    """-inf is a key of no weight, a row of it zero; NaN stays unless hidden; the largest numbers do
    not overflow.
    """
    scores = randn(1, 1, 7, keys, seed=6)
    scores[0, 0, 0] = -INF
    scores[0, 0, 1, : keys - 1] = -INF
    scores[0, 0, 2, 3] = NAN
    scores[0, 0, 3, 4] = INF
    scores[0, 0, 4] *= 1e37
    scores[0, 0, 5, 5] = NAN
    scores[0, 0, 6] = 3e38
    mask = torch.ones(1, 1, 7, keys, dtype=torch.bool)
    mask[0, 0, 5, 5] = False
    out = forward(kernels, scores, mask, scale=0.5)[0, 0]
    assert out[0].count_nonzero() == 0
    assert out[1, -1] == 1 and out[1].count_nonzero() == 1
    assert bool(out[2].isnan().all()) and bool(out[3, 4].isnan())
    assert out[4].sum() == 1 and out[4].argmax() == scores[0, 0, 4].argmax()
    assert_close(out[5:6], exact(scores, mask)[0, 0, 5:6])
    assert_close(out[6:7], torch.full((1, keys), 1 / keys, dtype=torch.float64))


@pytest.mark.parametrize("keys", [48, 1536, 8448])
def test_what_causality_hides_does_not_count(kernels, keys):
    scores, grad = randn(1, 1, 6, keys, seed=7), randn(1, 1, 6, keys, seed=8)
    hidden, p = ~shown(scores, None, True), exact(scores, causal=True).float()
    out = forward(kernels, scores.masked_fill(hidden, NAN), causal=True)
    found = backward(kernels, grad.masked_fill(hidden, NAN), p, causal=True)
    assert_close(out, exact(scores, causal=True))
    assert_close(found, exact_backward(grad, p), 2 * INSIDE)


def test_nothing_to_do(kernels):
    assert forward(kernels, torch.empty(2, 0, 3, 4)).numel() == 0
    assert forward(kernels, torch.empty(2, 1, 3, 0)).numel() == 0


def test_a_row_does_not_depend_on_its_neighbours(kernels):
    scores = randn(1, 1, 9, 100, seed=9)
    whole = forward(kernels, scores)
    assert torch.equal(forward(kernels, scores[:, :, 4:5].contiguous())[0, 0, 0], whole[0, 0, 4])
