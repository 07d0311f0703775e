"""Norms against the formula in float64, PyTorch's own modules and HuggingFace's."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from megatron_merak.ops import layer_norm, rms_norm

EPS = 1e-5


def formula(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def inputs(dtype, shape=(2, 5, 24)):
    generator = torch.Generator().manual_seed(3)
    x, weight, upstream = (torch.randn(s, generator=generator, dtype=torch.float64) for s in (shape, shape[-1:], shape))
    return [t.to(dtype) for t in (3 * x, 1 + 0.3 * weight, upstream)]


def gradients(fn, x, weight, upstream):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = fn(x, weight)
    return (out.detach(), *torch.autograd.grad(out, (x, weight), upstream))


def test_rms_norm_has_the_gradient_of_its_formula():
    x, weight, _ = (t.requires_grad_() for t in inputs(torch.float64, (3, 2, 7)))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, EPS), (x, weight))
    assert torch.allclose(rms_norm(x, weight, EPS), formula(x, weight), rtol=1e-12, atol=0)


# float32: a few units in the last place. bfloat16: one rounding of each result, 2**-9 of its size.
@pytest.mark.parametrize(("dtype", "forward", "backward"), [(torch.float32, 1e-6, 3e-6), (torch.bfloat16, 4e-3, 4e-3)])
def test_rms_norm_in_training_dtypes(dtype, forward, backward):
    x, weight, upstream = inputs(dtype)
    found = gradients(lambda x, w: rms_norm(x, w, EPS), x, weight, upstream)
    exact = gradients(formula, x.double(), weight.double(), upstream.double())
    for ours, truth, tolerance in zip(found, exact, (forward, backward, backward), strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - truth).abs().max() <= tolerance * truth.abs().max()


def test_rms_norm_equals_llama():
    x, weight, upstream = inputs(torch.float32)
    module = LlamaRMSNorm(24, EPS)
    theirs = gradients(lambda x, w: torch.func.functional_call(module, {"weight": w}, (x,)), x, weight, upstream)
    for ours, other in zip(gradients(lambda x, w: rms_norm(x, w, EPS), x, weight, upstream), theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=2e-6)


def test_rms_norm_of_a_strided_view_and_of_zeros():
    """Query heads are a slice of a fused tensor; a row of zeros has no direction and must not give NaN."""
    wide, weight, _ = inputs(torch.float32, (2, 6, 24))
    view = wide[:, 1:5]
    assert torch.equal(rms_norm(view, weight, EPS), rms_norm(view.contiguous(), weight, EPS))
    out, grad, grad_weight = gradients(lambda x, w: rms_norm(x, w, EPS), torch.zeros(1, 24), weight, torch.ones(1, 24))
    assert out.count_nonzero() == 0 and grad_weight.count_nonzero() == 0
    torch.testing.assert_close(grad[0], weight / EPS**0.5)


def test_rms_norm_statistics_are_fp32():
    """2048 equal bfloat16 values: squares summed in bfloat16 would stall at 256 of them."""
    out = rms_norm(torch.full((1, 2048), 3.0, dtype=torch.bfloat16), torch.ones(2048, dtype=torch.bfloat16), EPS)
    assert torch.equal(out, torch.ones_like(out))


def test_rms_norm_keeps_its_input_and_one_number_per_row():
    x, weight, _ = (t.requires_grad_() for t in inputs(torch.float32, (4, 24)))
    saved = {}

    def pack(tensor):
        saved[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        rms_norm(x, weight, EPS)
    assert sorted(t.numel() for t in saved.values()) == [4, 24, 96]


def test_layer_norm_is_pytorchs():
    x, weight, upstream = inputs(torch.float32)
    bias = torch.linspace(-1, 1, 24)
    expected = F.layer_norm(x, (24,), weight, bias, EPS)
    assert torch.equal(layer_norm(x, weight, bias, EPS), expected)
