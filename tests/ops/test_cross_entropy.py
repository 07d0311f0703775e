"""Output layer and loss in one: against F.linear and F.cross_entropy, with padding, extremes and a sink."""

import pytest
import torch
import torch.nn.functional as F

from megatron_merak.ops import linear_cross_entropy

TOKENS, WIDTH, CLASSES = 7, 6, 16


def problem(dtype=torch.float32, scale=1.0, classes=CLASSES):
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((TOKENS, WIDTH), (CLASSES, WIDTH)))
    target = torch.randint(classes, (TOKENS,), generator=generator)
    upstream = torch.linspace(-1, 2, TOKENS)
    upstream[2] = 0  # a masked token
    return (scale * x).to(dtype), weight.to(dtype), target, upstream


def expected(x, weight, target, upstream, classes):
    """Loss and gradients in float64, padding rows of the gradient zero."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    loss = F.cross_entropy(F.linear(x, weight)[:, :classes], target, reduction="none")
    return loss.detach(), *torch.autograd.grad(loss, (x, weight), upstream.double())


# bfloat16: the logits are rounded to 2**-9 of their size, of about 5 here, and so are their exponentials.
@pytest.mark.parametrize(
    ("dtype", "of_loss", "of_grads"),
    [(torch.float64, 1e-13, 1e-13), (torch.float32, 2e-6, 2e-6), (torch.bfloat16, 2e-2, 2e-2)],
)
@pytest.mark.parametrize("classes", [None, CLASSES, 11, 9])
def test_loss_and_gradients(dtype, of_loss, of_grads, classes):
    real = classes or CLASSES
    x, weight, target, upstream = problem(dtype, classes=real)
    truth = expected(x, weight, target, upstream, real)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, target, classes)
    assert loss.dtype == torch.promote_types(dtype, torch.float32) and loss.shape == (TOKENS,)
    torch.testing.assert_close(loss.double().detach(), truth[0], rtol=of_loss, atol=of_loss)
    grads = torch.autograd.grad(loss, (x, weight), upstream.to(loss.dtype))
    for grad, exact in zip(grads, truth[1:], strict=True):
        assert grad.dtype == dtype
        assert (grad.double() - exact).abs().max() <= of_grads * exact.abs().max()
    assert grads[1][real:].count_nonzero() == 0 and grads[0][2].count_nonzero() == 0


def test_large_logits_neither_overflow_nor_vanish():
    x, weight, target, upstream = problem(scale=300.0)
    truth = expected(x, weight, target, upstream, CLASSES)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, target)
    torch.testing.assert_close(loss.double().detach(), truth[0], rtol=1e-5, atol=1e-3)
    for grad, exact in zip(torch.autograd.grad(loss, (x, weight), upstream), truth[1:], strict=True):
        assert (grad.double() - exact).abs().max() <= 1e-3 * exact.abs().max()


def test_a_sink_takes_the_weight_gradient():
    class Sink:
        def matmul(self, weight, grad_output, input):
            self.weight, self.grad = weight, grad_output.t() @ input

    x, weight, target, upstream = problem()
    weight.requires_grad_()
    plain = torch.autograd.grad(linear_cross_entropy(x.requires_grad_(), weight, target, 11), (x, weight), upstream)
    sink = Sink()
    loss = linear_cross_entropy(x, weight, target, 11, sink)
    grad, none = torch.autograd.grad(loss, (x, weight), upstream, allow_unused=True)
    assert none is None and sink.weight is weight
    assert torch.equal(grad, plain[0]) and torch.equal(sink.grad, plain[1])


def test_rows_do_not_depend_on_their_neighbours():
    """The rows are worked through in parts that fit a cache: many rows of a wide vocabulary, alone or together."""
    generator = torch.Generator().manual_seed(4)
    x, weight = torch.randn(40, 8, generator=generator), torch.randn(30000, 8, generator=generator)
    target = torch.randint(30000, (40,), generator=generator)
    whole = linear_cross_entropy(x, weight, target)
    exact = F.cross_entropy(F.linear(x.double(), weight.double()), target, reduction="none")
    torch.testing.assert_close(whole.double(), exact, rtol=2e-6, atol=1e-6)


def test_two_backwards_give_the_same():
    x, weight, target, upstream = problem()
    loss = linear_cross_entropy(x.requires_grad_(), weight, target)
    first, second = (torch.autograd.grad(loss, x, upstream, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
