"""Output layer and loss in one: against F.linear and F.cross_entropy, with padding, extremes and a
sink.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from megatron_merak.ops import (
    cross_entropy,
    cross_entropy_stats,
    linear_cross_entropy,
    loss_of_stats,
)

IMPLEMENTATIONS = {"ours": torch.ops.merak, "torch": torch.ops.merak_torch}
implementations = pytest.mark.parametrize("ops", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
TOKENS, WIDTH, CLASSES = 7, 6, 16


def problem(dtype=torch.float32, scale=1.0, classes=CLASSES):
    generator = torch.Generator().manual_seed(2)
    x, weight = (
        torch.randn(shape, generator=generator) for shape in ((TOKENS, WIDTH), (CLASSES, WIDTH))
    )
    target = torch.randint(classes, (TOKENS,), generator=generator)
    upstream = torch.linspace(-1, 2, TOKENS)
    upstream[2] = 0  # a masked token
    return (scale * x).to(dtype), weight.to(dtype), target, upstream


def expected(x, weight, target, upstream, classes):
    """Loss and gradients in float64, padding rows of the gradient zero."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    loss = F.cross_entropy(F.linear(x, weight)[:, :classes], target, reduction="none")
    return loss.detach(), *torch.autograd.grad(loss, (x, weight), upstream.double())


# bfloat16: the logits are rounded to 2**-9 of their size, of about 5 here, and so are their
# exponentials.
@pytest.mark.parametrize(
    ("dtype", "of_loss", "of_grads"),
    [(torch.float64, 1e-13, 1e-13), (torch.float32, 2e-6, 2e-6), (torch.bfloat16, 2e-2, 2e-2)],
)
@pytest.mark.parametrize("classes", [None, CLASSES, 11, 9])
@pytest.mark.parametrize("chunk", [0, 1, 3, 7, 100])
def test_loss_and_gradients(dtype, of_loss, of_grads, classes, chunk):
    real = classes or CLASSES
    x, weight, target, upstream = problem(dtype, classes=real)
    truth = expected(x, weight, target, upstream, real)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, target, classes, chunk=chunk)
    assert loss.dtype == torch.promote_types(dtype, torch.float32) and loss.shape == (TOKENS,)
    torch.testing.assert_close(loss.double().detach(), truth[0], rtol=of_loss, atol=of_loss)
    grads = torch.autograd.grad(loss, (x, weight), upstream.to(loss.dtype))
    for grad, exact in zip(grads, truth[1:], strict=True):
        assert grad.dtype == dtype
        assert (grad.double() - exact).abs().max() <= of_grads * exact.abs().max()
    assert grads[1][real:].count_nonzero() == 0 and grads[0][2].count_nonzero() == 0


@pytest.mark.parametrize("chunk", [0, 3])
def test_large_logits_neither_overflow_nor_vanish(chunk):
    x, weight, target, upstream = problem(scale=300.0)
    truth = expected(x, weight, target, upstream, CLASSES)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, target, chunk=chunk)
    torch.testing.assert_close(loss.double().detach(), truth[0], rtol=1e-5, atol=1e-3)
    for grad, exact in zip(
        torch.autograd.grad(loss, (x, weight), upstream), truth[1:], strict=True
    ):
        assert (grad.double() - exact).abs().max() <= 1e-3 * exact.abs().max()


def test_half_precision_where_a_rows_sum_is_no_half():
    """Nearly equal logits of more classes than the largest number of float16."""
    generator = torch.Generator().manual_seed(5)
    x, weight = (
        torch.randn(3, 4, generator=generator).half(),
        (torch.randn(70000, 4, generator=generator) / 100).half(),
    )
    target, upstream = torch.tensor([0, 69999, 7]), torch.tensor([1.0, 2.0, -1.0])
    truth = expected(x, weight, target, upstream, 70000)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, target)
    torch.testing.assert_close(loss.double().detach(), truth[0], rtol=1e-3, atol=1e-3)
    for grad, exact in zip(
        torch.autograd.grad(loss, (x, weight), upstream), truth[1:], strict=True
    ):
        assert (grad.double() - exact).abs().max() <= 5e-3 * exact.abs().max()


def test_a_sink_takes_the_weight_gradient():
    class Sink:
        def matmul(self, weight, grad_output, input):
            self.weight, self.grad = weight, grad_output.t() @ input

    x, weight, target, upstream = problem()
    weight.requires_grad_()
    plain = torch.autograd.grad(
        linear_cross_entropy(x.requires_grad_(), weight, target, 11), (x, weight), upstream
    )
    sink = Sink()
    loss = linear_cross_entropy(x, weight, target, 11, sink)
    grad, none = torch.autograd.grad(loss, (x, weight), upstream, allow_unused=True)
    assert none is None and sink.weight is weight
    assert torch.equal(grad, plain[0]) and torch.equal(sink.grad, plain[1])


def test_rows_do_not_depend_on_their_neighbours():
    """The rows are worked through in parts that fit a cache: many rows of a wide vocabulary, alone
    or together.
    """
    generator = torch.Generator().manual_seed(4)
    x, weight = torch.randn(40, 8, generator=generator), torch.randn(30000, 8, generator=generator)
    target = torch.randint(30000, (40,), generator=generator)
    whole = linear_cross_entropy(x, weight, target)
    exact = F.cross_entropy(F.linear(x.double(), weight.double()), target, reduction="none")
    torch.testing.assert_close(whole.double(), exact, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("chunk", [0, 3])
def test_two_backwards_give_the_same(chunk):
    x, weight, target, upstream = problem()
    loss = linear_cross_entropy(x.requires_grad_(), weight, target, chunk=chunk)
    first, second = (torch.autograd.grad(loss, x, upstream, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("chunk", [0, 3])
def test_the_gradient_of_a_frozen_weight_is_not_computed(chunk):
    x, weight, target, upstream = problem()
    trained = linear_cross_entropy(
        x.requires_grad_(), weight.clone().requires_grad_(), target, chunk=chunk
    )
    (expected,) = torch.autograd.grad(trained, x, upstream)
    loss = linear_cross_entropy(x, weight, target, chunk=chunk)
    with FlopCounterMode(display=False) as counter:
        (found,) = torch.autograd.grad(loss, x, upstream)
    assert torch.equal(found, expected)
    products = 2 if chunk else 1  # of chunks the logits, too
    assert counter.get_total_flops() == products * 2 * TOKENS * CLASSES * WIDTH


def test_chunks_keep_no_logits_and_hand_their_products_over_at_once():
    class Sink:
        def __init__(self):
            self.grad, self.rows = 0, []

        def matmul(self, weight, grad_output, input, now=False):
            assert now
            self.grad = self.grad + grad_output.t() @ input
            self.rows.append(len(input))

    x, weight, target, upstream = problem(classes=11)
    x, weight, saved, sink = x.requires_grad_(), weight.requires_grad_(), [], Sink()
    (expected,) = torch.autograd.grad(linear_cross_entropy(x, weight, target, 11), weight, upstream)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.shape) or t, lambda t: t
    ):
        loss = linear_cross_entropy(x, weight, target, 11, sink, 3)
    assert (TOKENS, CLASSES) not in saved and (3, CLASSES) not in saved
    _, none = torch.autograd.grad(loss, (x, weight), upstream, allow_unused=True)
    assert none is None and sink.rows == [3, 3, 1]
    torch.testing.assert_close(sink.grad, expected, rtol=1e-5, atol=1e-6)


# ---- rows of logits ------------------------------------------------------------------------------
def rows_of_logits(dtype=torch.float32, rows=9, classes=5000, spread=3.0):
    generator = torch.Generator().manual_seed(rows + classes)
    logits = (spread * torch.randn(rows, classes, generator=generator)).to(dtype)
    return logits, torch.randint(classes, (rows,), generator=generator), torch.linspace(-1, 2, rows)


def definition(logits, target, smoothing):
    """Of logits in float64: (1 - s) nll + s / (v - 1) times the sum of the nll of the other classes
    that exist.
    """
    exists = logits > -torch.inf
    nll = -logits.log_softmax(-1)
    chosen = nll.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    others = nll.masked_fill(~exists, 0.0).sum(-1) - chosen
    return (
        chosen
        if smoothing == 0
        else (1 - smoothing) * chosen + smoothing * others / (exists.sum(-1) - 1)
    )


# What a gradient is rounded to. Those of float32 are the exponential's, and of a sum of 5000 of
# them.
ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("classes", [1, 2, 17, 5000])
def test_cross_entropy_is_its_definition(dtype, smoothing, classes):
    if classes == 1 and smoothing:
        pytest.skip("of one class there are no others")
    for spread in (3.0, 300.0 if dtype != torch.float16 else 30.0):
        logits, target, upstream = rows_of_logits(dtype, classes=classes, spread=spread)
        exact, x = logits.double().requires_grad_(), logits.clone().requires_grad_()
        truth = definition(exact, target, smoothing)
        loss = cross_entropy(x, target, label_smoothing=smoothing)
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        wide = ROUNDING[torch.float64 if dtype == torch.float64 else torch.float32]
        torch.testing.assert_close(loss.double(), truth, rtol=2 * wide, atol=2 * wide)
        (slope,) = torch.autograd.grad(truth, exact, upstream.double())
        (grad,) = torch.autograd.grad(loss, x, upstream.to(loss.dtype))
        assert grad.dtype == dtype and torch.equal(x, logits)
        bound = ROUNDING[dtype] * slope.abs() + 4 * wide * upstream.abs().max()
        assert ((grad.double() - slope).abs() <= bound).all()


def test_without_smoothing_it_is_pytorchs():
    logits, target, _ = rows_of_logits()
    target[3] = -100
    ours, theirs = cross_entropy(logits, target), F.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert ours[3] == 0
    other = target.clone()
    other[3] = 7
    assert torch.equal(cross_entropy(logits, other, ignore_index=7)[3], torch.tensor(0.0))


def test_leading_dimensions_and_none():
    logits, target, _ = rows_of_logits(rows=6, classes=10)
    flat = cross_entropy(logits, target)
    assert torch.equal(cross_entropy(logits.view(2, 3, 10), target.view(2, 3)), flat.view(2, 3))
    assert torch.equal(cross_entropy(logits[2], target[2]), flat[2])
    assert cross_entropy(logits[:0], target[:0]).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(dtype):
    """Bitwise."""
    logits, target, upstream = rows_of_logits(dtype, rows=40)
    x = logits.requires_grad_()
    whole = cross_entropy(x, target)
    (grad,) = torch.autograd.grad(whole, x, upstream)
    for row in (0, 7, 39):
        one = logits.detach()[row : row + 1].clone().requires_grad_()
        loss = cross_entropy(one, target[row : row + 1])
        assert torch.equal(loss, whole[row : row + 1])
        assert torch.equal(
            torch.autograd.grad(loss, one, upstream[row : row + 1])[0], grad[row : row + 1]
        )


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_classes_that_do_not_exist(smoothing):
    """-inf anywhere; a row of which all but the target is masked; a row without any class gives
    NaN, as in PyTorch.
    """
    logits, target, upstream = rows_of_logits(rows=4, classes=40)
    logits[0, 5:20] = logits[1, 30:] = -torch.inf
    logits[2] = -torch.inf
    logits[2, :2] = torch.tensor([1.0, -2.0])
    target[:3] = torch.tensor([3, 0, 1])
    exact, x = logits.double().requires_grad_(), logits.clone().requires_grad_()
    loss, truth = (
        cross_entropy(x, target, label_smoothing=smoothing),
        definition(exact, target, smoothing),
    )
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=1e-6)
    (slope,) = torch.autograd.grad(truth, exact, upstream.double())
    (grad,) = torch.autograd.grad(loss, x, upstream)
    torch.testing.assert_close(grad.double(), slope.nan_to_num(0.0), rtol=1e-5, atol=1e-6)
    assert (
        grad[0, 5:20].count_nonzero()
        == grad[1, 30:].count_nonzero()
        == grad[2, 2:].count_nonzero()
        == 0
    )
    assert cross_entropy(torch.full((1, 4), -torch.inf), torch.tensor([2])).isnan().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows_in_its_row_alone(bad):
    logits, target, _ = rows_of_logits(rows=3, classes=100)
    logits[1, 70] = bad
    target[1] = 3
    x = logits.requires_grad_()
    loss = cross_entropy(x, target)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    assert loss[1].isnan() and loss[[0, 2]].isfinite().all()
    assert grad[1].isnan().any() and grad[[0, 2]].isfinite().all()
    theirs = F.cross_entropy(logits.detach(), target, reduction="none")
    assert theirs[1].isnan()


def test_an_ignored_row_has_no_gradient_whatever_it_holds():
    logits, target, _ = rows_of_logits(rows=3, classes=100)
    logits[1] = torch.nan
    target[1] = -100
    x = logits.requires_grad_()
    (grad,) = torch.autograd.grad(cross_entropy(x, target).sum(), x)
    assert grad[1].count_nonzero() == 0 and grad.isfinite().all()


# ---- shards --------------------------------------------------------------------------------------
@implementations
@pytest.mark.parametrize("smoothing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_of_shards_by_hand(ops, dtype, smoothing):
    logits = torch.tensor(
        [[1.0, 3.0, -torch.inf, 7.0], [-torch.inf] * 3 + [0.0], [2.0, 2.0, 2.0, 99.0]], dtype=dtype
    )
    target = torch.tensor([6, 5, 1])
    found = ops.cross_entropy_stats(logits, target, 5, 3, smoothing)
    expected = torch.tensor(
        [[3, 1 + torch.tensor(-2.0).exp(), 3], [-torch.inf, 0, -torch.inf], [2, 3, -torch.inf]]
    )
    if smoothing:
        expected = torch.cat((expected, torch.tensor([[4.0, 2], [0, 0], [6, 3]])), 1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@implementations
def test_a_shard_of_nothing_but_padding(ops):
    logits, target = torch.randn(3, 4), torch.tensor([0, 1, 2])
    stats = ops.cross_entropy_stats(logits, target, 8, 0, True)
    assert torch.equal(stats, torch.tensor([[-torch.inf, 0, -torch.inf, 0, 0]] * 3))
    grad = ops.cross_entropy_grad(logits, target, stats, torch.ones(3, 5), 8, 0)
    assert torch.equal(grad, torch.zeros(3, 4))


@implementations
@pytest.mark.parametrize("terms", [3, 5])
def test_the_gradient_of_statistics(ops, terms):
    """Of any combination of them that takes the maximum for a constant; in place, too; padding gets
    zeros.
    """
    logits, target, _ = rows_of_logits(rows=5, classes=30)
    logits[2, 4] = -torch.inf
    stats = ops.cross_entropy_stats(logits, target, 10, 17, terms == 5)
    upstream = torch.randn(5, terms, generator=torch.Generator().manual_seed(1))
    known = logits[:, :17].double()
    expected = (known - stats[:, :1].double()).exp() * upstream[:, 1:2]
    if terms == 5:
        expected += (known > -torch.inf) * upstream[:, 3:4]
    for row, place in enumerate((target - 10).tolist()):
        if 0 <= place < 17:
            expected[row, place] += upstream[row, 2]
    found = ops.cross_entropy_grad(logits, target, stats, upstream, 10, 17)
    torch.testing.assert_close(found[:, :17].double(), expected, rtol=2e-6, atol=1e-6)
    assert found[:, 17:].count_nonzero() == 0
    taken, strided = logits.clone(), logits.t().contiguous().t()
    for into in (taken, strided):
        ops.cross_entropy_grad_(into, target, stats, upstream, 10, 17)
        assert torch.equal(into, found)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_shards_together_are_the_whole(smoothing, everywhere):
    logits, target, upstream = rows_of_logits(rows=12, classes=40, spread=30.0)
    logits[:, 37:] = -torch.inf
    target %= 37
    exact = logits.double().requires_grad_()
    truth = definition(exact, target, smoothing * 36 / 37 if everywhere else smoothing)
    (slope,) = torch.autograd.grad(truth, exact, upstream.double())
    parts = [part.contiguous().requires_grad_() for part in logits.split(10, 1)]
    stats = [
        cross_entropy_stats(part, target, 10 * rank, 7 if rank == 3 else None, smoothing > 0)
        for rank, part in enumerate(parts)
    ]
    loss = loss_of_stats(torch.stack(stats), smoothing, everywhere)
    torch.testing.assert_close(loss.double(), truth.detach(), rtol=2e-6, atol=2e-6)
    grad = torch.cat(torch.autograd.grad(loss, parts, upstream), 1)
    torch.testing.assert_close(grad.double(), slope.nan_to_num(0.0), rtol=2e-6, atol=2e-6)


def test_owned_logits_become_their_gradient_once():
    logits, target, upstream = rows_of_logits(rows=6, classes=40)
    x = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(cross_entropy(x, target), x, upstream)
    given = (2 * x) / 2
    loss = loss_of_stats(cross_entropy_stats(given, target, owned=True).unsqueeze(0))
    (grad,) = torch.autograd.grad(loss, x, upstream, retain_graph=True)
    assert torch.equal(grad, expected) and torch.equal(given.detach(), expected)
    with pytest.raises(RuntimeError, match="one backward only"):
        torch.autograd.grad(loss, x, upstream)


# ---- exponentials in place -----------------------------------------------------------------------
@implementations
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exponentials_less_their_sum_at_the_target(ops, dtype):
    logits, target, _ = rows_of_logits(dtype, rows=7, classes=300)
    logits[2, 9] = -torch.inf
    target %= 290
    known = logits[:, :290].double()
    expected = (known - known.amax(-1, keepdim=True)).exp()
    total = expected.sum(-1)
    expected.scatter_add_(-1, target.unsqueeze(-1), -total.unsqueeze(-1))
    loss, found = ops.exponentiate_(logits, target, 290)
    torch.testing.assert_close(found.double(), total, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        loss.double(), F.cross_entropy(known, target, reduction="none"), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(logits[:, :290].double(), expected, rtol=ROUNDING[dtype], atol=1e-7)
    assert logits[:, 290:].count_nonzero() == 0


@implementations
@pytest.mark.parametrize("place", [-1, 8])
def test_a_target_out_of_range_is_refused(ops, place):
    with pytest.raises((RuntimeError, IndexError)):
        ops.exponentiate_(torch.zeros(2, 8), torch.tensor([0, place]), 8)


@implementations
def test_opcheck(ops):
    logits, target, _ = rows_of_logits(rows=3, classes=8)
    for smoothing in (False, True):
        torch.library.opcheck(
            ops.cross_entropy_stats, (logits.clone().requires_grad_(), target, 2, 5, smoothing)
        )
        stats = ops.cross_entropy_stats(logits, target, 2, 5, smoothing)
        torch.library.opcheck(
            ops.cross_entropy_grad, (logits, target, stats, torch.ones_like(stats), 2, 5)
        )
        torch.library.opcheck(
            ops.cross_entropy_grad_, (logits.clone(), target, stats, torch.ones_like(stats), 2, 5)
        )
    torch.library.opcheck(ops.exponentiate_, (logits.clone(), target, 8))
