"""Softmax, cross entropy and flat buffers on a GPU: every operation against its PyTorch twin in float64."""

import pytest
import torch

from megatron_merak import ops

PROBLEM = ops.PROBLEMS["_ops_cuda"] or ("" if torch.cuda.is_available() else "there is no CUDA device")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM or "-")]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A rounding of the result, and for fp32 what approximate exponentials and sums of many terms leave.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


def randn(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def assert_close(found, truth):
    scale = truth.abs().max().clamp(min=1e-30)
    off = ((found.double() - truth.double()).abs().max() / scale).item()
    assert off <= TOLERANCE[found.dtype], f"{off:.2e} of the largest value"


def copies(arguments):
    """Clones that keep their strides."""
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]


def wide(arguments):
    return [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]


def check(name, *arguments, changed=()):
    """Results, and arguments that change in place, against the twin in fp64; and that the schema tells what changes."""
    operation = getattr(torch.ops.merak, name).default
    torch.library.opcheck(operation, tuple(copies(arguments)), test_utils=("test_schema", "test_faketensor"))
    given, truths = copies(arguments), wide(copies(arguments))
    found, truth = operation(*given), getattr(torch.ops.merak_torch, name)(*truths)
    pairs = zip(*(r if isinstance(r, tuple) else () if r is None else (r,) for r in (found, truth)), strict=True)
    for ours, theirs in pairs:
        assert_close(ours, theirs)
    for place in changed:
        assert_close(given[place], truths[place])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [1, 33, 256, 1000, 1024, 2048, 5001, 8192, 9000])
def test_masked_softmax(dtype, causal, keys):
    scores, mask = 3 * randn(2, 3, 17, keys, dtype=dtype), randn(2, 1, 17, keys, seed=1) > -1
    check("masked_softmax", scores, mask, 0.3, causal)
    check("masked_softmax", scores, None, 0.3, causal)
    probabilities = torch.ops.merak.masked_softmax(scores, mask, 0.3, causal)
    check("masked_softmax_backward", randn(2, 3, 17, keys, seed=2, dtype=dtype), probabilities, 0.3, causal)


def test_softmax_of_rows_that_see_nothing():
    scores, mask = randn(1, 2, 4, 64), torch.ones(1, 1, 4, 64, dtype=torch.bool, device="cuda")
    mask[0, 0, 1] = False
    out = torch.ops.merak.masked_softmax(scores, mask, 1.0, False)
    assert out[:, :, 1].count_nonzero() == 0 and bool(out.isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [False, True])
@pytest.mark.parametrize(
    ("columns", "classes", "start"), [(7, 7, 0), (1000, 990, 500), (32000, 32000, 0), (50257, 50257, 0)]
)
def test_cross_entropy(dtype, smoothing, columns, classes, start):
    logits, target = 3 * randn(33, columns, dtype=dtype), torch.arange(33, device="cuda") * 37 % columns + start // 2
    arguments = logits, target, start, classes, smoothing
    stats = torch.ops.merak.cross_entropy_stats(*arguments)
    truth = torch.ops.merak_torch.cross_entropy_stats(*wide(arguments))
    torch.testing.assert_close(stats.double(), truth, rtol=2e-5, atol=2e-2 if smoothing else 0)
    grad = randn(*stats.shape, seed=1) / stats[:, 1:2]
    check("cross_entropy_grad", logits, target, stats, grad, start, classes)
    check("cross_entropy_grad_", logits, target, stats, grad, start, classes, changed=(0,))
    check("cross_entropy_grad_", logits.t().contiguous().t(), target, stats, grad, start, classes, changed=(0,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "classes"), [(9, 9), (4099, 4000), (128256, 128000)])
def test_exponentiate(dtype, columns, classes):
    target = torch.arange(9, device="cuda") * 31 % classes
    check("exponentiate_", 3 * randn(9, columns, dtype=dtype), target, classes, changed=(0,))


@pytest.mark.parametrize("count", [1, 1023, 4096, 1_000_003])
@pytest.mark.parametrize(("grad", "copy"), [(torch.float32, torch.bfloat16), (torch.bfloat16, None)])
def test_adamw(count, grad, copy):
    state = [randn(count), randn(count, seed=1), randn(count, seed=2).square()]
    gradient = randn(count, seed=3, dtype=grad)
    copied = None if copy is None else torch.zeros(count, dtype=copy, device="cuda")
    truths = [t.double() for t in (*state, gradient)]
    how = (1e-3, 0.9, 0.999, 1e-8, 0.1, 5, 0.7)
    torch.ops.merak.adamw_(*state, gradient, copied, *how)
    torch.ops.merak_torch.adamw_(*truths, None, *how)
    for ours, truth in zip(state, truths[:3], strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-6, atol=1e-6)
    if copied is not None:
        assert torch.equal(copied, state[0].to(copy))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 4097, 10_000_019])
def test_sum_of_squares(dtype, count):
    x = randn(count, dtype=dtype)
    found = [torch.ops.merak.sum_of_squares(x) for _ in range(3)]
    assert found[0].dtype == torch.float64 and torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    torch.testing.assert_close(found[0], x.double().square().sum(), rtol=1e-13, atol=0)


@pytest.mark.parametrize("into", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_scaled_copies_and_sums(into, source):
    for count in (1, 8, 100_003):
        held, x = randn(count, dtype=into), randn(count, seed=1, dtype=source)
        check("accumulate_", held, x, 0.5, changed=(0,))
        check("cast_", held, x, 0.5, changed=(0,))
    check("accumulate_", randn(64, 32, dtype=into).t(), randn(32, 64, seed=1, dtype=source), 0.5, changed=(0,))


@pytest.mark.parametrize(("table", "count", "width"), [(1, 100, 64), (50, 1000, 100), (1000, 4096, 4096)])
def test_rows_add_up_in_order(table, count, width):
    """The same bits as one row after the other in fp32, however often."""
    index = torch.randint(table, (count,), generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    rows, held = randn(count, width, seed=1, dtype=torch.bfloat16), randn(table, width)
    found = held.clone()
    torch.ops.merak.add_rows_(found, index, rows)
    expected = held.cpu().index_add_(0, index.cpu(), rows.cpu().float())
    assert torch.equal(found.cpu(), expected)


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
    state = [randn(4096), torch.zeros(4096, device="cuda"), torch.zeros(4096, device="cuda"), randn(4096, seed=1)]
    expected, how = [t.clone() for t in state], (None, 1e-3, 0.9, 0.99, 1e-8, 0.0, 1, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.merak.adamw_(*state, *how)
    graph.replay()
    torch.ops.merak.adamw_(*expected, *how)
    assert all(torch.equal(a, b) for a, b in zip(state, expected, strict=True))
