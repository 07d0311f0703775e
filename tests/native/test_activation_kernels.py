"""The CUDA kernels of the activations, on the CPU, against their formulas in float64."""

import math

import pytest
import torch

from tests.native.shim import NEEDED, TYPES, LaunchError, load, near, shifted

pytestmark = NEEDED
KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
SIZES = [(1, 1), (3, 7), (5, 8), (4, 1000), (700, 40), (2, 2055), (9, 4104)]


@pytest.fixture(scope="module")
def kernels():
    return load("activation")


def activation(x, kind):
    """In float64, and past +-40, where fp32 has long been constant, without infinities."""
    if kind == "silu":
        return x * torch.sigmoid(x)
    if kind == "gelu":
        return 0.5 * x * torch.erfc(-x / math.sqrt(2))
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def numbers(dtype, *shape, spread=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def with_gradient(fn, *inputs, grad):
    inputs = [t.double().requires_grad_() for t in inputs]
    out = fn(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, grad.double())


def run_gated(kernels, kind, gate, up, grad):
    """gate and up: views with one distance from row to row; the gradients go to one tensor [rows, 2
    width].
    """
    rows, width = gate.shape
    code, strides = TYPES[gate.dtype], (gate.stride(0), up.stride(0))
    y, both = torch.empty_like(grad), torch.full((rows, 2 * width), torch.nan, dtype=gate.dtype)
    grad_gate, grad_up = both.chunk(2, -1)
    kernels("merak_gated", code, KINDS[kind], gate, up, y, rows, width, *strides)
    kernels(
        "merak_gated_backward", code, KINDS[kind], grad, gate, up, grad_gate, grad_up, rows, width, *strides,
        2 * width, 2 * width,
    )  # fmt: skip
    return y, grad_gate, grad_up


def compare_gated(kernels, kind, gate, up, grad, run=run_gated):
    y, grad_gate, grad_up = run(kernels, kind, gate, up, grad)
    truth = with_gradient(lambda g, u: activation(g, kind) * u, gate, up, grad=grad)
    g, u, upstream = gate.double().abs(), up.double().abs(), grad.double().abs()
    near(y, truth[0], g * u)
    near(grad_gate, truth[1], (1 + 4 * g) * u * upstream, 16)
    near(grad_up, truth[2], g * upstream)


def run_biased(kernels, kind, x, bias, grad):
    rows, width = x.shape
    code = TYPES[x.dtype]
    of_bias = code if bias is None else TYPES[bias.dtype]
    y, grad_x = torch.empty_like(x), torch.empty_like(x)
    parts = torch.full((kernels.count("merak_bias_parts", code, rows, width), width), torch.nan)
    grad_bias = None if bias is None else torch.full_like(bias, torch.nan)
    kernels("merak_bias_activation", code, KINDS[kind], x, bias, of_bias, y, rows, width)
    kernels(
        "merak_bias_activation_backward", code, KINDS[kind], grad, x, bias, of_bias, grad_x,
        None if bias is None else parts, grad_bias, rows, width,
    )  # fmt: skip
    return y, grad_x, grad_bias


def compare_biased(kernels, kind, x, bias, grad, run=run_biased):
    y, grad_x, grad_bias = run(kernels, kind, x, bias, grad)
    rows, width = x.shape
    added = torch.zeros(width, dtype=x.dtype) if bias is None else bias
    truth = with_gradient(lambda x, b: activation(x + b, kind), x, added, grad=grad)
    size = x.double().abs() + added.double().abs()
    near(y, truth[0], 2 * size, 16)
    near(grad_x, truth[1], (1 + 4 * size) * grad.double().abs(), 16)
    if bias is not None:
        near(grad_bias, truth[2], ((1 + 4 * size) * grad.double().abs()).sum(0), 16 + rows)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_gated(kernels, kind, rows, width, dtype):
    compare_gated(kernels, kind, *(numbers(dtype, rows, width, seed=i) for i in range(3)))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(3, 7), (5, 8), (4, 1000), (70, 40), (1, 33)])
def test_gate_and_up_in_one_tensor(kernels, rows, width, dtype):
    gate, up = numbers(dtype, rows, 2 * width).chunk(2, -1)
    compare_gated(kernels, "silu", gate, up, numbers(dtype, rows, width, seed=1))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_with_a_bias(kernels, kind, rows, width, dtype):
    inputs = (
        numbers(dtype, rows, width),
        numbers(dtype, width, seed=1),
        numbers(dtype, rows, width, seed=2),
    )
    compare_biased(kernels, kind, *inputs)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(3, 7), (9, 1000)])
def test_without_a_bias_or_with_one_in_float32(kernels, rows, width, dtype):
    x, grad = numbers(dtype, rows, width), numbers(dtype, rows, width, seed=2)
    compare_biased(kernels, "gelu_tanh", x, None, grad)
    compare_biased(kernels, "gelu", x, numbers(torch.float32, width, seed=1), grad)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_unaligned_addresses(kernels, dtype):
    gate, up, grad = (shifted(numbers(dtype, 6, 520, seed=i)) for i in range(3))
    compare_gated(kernels, "silu", gate, up, grad)
    compare_biased(kernels, "gelu_tanh", gate, shifted(numbers(dtype, 520, seed=3)), grad)


@pytest.mark.parametrize("kind", KINDS)
def test_far_from_zero_a_gate_is_open_or_shut(kernels, kind):
    """Powers of x overflow there; values and slopes must not. NaN stays NaN."""
    x = torch.tensor([[-3e38, -1e20, -100, -17, -0.0, 0.0, 17, 100, 1e20, 3e38, torch.nan]])
    one, y, slope = torch.ones_like(x), torch.empty_like(x), torch.empty_like(x)
    kernels("merak_bias_activation", 0, KINDS[kind], x, None, 0, y, *x.shape)
    kernels(
        "merak_bias_activation_backward",
        0,
        KINDS[kind],
        one,
        x,
        None,
        0,
        slope,
        None,
        None,
        *x.shape,
    )
    assert y[0, -1].isnan() and slope[0, -1].isnan()
    assert torch.allclose(y[0, :-1], x[0, :-1].clamp(min=0), atol=1e-6)
    expected = torch.tensor([0, 0, 0, 0, 0.5, 0.5, 1, 1, 1, 1])
    assert torch.allclose(slope[0, :-1], expected, atol=1e-6)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_half_precision_number(kernels, dtype):
    """All 16-bit patterns that are finite and moderate, or as many fp32 numbers between
    -20 and 20.
    """
    if dtype == torch.float32:
        x = torch.linspace(-20, 20, 1 << 16)
    else:
        x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
        x = x[x.isfinite() & (x.abs() <= 1e3)].clone()
    for kind in KINDS:
        compare_biased(kernels, kind, x[None], None, torch.ones_like(x)[None])


def test_nothing_to_do(kernels):
    bias = torch.ones(5)
    grad_bias = torch.full_like(bias, torch.nan)
    empty = torch.empty(0, 5)
    kernels(
        "merak_bias_activation_backward", 0, 1, empty, empty, bias, 0, empty, empty, grad_bias, 0, 5
    )
    assert grad_bias.count_nonzero() == 0
    kernels("merak_gated", 0, 0, empty, empty, empty, 0, 5, 5, 5)


def test_an_unknown_activation_is_refused(kernels):
    x = torch.ones(1, 4)
    with pytest.raises(LaunchError):
        kernels("merak_gated", 0, 3, x, x, x, 1, 4, 4, 4)
