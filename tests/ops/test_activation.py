"""Activations against their formulas in float64 and HuggingFace's."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from megatron_merak.ops import gelu_tanh, swiglu


def formula(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return gate / (1 + (-gate).exp()) * up


def gradients(fn, x, upstream):
    x = x.detach().requires_grad_()
    out = fn(x)
    return out.detach(), torch.autograd.grad(out, x, upstream)[0]


def test_swiglu_has_the_gradient_of_its_formula():
    x = torch.randn(3, 2, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, (x,))
    torch.testing.assert_close(swiglu(x), formula(x), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_equals_two_autograd_ops(dtype):
    """Bitwise: the same roundings as silu(gate) * up on separate tensors."""
    x = (3 * torch.randn(4, 5, 16)).to(dtype)
    upstream = torch.randn(4, 5, 8).to(dtype)
    theirs = gradients(lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], x, upstream)
    for ours, other in zip(gradients(swiglu, x, upstream), theirs, strict=True):
        assert ours.dtype == dtype and torch.equal(ours, other)


def test_swiglu_takes_strided_inputs_and_gradients():
    x, upstream = torch.randn(10, 4).t(), torch.randn(5, 4).t()
    for strided, dense in zip(
        gradients(swiglu, x, upstream), gradients(swiglu, x.contiguous(), upstream.contiguous()), strict=True
    ):
        assert torch.equal(strided, dense)


def test_swiglu_keeps_its_input_only():
    x, saved = torch.randn(4, 16, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        swiglu(x)
    assert set(saved) == {x.data_ptr()}


def test_gelu_is_gpt2s():
    x = torch.linspace(-6, 6, 101, dtype=torch.float64, requires_grad=True)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    torch.testing.assert_close(gelu_tanh(x), 0.5 * x * (1 + inner.tanh()), rtol=1e-12, atol=1e-15)
    assert torch.autograd.gradcheck(gelu_tanh, (x,))
    torch.testing.assert_close(gelu_tanh(x.detach().float()), ACT2FN["gelu_new"](x.detach().float()))
