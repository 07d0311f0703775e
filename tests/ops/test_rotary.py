"""Rotary embedding against HuggingFace's tables and application, and as what it is: a rotation of complex numbers."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from megatron_merak.ops import rotary, rotary_angles

LLAMA31 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def rope(base, rotary_dim, **scaling):
    parameters = {"rope_type": "default", "rope_theta": base} | scaling
    config = LlamaConfig(
        hidden_size=4 * rotary_dim, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=parameters
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
    scaling = {} if factor is None else LLAMA31 | {"factor": factor, "original_max_position_embeddings": original}
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
    plain, scaled = (torch.atan2(*reversed(rotary_angles(2, 128, 500000.0, f)))[1, 0] for f in (None, 8.0))
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
        torch.testing.assert_close(rotary(ours, *angles), theirs.transpose(1, 2), rtol=0, atol=tolerance)


@pytest.mark.parametrize("rotated", [12, 8, 2])
def test_it_rotates_pairs_and_passes_the_rest(rotated):
    """Feature j and j + r/2 are the real and imaginary part of a number that is multiplied by exp(i angle)."""
    x = torch.randn(2, 5, 3, 12, dtype=torch.float64)
    cos, sin = (t.double() for t in rotary_angles(5, rotated, 100.0))
    half = rotated // 2
    turned = torch.complex(x[..., :half], x[..., half:rotated]) * torch.complex(cos, sin)
    out = rotary(x, cos, sin)
    torch.testing.assert_close(out[..., :half], turned.real, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out[..., half:rotated], turned.imag, rtol=1e-12, atol=1e-12)
    assert torch.equal(out[..., rotated:], x[..., rotated:])


@pytest.mark.parametrize("rotated", [8, 4])
def test_gradient(rotated):
    cos, sin = (t.double() for t in rotary_angles(3, rotated, 100.0))
    x = torch.randn(2, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotary(x, cos, sin), (x,))


def test_strided_input():
    """Query and key heads are a slice of the fused projection."""
    fused, angles = torch.randn(2, 5, 9, 8), rotary_angles(5, 8, 100.0)
    assert torch.equal(rotary(fused[:, :, :6], *angles), rotary(fused[:, :, :6].contiguous(), *angles))
