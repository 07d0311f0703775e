"""Activations against their formulas in float64 and HuggingFace's."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from megatron_merak.ops import gated, gelu_tanh, swiglu


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


PLAIN = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_equals_two_autograd_ops(name, dtype):
    """Bitwise, and with the gate's gradient only where it is asked for."""
    gate, up, upstream = ((3 * torch.randn(4, 5, 8)).to(dtype) for _ in range(3))
    for wanted in ((True, True), (True, False), (False, True)):
        inputs = [x.clone().requires_grad_(want) for x, want in zip((gate, up), wanted, strict=True)]
        asked = [x for x in inputs if x.requires_grad]
        ours, theirs = gated(*inputs, name), PLAIN[name](inputs[0]) * inputs[1]
        assert torch.equal(ours, theirs)
        for a, b in zip(*(torch.autograd.grad(out, asked, upstream) for out in (ours, theirs)), strict=True):
            assert torch.equal(a, b)


def test_gelu_is_gpt2s():
    x = torch.linspace(-6, 6, 101, dtype=torch.float64, requires_grad=True)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    torch.testing.assert_close(gelu_tanh(x), 0.5 * x * (1 + inner.tanh()), rtol=1e-12, atol=1e-15)
    assert torch.autograd.gradcheck(gelu_tanh, (x,))
    torch.testing.assert_close(gelu_tanh(x.detach().float()), ACT2FN["gelu_new"](x.detach().float()))
