"""Rotary embedding against HuggingFace's tables and application, and as what it is: a rotation of
complex numbers.
"""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as apply_rotary_of_gptj
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from megatron_merak.ops import rotary, rotary_angles
from tests.ops.truth import KERNELS, TYPES, assert_rounded, gradients, in_double, random, threads

LLAMA31 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def rope(base, rotary_dim, **scaling):
    parameters = {"rope_type": "default", "rope_theta": base} | scaling
    config = LlamaConfig(
        hidden_size=4 * rotary_dim,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    return config


@pytest.mark.parametrize(
    ("base", "dim", "factor", "original"),
    [
        (10000, 64, None, 8192),
        (500000.0, 128, 8.0, 8192),
        (500000.0, 64, 32.0, 8192),
        (10000.0, 32, 4.0, 512),
    ],
)
def test_angles_are_huggingfaces(base, dim, factor, original):
    scaling = (
        {}
        if factor is None
        else LLAMA31 | {"factor": factor, "original_max_position_embeddings": original}
    )
    config = rope(base, dim, **scaling)
    if factor is None:
        frequency, attention_scale = LlamaRotaryEmbedding(config).inv_freq, 1.0
    else:
        frequency, attention_scale = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert attention_scale == 1.0
    cos, sin = rotary_angles(600, dim, base, factor, original)
    assert cos.shape == sin.shape == (600, 1, dim // 2) and cos.dtype == torch.float32
    # Position 1 gives each frequency back; position 599 multiplies its rounding by 599.
    found = torch.atan2(sin[1, 0], cos[1, 0])
    torch.testing.assert_close(found, frequency.float(), rtol=2e-6, atol=1e-9)
    angle = 599 * frequency.double()
    torch.testing.assert_close(cos[599, 0].double(), angle.cos(), rtol=0, atol=2e-4)
    torch.testing.assert_close(sin[599, 0].double(), angle.sin(), rtol=0, atol=2e-4)


def test_scaling_keeps_fast_frequencies_and_divides_slow_ones():
    plain, scaled = (
        torch.atan2(*reversed(rotary_angles(2, 128, 500000.0, f)))[1, 0] for f in (None, 8.0)
    )
    wavelength = 2 * torch.pi / plain
    assert torch.equal(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    torch.testing.assert_close(scaled[wavelength > 8192], plain[wavelength > 8192] / 8)
    between = (wavelength > 8192 / 4) & (wavelength < 8192)
    assert between.any() and ((plain / 8 < scaled) & (scaled < plain))[between].all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_application_is_llamas(dtype, tolerance):
    query, key = torch.randn(2, 7, 4, 16).to(dtype), torch.randn(2, 7, 2, 16).to(dtype)
    module = LlamaRotaryEmbedding(rope(10000.0, 16))
    cos, sin = module(query, torch.arange(7).unsqueeze(0))
    expected = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    angles = rotary_angles(7, 16, 10000.0)
    for ours, theirs in zip((query, key), expected, strict=True):
        torch.testing.assert_close(
            rotary(ours, *angles), theirs.transpose(1, 2), rtol=0, atol=tolerance
        )


both = pytest.mark.parametrize("ops", KERNELS, ids=lambda ops: ops.name)
layouts = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def test_interleaved_application_is_gptjs():
    x = torch.randn(2, 7, 4, 16)
    cos, sin = rotary_angles(7, 16, 10000.0)
    theirs = apply_rotary_of_gptj(x, *(table.squeeze(1).expand(2, 7, 8) for table in (sin, cos)))
    torch.testing.assert_close(rotary(x, cos, sin, interleaved=True), theirs, rtol=0, atol=1e-6)


def pairs(x, rotated, interleaved):
    if interleaved:
        return x[..., 0:rotated:2], x[..., 1:rotated:2]
    return x[..., : rotated // 2], x[..., rotated // 2 : rotated]


@both
@layouts
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rotated", [12, 8, 2])
def test_it_rotates_pairs_and_passes_the_rest(rotated, dtype, interleaved, ops):
    """A pair is the real and the imaginary part of a number that is multiplied by exp(i angle)."""
    (x,) = random((2, 5, 3, 12), dtype=dtype)
    cos, sin = rotary_angles(5, rotated, 100.0)
    first, second = pairs(x.double(), rotated, interleaved)
    turned = torch.complex(first, second) * torch.complex(cos.double(), sin.double())
    out = ops.rotary(x, cos, sin, interleaved, False)
    roundings = 1 if ops is torch.ops.merak and compiled() else 4
    for found, exact in zip(
        pairs(out, rotated, interleaved), (turned.real, turned.imag), strict=True
    ):
        assert_rounded(found, exact, 4, roundings)
    assert torch.equal(out[..., rotated:], x[..., rotated:]) and out.dtype == dtype
    back = ops.rotary(out, cos, sin, interleaved, True)
    assert_rounded(back, x.double(), 8, roundings=6)


def compiled():
    return torch._C._dispatch_has_kernel_for_dispatch_key("merak::rotary", "CPU")


@layouts
@pytest.mark.parametrize("rotated", [8, 4])
def test_gradient(rotated, interleaved):
    cos, sin = (t.double() for t in rotary_angles(3, rotated, 100.0))
    x = torch.randn(2, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotary(x, cos, sin, interleaved), (x,))


# x, and the tables that broadcast to it
def shapes():
    cos, sin = rotary_angles(5, 8, 100.0)
    flat = cos.squeeze(1), sin.squeeze(1)
    by_sample = tuple(random((2, 1, 5, 4), (2, 1, 5, 4), seed=8))
    (fused,) = random((2, 5, 9, 10))
    yield "slice of fused heads", fused[:, :, 2:8], (cos, sin)
    yield "heads before positions", fused.transpose(1, 2), flat
    yield "a table for each sample", fused.transpose(1, 2), by_sample
    yield (
        "a table that repeats",
        fused.transpose(1, 2),
        tuple(t[:1].expand(2, 1, 5, 4) for t in by_sample),
    )
    yield "tables in a wider one", fused, tuple(torch.cat((t, t), -1)[..., :4] for t in (cos, sin))
    yield "transposed features", random((2, 5, 10, 6))[0].transpose(2, 3), (cos, sin)
    yield (
        "tables transposed",
        fused,
        tuple(t.squeeze(1).t().contiguous().t().unsqueeze(1) for t in (cos, sin)),
    )
    yield "three dimensions", fused[0], (cos, sin)
    yield "positions alone", fused[0, :, 0], flat
    yield "one position", fused[0, 0, 0], (flat[0][0], flat[1][0])
    yield "nothing", fused[:, :0], (cos[:0], sin[:0])
    yield "no heads", fused[:, :, :0], (cos, sin)


@both
@layouts
@pytest.mark.parametrize(
    ("kind", "x", "tables"),
    list(shapes()),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_any_layout_to_which_the_tables_broadcast(kind, x, tables, interleaved, ops):
    def turn(x):
        return ops.rotary(x, *tables, interleaved, False)

    def formula(x):
        first, second = pairs(x, 8, interleaved)
        cos, sin = (t.double() for t in tables)
        parts = first * cos - second * sin, second * cos + first * sin
        joined = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
        return torch.cat((joined, x[..., 8:]), -1)

    upstream = random(x.shape[::-1], seed=4)[0].permute(*reversed(range(x.dim())))
    for found, exact in zip(
        gradients(turn, [x], upstream), in_double(formula, [x], upstream), strict=True
    ):
        assert_rounded(found, exact, 4)
        assert found.is_contiguous()


def test_tables_that_do_not_broadcast_are_refused():
    cos, sin = rotary_angles(5, 8, 100.0)
    for ops in KERNELS:
        with pytest.raises(RuntimeError):
            ops.rotary(torch.ones(2, 4, 3, 8), cos, sin, False, False)
        with pytest.raises(RuntimeError):
            ops.rotary(torch.ones(2, 5, 3, 6), cos, sin, False, False)


def test_the_tables_are_kept_and_nothing_else():
    cos, sin = rotary_angles(5, 8, 100.0)
    x, saved = torch.randn(2, 5, 3, 8, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.data_ptr()) or t, lambda t: t
    ):
        rotary(x, cos, sin)
    assert set(saved) == {cos.data_ptr(), sin.data_ptr()}


def test_results_do_not_depend_on_threads():
    (x,) = random((3, 500, 4, 32))
    one, *more = threads(lambda: [rotary(x, *rotary_angles(500, 32, 100.0))])
    assert all(torch.equal(one[0], other[0]) for other in more)
