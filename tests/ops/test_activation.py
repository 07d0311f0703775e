"""Activations against their formulas in float64 and HuggingFace's."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from megatron_merak.ops import bias_gelu, gated, gelu_tanh, swiglu
from tests.ops.truth import KERNELS, TYPES, assert_rounded, gradients, in_double, random, threads

PLAIN = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
SHAPES = [(4, 5, 16), (130, 33), (1, 515), (7, 1), (0, 8), (2, 0, 8)]
twin = torch.ops.merak_torch
both = pytest.mark.parametrize("ops", KERNELS, ids=lambda ops: ops.name)
every = pytest.mark.parametrize("name", PLAIN)


def formula(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return gate / (1 + (-gate).exp()) * up


def merged(ops, name):
    return lambda gate_up: ops.gated_merged(gate_up, name)


def apart(name):
    return lambda gate_up: PLAIN[name](gate_up.chunk(2, -1)[0]) * gate_up.chunk(2, -1)[1]


# ---- gates ---------------------------------------------------------------------------------------
def test_swiglu_has_the_gradient_of_its_formula():
    x = torch.randn(3, 2, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, (x,))
    torch.testing.assert_close(swiglu(x), formula(x), rtol=1e-12, atol=0)


@every
def test_a_gate_has_the_gradient_of_its_formula(name):
    gate, up = (torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda gate, up: gated(gate, up, name), (gate, up))


@every
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_round_once(shape, dtype, name):
    gate, up, upstream = random(shape, shape, shape, dtype=dtype, scale=2.0)
    roundings = 1 if compiled() else 4
    found = gradients(lambda *both: torch.ops.merak.gated(*both, name), (gate, up), upstream)
    truth = in_double(lambda gate, up: PLAIN[name](gate) * up, (gate, up), upstream)
    for ours, exact in zip(found, truth, strict=True):
        assert ours.dtype == dtype and ours.is_contiguous()
        assert_rounded(ours, exact, 16, roundings)
    joined = gradients(merged(torch.ops.merak, name), [torch.cat((gate, up), -1)], upstream)
    assert torch.equal(joined[0], found[0]) and torch.equal(joined[1], torch.cat(found[1:], -1))


def compiled():
    return torch._C._dispatch_has_kernel_for_dispatch_key("merak::gated", "CPU")


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twins_equal_two_autograd_ops(name, dtype):
    """Bitwise: the same roundings as activation(gate) * up on separate tensors."""
    x, upstream = random((4, 5, 16), (4, 5, 8), dtype=dtype, scale=3.0)
    out, grad = gradients(apart(name), [x], upstream)
    gate, up = x.chunk(2, -1)
    assert torch.equal(twin.gated_merged(x, name), out) and torch.equal(
        twin.gated(gate, up, name), out
    )
    assert torch.equal(twin.gated_merged_backward(upstream, x, name), grad)
    assert torch.equal(torch.cat(twin.gated_backward(upstream, gate, up, name), -1), grad)


@every
def test_gradients_that_are_not_asked_for(name):
    gate, up, upstream = random((4, 8), (4, 8), (4, 8))
    whole = gradients(lambda *both: gated(*both, name), (gate, up), upstream)[1:]
    for wanted in (0, 1):
        inputs = [x.detach().requires_grad_(wanted == place) for place, x in enumerate((gate, up))]
        (found,) = torch.autograd.grad(gated(*inputs, name), inputs[wanted], upstream)
        assert torch.equal(found, whole[wanted])


@both
def test_strided_inputs_and_gradients(ops):
    x, upstream = random((10, 4), (5, 4))
    for views in ((x.t(), upstream.t()), (random((8, 10))[0][::2], random((4, 10))[0][:, ::2])):
        strided = gradients(merged(ops, "silu"), views[:1], views[1])
        dense = gradients(merged(ops, "silu"), [views[0].contiguous()], views[1].contiguous())
        assert_same(strided, dense, ops)
    gate, up = random((6, 16))[0].chunk(2, -1)
    strided = gradients(
        lambda *both: ops.gated(*both, "gelu"), (gate, up), torch.ones(1).expand(6, 8)
    )
    dense = gradients(
        lambda *both: ops.gated(*both, "gelu"), (gate.clone(), up.clone()), torch.ones(6, 8)
    )
    assert_same(strided, dense, ops)


def assert_same(found, wanted, ops):
    """To the bit for kernels; PyTorch computes what does not fill a vector in another way."""
    tolerance = 0.0 if ops is not twin and compiled() else 1e-6
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_swiglu_keeps_its_input_only():
    x, saved = torch.randn(4, 16, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.data_ptr()) or t, lambda t: t
    ):
        swiglu(x)
    assert set(saved) == {x.data_ptr()}


# ---- the curves ----------------------------------------------------------------------------------
# Largest errors of value and slope over the grid, in units of 2^-24 of the larger of 1 and |x|.
CURVES = {"silu": (3, 4), "gelu": (3, 4), "gelu_tanh": (3, 5)}


@every
def test_curves(name):
    """Every 1/1024 in [-20, 20] against float64; so a coefficient that is off in its sixth digit is
    seen.
    """
    x = torch.arange(-20 * 1024, 20 * 1024 + 1).float() / 1024
    value, slope = gradients(
        lambda x: torch.ops.merak.bias_gelu(x, None, name), [x], torch.ones_like(x)
    )
    exact = in_double(PLAIN[name], [x], torch.ones_like(x))
    for found, truth, units in zip((value, slope), exact, CURVES[name], strict=True):
        error = (found.double() - truth).abs() / x.abs().clamp(min=1) * 2**24
        assert error.max() <= units, (float(error.max()), float(x[error.argmax()]))


@every
def test_ends_of_the_curves(name):
    """PyTorch's are NaN in places: where a cube overflows, or at infinity."""
    if not compiled():
        pytest.skip("no kernels")
    ops = torch.ops.merak
    x = torch.tensor(
        [-3e38, -1e20, -200.0, -100.0, -88.0, -0.0, 0.0, 88.0, 100.0, 200.0, 1e18, 3e38, torch.inf]
    )
    value = ops.bias_gelu(x, None, name)
    torch.testing.assert_close(value, x.clamp(min=0), rtol=0, atol=1e-30)
    assert ops.bias_gelu(torch.tensor([torch.nan]), None, name).isnan()
    slope, _ = ops.bias_gelu_backward(torch.ones_like(x[:-3]), x[:-3], None, name)
    torch.testing.assert_close(
        slope[x[:-3].abs() > 1], (x[:-3].clamp(min=0) > 0).float()[x[:-3].abs() > 1]
    )
    torch.testing.assert_close(slope[5:7], torch.full((2,), 0.5), rtol=0, atol=1e-7)
    far = torch.tensor([-3e38, -1e20, 1e20, 3e38])
    slope, _ = ops.bias_gelu_backward(torch.ones(4), far, None, name)
    torch.testing.assert_close(slope, torch.tensor([0.0, 0, 1, 1]), rtol=0, atol=1e-30)


def test_gelu_is_gpt2s():
    x = torch.linspace(-6, 6, 101, dtype=torch.float64, requires_grad=True)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    torch.testing.assert_close(gelu_tanh(x), 0.5 * x * (1 + inner.tanh()), rtol=1e-12, atol=1e-15)
    assert torch.autograd.gradcheck(gelu_tanh, (x,))
    torch.testing.assert_close(
        gelu_tanh(x.detach().float()), ACT2FN["gelu_new"](x.detach().float())
    )


# ---- behind a bias -------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_gelu_rounds_once(shape, dtype, name):
    x, bias, upstream = random(shape, shape[-1:], shape, dtype=dtype)
    roundings = 1 if compiled() else 4
    for inputs in ((x, bias), (x,)):
        found = gradients(lambda x, bias=None: bias_gelu(x, bias, name), inputs, upstream)
        truth = in_double(lambda x, bias=0.0: PLAIN[name](x + bias), inputs, upstream)
        for ours, exact in zip(found, truth, strict=True):
            assert ours.dtype == dtype and ours.is_contiguous()
            assert_rounded(ours, exact, 32, roundings)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_gelu_twin_equals_two_autograd_ops(dtype, name):
    x, bias, upstream = random((6, 5, 8), (8,), (6, 5, 8), dtype=dtype)
    out, grad, grad_bias = gradients(lambda x, bias: PLAIN[name](x + bias), (x, bias), upstream)
    found = twin.bias_gelu_backward(upstream, x, bias, name)
    assert torch.equal(twin.bias_gelu(x, bias, name), out) and torch.equal(found[0], grad)
    torch.testing.assert_close(found[1], grad_bias)


def test_bias_gelu_has_the_gradient_of_its_formula():
    x, bias = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 2, 5), (5,))
    )
    for name in PLAIN:
        assert torch.autograd.gradcheck(
            lambda x, bias, name=name: bias_gelu(x, bias, name), (x, bias)
        )


@both
def test_a_bias_of_another_type_keeps_it(ops):
    x, upstream = random((40, 16), (40, 16), dtype=torch.bfloat16)
    (bias,) = random((16,))
    _, grad, grad_bias = gradients(
        lambda x, bias: ops.bias_gelu(x, bias, "gelu"), (x, bias), upstream.to(x.dtype)
    )
    assert grad.dtype == torch.bfloat16 and grad_bias.dtype == torch.float32


def test_results_do_not_depend_on_threads():
    x, bias, upstream = random((1500, 96), (96,), (1500, 96))
    one, *more = threads(lambda: gradients(bias_gelu, (x, bias), upstream))
    assert all(torch.equal(a, b) for other in more for a, b in zip(one, other, strict=True))


@both
def test_an_unknown_activation(ops):
    with pytest.raises((RuntimeError, KeyError), match="swish"):
        ops.gated(torch.ones(2), torch.ones(2), "swish")
