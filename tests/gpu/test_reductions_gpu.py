"""Softmax, cross entropy and flat buffers on a GPU: every operation against its PyTorch twin in
float64.
"""

import pytest
import torch

from megatron_merak import ops

from . import reductions
from .reductions import DTYPES, randn

PROBLEM = ops.PROBLEMS["_ops_cuda"] or (
    "" if torch.cuda.is_available() else "there is no CUDA device"
)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM or "-")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [1, 33, 256, 1000, 1024, 2048, 5001, 8192, 9000])
def test_masked_softmax(dtype, causal, keys):
    reductions.masked_softmax("cuda", dtype, causal, 17, keys)


def test_softmax_of_rows_that_see_nothing():
    reductions.rows_that_see_nothing("cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [False, True])
@pytest.mark.parametrize(
    ("columns", "classes", "start"),
    [(7, 7, 0), (1000, 990, 500), (32000, 32000, 0), (50257, 50257, 0)],
)
def test_cross_entropy(dtype, smoothing, columns, classes, start):
    reductions.cross_entropy("cuda", dtype, smoothing, 33, columns, classes, start)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "classes"), [(9, 9), (4099, 4000), (128256, 128000)])
def test_exponentiate(dtype, columns, classes):
    reductions.exponentiate("cuda", dtype, columns, classes)


@pytest.mark.parametrize("count", [1, 1023, 4096, 1_000_003])
@pytest.mark.parametrize(
    ("grad", "copy"), [(torch.float32, torch.bfloat16), (torch.bfloat16, None)]
)
def test_adamw(count, grad, copy):
    for moments in reductions.MOMENTS:
        reductions.adamw("cuda", count, grad, copy, moments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 4097, 10_000_019])
def test_sum_of_squares(dtype, count):
    reductions.sum_of_squares("cuda", dtype, count)


@pytest.mark.parametrize("into", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_scaled_copies_and_sums(into, source):
    reductions.scaled_copies_and_sums("cuda", into, source, (1, 8, 100_003))


@pytest.mark.parametrize(
    ("table", "count", "width"), [(1, 100, 64), (50, 1000, 100), (1000, 4096, 4096)]
)
def test_rows_add_up_in_order(table, count, width):
    reductions.rows_add_up_in_order("cuda", table, count, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "k", "width"), [(1, 1, 3), (1000, 8, 2048), (4096, 6, 1000)])
def test_rows_of_tokens_add_up_in_order(dtype, tokens, k, width):
    reductions.rows_of_tokens_add_up_in_order("cuda", dtype, tokens, k, width)


def test_kernels_run_on_the_current_stream():
    """Without a wait for other streams: the sum sees what its own stream wrote before."""
    side, x = torch.cuda.Stream(), torch.zeros(1 << 24, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x.fill_(1)
        total = torch.ops.merak.sum_of_squares(x)
    torch.cuda.synchronize()
    assert total.item() == 1 << 24


def test_a_step_can_be_captured_in_a_graph():
    state = [randn("cuda", 4096), *torch.zeros(2, 4096, device="cuda"), randn("cuda", 4096, seed=1)]
    expected, how = [t.clone() for t in state], (None, 1e-3, 0.9, 0.99, 1e-8, 0.0, 1, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.merak.adamw_(*state, *how)
    graph.replay()
    torch.ops.merak.adamw_(*expected, *how)
    assert all(torch.equal(a, b) for a, b in zip(state, expected, strict=True))
