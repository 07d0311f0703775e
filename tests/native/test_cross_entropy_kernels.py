"""The CUDA kernels of the cross entropy on a CPU, against float64: shards, padding, smoothing,
extremes.
"""

import pytest
import torch
import torch.nn.functional as F

from megatron_merak.ops.cross_entropy import loss_of_stats
from tests.native.shim import NEEDED, ROUNDING, TINY, TYPES, load

pytestmark = NEEDED
INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
THREADS = 256


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sum_error(classes):
    """Of a sum of that many fp32 terms, THREADS at a time and those in a tree, of exponentials of
    fp32 differences.
    """
    return (classes / THREADS + 40) * 2.0**-24


def problem(rows, columns, dtype=torch.float32, scale=3.0, classes=None):
    generator = torch.Generator().manual_seed(columns)
    logits = (scale * torch.randn(rows, columns, generator=generator)).to(dtype)
    return logits, torch.randint(classes or columns, (rows,), generator=generator)


def stats_of(kernels, logits, target, start=0, classes=None, smoothing=False):
    classes = logits.shape[1] if classes is None else classes
    out = torch.full((len(logits), 5 if smoothing else 3), NAN)
    places = len(logits), logits.stride(0), start, classes
    kernels(
        "merak_cross_entropy_stats", TYPES[logits.dtype], logits, target, out, *places, smoothing
    )
    return out


def grad_of(kernels, logits, target, stats, grad, start=0, classes=None, into=None):
    classes = logits.shape[1] if classes is None else classes
    into = torch.full(logits.shape, NAN, dtype=logits.dtype) if into is None else into
    places = *logits.shape, logits.stride(0), into.stride(0), start, classes
    inputs = logits, into, target, stats, grad, stats.shape[1]
    kernels("merak_cross_entropy_grad", TYPES[logits.dtype], *inputs, *places)
    return into


def exponentiated(kernels, logits, target, classes):
    loss, total = torch.full((2, len(logits)), NAN)
    places = *logits.shape, logits.stride(0), classes
    kernels("merak_exponentiate", TYPES[logits.dtype], logits, target, loss, total, *places)
    return loss, total


def exact_stats(logits, target, start, classes):
    """fp64 [t, 5] of the classes start .. start + classes."""
    wide = logits[:, :classes].double()
    exists = wide > -INF
    maximum = wide.amax(-1)
    base = maximum.masked_fill(maximum == -INF, 0.0)
    place = target - start
    inside = (place >= 0) & (place < classes)
    chosen = torch.full_like(maximum, -INF)
    chosen[inside] = wide[inside].gather(1, place[inside].unsqueeze(1)).squeeze(1)
    terms = (
        maximum,
        (wide - base.unsqueeze(1)).exp().sum(1),
        chosen,
        wide.where(exists, 0.0).sum(1),
        exists.sum(1),
    )
    return torch.stack([term.double() for term in terms], 1)


def check_stats(kernels, logits, target):
    classes = logits.shape[1]
    found, truth = (
        stats_of(kernels, logits, target, smoothing=True),
        exact_stats(logits, target, 0, classes),
    )
    assert torch.equal(found[:, 0].double(), truth[:, 0]) and torch.equal(
        found[:, 2].double(), truth[:, 2]
    )
    torch.testing.assert_close(found[:, 1].double(), truth[:, 1], rtol=sum_error(classes), atol=0)
    size = logits.double().where(logits > -INF, 0.0).abs().sum(1)
    assert bool(((found[:, 3].double() - truth[:, 3]).abs() <= sum_error(classes) * size).all())
    assert torch.equal(found[:, 4].double(), truth[:, 4])
    assert torch.equal(stats_of(kernels, logits, target), found[:, :3])


def shards_of(kernels, logits, target, shards, smoothing, real):
    """Loss and gradient through the kernels, each shard a contiguous part of the classes, of which
    `real` exist.
    """
    parts = [part.contiguous() for part in logits.chunk(shards, 1)]
    width = parts[0].shape[1]
    places = [(k * width, max(0, min(width, real - k * width))) for k in range(shards)]
    stats = [
        stats_of(kernels, p, target, *at, smoothing > 0)
        for p, at in zip(parts, places, strict=True)
    ]
    joined = torch.stack(stats).requires_grad_()
    loss = loss_of_stats(joined, smoothing)
    upstream = torch.linspace(0.5, 2, len(target))
    (grads,) = torch.autograd.grad(loss, joined, upstream)
    found = [
        grad_of(kernels, part, target, own, grad.contiguous(), *at)
        for part, own, grad, at in zip(parts, stats, grads, places, strict=True)
    ]
    return loss.detach(), torch.cat(found, 1), upstream


def exact_loss(logits, target, smoothing, real, upstream):
    wide = logits[:, :real].double().requires_grad_()
    log = F.log_softmax(wide, -1)
    chosen = log.gather(1, target.unsqueeze(1)).squeeze(1)
    others = (log.sum(1) - chosen) / max(1, real - 1)
    loss = -(1 - smoothing) * chosen - smoothing * others
    (grad,) = torch.autograd.grad(loss, wide, upstream.double())
    return loss.detach(), F.pad(grad, (0, logits.shape[1] - real))


def check_loss(kernels, dtype, columns, shards=1, smoothing=0.0, real=None, rows=4):
    real = columns if real is None else real
    logits, target = problem(rows, columns, dtype, classes=real)
    loss, grad, upstream = shards_of(kernels, logits, target, shards, smoothing, real)
    truth, exact = exact_loss(logits, target, smoothing, real, upstream)
    torch.testing.assert_close(
        loss.double(), truth, rtol=sum_error(columns), atol=sum_error(columns)
    )
    allowed = (
        ROUNDING[dtype] * exact.abs() + 2 * sum_error(columns) * upstream.unsqueeze(1) + TINY[dtype]
    )
    assert bool(((grad.double() - exact).abs() <= allowed).all())
    assert grad[:, real:].count_nonzero() == 0


@pytest.fixture(scope="module")
def kernels():
    return load("cross_entropy")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 3, 8, 100, 1001, 2048, 8200, 30001])
def test_statistics_of_any_width(kernels, dtype, columns):
    check_stats(kernels, *problem(3, columns, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [2, 7, 64, 999, 5000, 12289])
def test_loss_and_gradient(kernels, dtype, columns):
    check_loss(kernels, dtype, columns)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("columns", "shards", "real"), [(64, 2, 64), (4096, 4, 4001), (120, 8, 71), (3000, 1, 2049)]
)
def test_shards_padding_and_smoothing(kernels, columns, shards, real, smoothing):
    """Of 120 columns in 8 shards 71 are real: some shards have padding alone."""
    check_loss(kernels, torch.float32, columns, shards, smoothing, real)
    check_loss(kernels, torch.bfloat16, columns, shards, smoothing, real)


def test_a_target_just_outside_a_shard_is_not_in_it(kernels):
    logits, target = randn(4, 10), torch.tensor([19, 20, 23, 24])
    found = stats_of(kernels, logits, target, start=20, classes=4)
    assert found[:, 2].tolist() == [-INF, logits[1, 0].item(), logits[2, 3].item(), -INF]


def test_rows_that_are_apart(kernels):
    """Rows of a wider tensor, each at another alignment."""
    wide, target = problem(6, 1037, torch.bfloat16, classes=1030)
    view, before = wide[:, 3:1033], wide.clone()
    check_stats(kernels, view, target)
    dense = view.contiguous()
    stats, grad = stats_of(kernels, dense, target), randn(6, 3, seed=3)
    expected = grad_of(kernels, dense, target, stats, grad)
    assert torch.equal(grad_of(kernels, view, target, stats, grad), expected)
    grad_of(kernels, view, target, stats, grad, into=view)
    assert torch.equal(view, expected)
    assert torch.equal(wide[:, :3], before[:, :3]) and torch.equal(wide[:, 1033:], before[:, 1033:])


@pytest.mark.parametrize("columns", [40, 4096, 8197])
def test_classes_at_minus_infinity_do_not_exist(kernels, columns):
    logits, target = problem(4, columns)
    logits[0, : columns - 1], target[0] = -INF, columns - 1
    logits[1] = -INF
    logits[2, columns // 3 :] = -INF
    logits[3, ::2] = -INF
    check_stats(kernels, logits, target)
    stats, grad = (
        stats_of(kernels, logits, target, smoothing=True),
        torch.tensor([[0.0, 0.5, -1.0, 0.25, 0.0]] * 4),
    )
    found = grad_of(kernels, logits, target, stats, grad)
    assert bool(found.isfinite().all())
    hidden = logits == -INF
    hidden[torch.arange(4), target] = False
    assert found[hidden].count_nonzero() == 0


def test_extremes(kernels):
    logits, target = problem(4, 3000)
    logits[0] *= 1e37
    logits[1] = 3e38
    logits[2, 5] = NAN
    logits[3, 6] = INF
    found = stats_of(kernels, logits, target)
    assert found[0, 0] == logits[0].max() and found[0, 1] == 1
    assert found[1, 1] == 3000
    assert bool(found[2, 1].isnan()) and bool(found[3, 1].isnan())


def test_a_row_without_gradient_is_zero_whatever_its_logits_are(kernels):
    logits, target = problem(3, 1003, torch.bfloat16)
    logits[1] = NAN
    stats, grad = stats_of(kernels, logits, target), torch.full((3, 3), 0.5)
    grad[1] = 0
    found = grad_of(kernels, logits, target, stats, grad)
    assert found[1].count_nonzero() == 0 and bool(found.isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("columns", "classes"), [(1, 1), (9, 5), (1000, 1000), (4100, 4001), (16385, 16000)]
)
def test_exponentials_in_place(kernels, dtype, columns, classes):
    logits, target = problem(3, columns, dtype, classes=classes)
    target[-1] = classes - 1
    wide = logits[:, :classes].double()
    loss, total = exponentiated(kernels, logits, target, classes)
    e = (wide - wide.amax(1, keepdim=True)).exp()
    truth = F.cross_entropy(wide, target, reduction="none")
    torch.testing.assert_close(total.double(), e.sum(1), rtol=sum_error(classes), atol=0)
    torch.testing.assert_close(
        loss.double(), truth, rtol=sum_error(classes), atol=sum_error(classes)
    )
    e.scatter_add_(1, target.unsqueeze(1), -e.sum(1, keepdim=True))
    allowed = (
        ROUNDING[dtype] * e.abs() + TINY[dtype] + sum_error(classes) * e.abs().amax(1, keepdim=True)
    )
    assert bool(((logits[:, :classes].double() - e).abs() <= allowed).all())
    assert logits[:, classes:].count_nonzero() == 0


def test_nothing_to_do(kernels):
    empty, none = torch.empty(0, 5), torch.empty(0, dtype=torch.int64)
    assert stats_of(kernels, empty, none).shape == (0, 3)
    padding = stats_of(kernels, torch.empty(1, 5), torch.zeros(1, dtype=torch.int64), classes=0)
    assert padding.tolist() == [[-INF, 0.0, -INF]]
