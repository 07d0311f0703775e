"""Norms, activations, residual and rotary on a GPU, against float64: the comparisons of
tests/native, larger.
"""

import math

import pytest
import torch

import megatron_merak.ops  # noqa: F401  loads the operations
from tests.gpu import operators as run
from tests.native import test_activation_kernels as activation
from tests.native import test_norm_kernels as norm
from tests.native import test_residual_kernels as residual
from tests.native import test_rotary_kernels as rotary
from tests.native.shim import TYPES, shifted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
GPU = "cuda"
SIZES = [
    (1, 1),
    (3, 7),
    (5, 8),
    (257, 1000),
    (64, 4096),
    (33, 8192),
    (9, 8200),
    (5, 20001),
    (4096, 128),
]


@pytest.fixture(autouse=True)
def compiled():
    if not torch._C._dispatch_has_kernel_for_dispatch_key("merak::rms_norm", "CUDA"):
        pytest.skip("megatron_merak/_ops_cuda is not built")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), SIZES)
@pytest.mark.parametrize("kind", ["rms", "layer", "add_rms", "add_layer"])
def test_norm(kind, rows, width, dtype):
    of = norm.case(dtype, rows, width, centred="layer" in kind, added="add" in kind)
    norm.compare(GPU, of, run.norm_forward, run.norm_backward)
    norm.compare(GPU, norm.unaligned(of), run.norm_forward, run.norm_backward)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_norm_with_wide_weights_and_twice_the_same(dtype):
    of = norm.case(dtype, 4096, 1000, centred=True, wide=True)
    norm.compare(GPU, of, run.norm_forward, run.norm_backward)
    y, total, mean, rstd = run.norm_forward(GPU, of)
    first, second = (run.norm_backward(GPU, of, total, mean, rstd) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", activation.KINDS)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_activation(kind, rows, width, dtype):
    x, up, grad = (activation.numbers(dtype, rows, width, seed=i) for i in range(3))
    bias = activation.numbers(dtype, width, seed=3)
    activation.compare_gated(GPU, kind, x, up, grad, run.gated)
    activation.compare_gated(GPU, kind, x, up, grad, run.gated_merged)
    activation.compare_gated(
        GPU, kind, *activation.numbers(dtype, rows, 2 * width).chunk(2, -1), grad, run.gated
    )
    activation.compare_gated(GPU, kind, shifted(x), up, shifted(grad), run.gated)
    for of_bias in (bias, bias.float(), None):
        activation.compare_biased(GPU, kind, x, of_bias, grad, run.biased)
    activation.compare_biased(GPU, kind, shifted(x), bias, grad, run.biased)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "width"), [(1, 1), (3, 7), (5, 8), (40, 1000), (700, 40), (2, 20001)]
)
def test_bias_dropout_add(rows, width, dtype):
    """The mask to the bit, so also its statistics, which tests/native takes from the same
    definition.
    """
    x, other = (residual.numbers(dtype, rows, width, seed=i) for i in range(2))
    for bias in (None, other[0].clone(), other[0].float()):
        for p, seed in ((0.0, None), (0.3, 5), (0.1, -1)):
            residual.compare(GPU, x, bias, other, p, seed, run.bias_dropout_add)
            residual.compare(GPU, shifted(x), bias, None, p, seed, run.bias_dropout_add)


def test_the_share_that_is_kept():
    count = 1 << 26
    ones = torch.ones(1, count, device=GPU)
    for p in (0.01, 0.1, 0.5):
        seed = torch.tensor([7], device=GPU)
        kept = (
            torch.ops.merak.bias_dropout_add(ones, None, None, p, seed).count_nonzero().item()
            / count
        )
        assert abs(kept - (1 - p)) < 4 * math.sqrt(p * (1 - p) / count)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("features", "rotated"), [(64, 64), (128, 32), (80, 20), (7, 6), (2, 2), (256, 256)]
)
def test_rotary(features, rotated, interleaved, dtype):
    fused = rotary.numbers(dtype, 129, 2, 8, features).transpose(0, 1)
    for of_angles in (dtype, torch.float32):
        angles = rotary.angles(of_angles, 129, rotated // 2)
        for x in (fused.contiguous(), fused[:, :, 1:4], shifted(fused)):
            for inverse in (False, True):
                rotary.compare(GPU, x, *angles, interleaved, inverse, run.rotary)
                rotary.compare(GPU, x, *angles, interleaved, inverse, run.rotary_in_place)


def test_the_current_stream_and_a_graph():
    """Launches go to the stream that is current, and wait for nothing, so they can be recorded."""
    x, weight = torch.randn(64, 1000, device=GPU), torch.randn(1000, device=GPU)
    expected = torch.ops.merak.rms_norm(x, weight, norm.EPS)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, rstd = torch.ops.merak.rms_norm(x, weight, norm.EPS)
        torch.ops.merak.rms_norm_backward(x, x, weight, rstd)
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)
