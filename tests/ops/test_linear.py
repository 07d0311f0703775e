"""Linear and embedding: with a sink the same numbers arrive, by another way."""

import pytest
import torch
import torch.nn.functional as F

from megatron_merak.ops import (
    bias_dropout_add,
    bias_gelu,
    embedding,
    embedding_part,
    gated_halves,
    gated_linear,
    gelu_linear,
    joined_linear,
    linear,
    linears,
)


class Sink:
    """Adds what it is given at once."""

    def __init__(self):
        self.grads = {}

    def _add(self, weight, grad):
        self.grads[weight] = self.grads.get(weight, 0) + grad

    def matmul(self, weight, grad_output, input):
        assert grad_output.dim() == input.dim() == 2
        self._add(weight, grad_output.t() @ input)

    def rows(self, weight, index, grad_output):
        assert index.dim() == 1
        self._add(weight, torch.zeros_like(weight).index_add_(0, index, grad_output))

    def getter(self, input):
        return None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6)])
def test_linear_through_a_sink(shape, bias):
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    extra = torch.randn(4, requires_grad=True) if bias else None
    inputs, upstream = [t for t in (x, weight, extra) if t is not None], torch.randn(*shape[:-1], 4)
    expected = torch.autograd.grad(F.linear(x, weight, extra), inputs, upstream)
    sink = Sink()
    out = linear(x, weight, extra, sink)
    assert torch.equal(out, F.linear(x, weight, extra))
    found = torch.autograd.grad(out, inputs, upstream, allow_unused=True)
    assert found[1] is None
    for ours, other in zip((found[0], sink.grads[weight], *found[2:]), expected, strict=True):
        torch.testing.assert_close(ours, other)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6)])
def test_a_transposed_weight(shape, bias):
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    extra = torch.randn(4, requires_grad=True) if bias else None
    inputs, upstream = [t for t in (x, weight, extra) if t is not None], torch.randn(*shape[:-1], 4)
    flat = x.reshape(-1, 6)
    plain = (flat @ weight if extra is None else torch.addmm(extra, flat, weight)).view(
        *shape[:-1], 4
    )
    expected = torch.autograd.grad(plain, inputs, upstream)
    assert torch.equal(linear(x, weight, extra, transposed=True), plain)
    sink = Sink()
    out = linear(x, weight, extra, sink, transposed=True)
    assert torch.equal(out, plain)
    found = torch.autograd.grad(out, inputs, upstream, allow_unused=True)
    assert found[1] is None
    for ours, other in zip((found[0], sink.grads[weight], *found[2:]), expected, strict=True):
        torch.testing.assert_close(ours, other)


def test_linear_of_an_input_without_gradient():
    sink, weight = Sink(), torch.randn(4, 6, requires_grad=True)
    linear(torch.randn(5, 6), weight, None, sink).sum().backward()
    assert weight.grad is None and sink.grads[weight].shape == (4, 6)


def test_embedding_through_a_sink_adds_repeated_rows():
    weight = torch.randn(5, 3, requires_grad=True)
    index = torch.tensor([[4, 0, 4], [4, 1, 0]])
    upstream = torch.arange(18.0).view(2, 3, 3)
    (expected,) = torch.autograd.grad(F.embedding(index, weight), weight, upstream)
    sink = Sink()
    out = embedding(index, weight, sink)
    assert torch.equal(out, F.embedding(index, weight)) and out.requires_grad
    assert torch.autograd.grad(out, weight, upstream, allow_unused=True) == (None,)
    assert torch.equal(sink.grads[weight], expected)


@pytest.mark.parametrize("sink", [None, Sink()])
def test_the_padding_row_takes_no_gradient(sink):
    weight, index = torch.randn(5, 3, requires_grad=True), torch.tensor([[4, 0, 4], [4, 1, 0]])
    out = embedding(index, weight, sink, padding=4)
    assert torch.equal(out, F.embedding(index, weight))
    (grad,) = torch.autograd.grad(out.sum(), weight, allow_unused=True)
    grad = sink.grads[weight] if grad is None else grad
    assert grad.sum(1).tolist() == [6.0, 3.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("padding", [None, 1, 4])
def test_parts_of_a_table_add_up_to_it(padding, with_sink):
    whole = torch.randn(6, 3, requires_grad=True)
    index, upstream = torch.tensor([[4, 0, 4], [5, 1, 2]]), torch.randn(2, 3, 3)
    plain = F.embedding(index, whole, padding)
    (expected,) = torch.autograd.grad(plain, whole, upstream)
    parts = [part.detach().clone().requires_grad_() for part in whole.split(2)]
    outs, grads = [], []
    for start, part in zip((0, 2, 4), parts, strict=True):
        sink = Sink() if with_sink else None
        outs.append(embedding_part(index, part, start, sink, padding))
        (grad,) = torch.autograd.grad(outs[-1], part, upstream, allow_unused=True)
        grads.append(grad if sink is None else sink.grads[part])
    assert torch.equal(sum(outs), plain)
    torch.testing.assert_close(torch.cat(grads), expected)


def test_without_a_sink_they_are_pytorchs():
    x, weight, index = (
        torch.randn(2, 6),
        torch.randn(4, 6, requires_grad=True),
        torch.tensor([3, 3]),
    )
    (linear(x, weight).sum() + embedding(index, weight).sum()).backward()
    expected = x.sum(0).expand(4, 6) + torch.tensor([0.0, 0, 0, 2]).unsqueeze(1)
    torch.testing.assert_close(weight.grad, expected)


def test_bias_dropout_add():
    x, residual, bias = (
        torch.full((1000, 4), 2.0),
        torch.full((1000, 4), 10.0),
        torch.tensor([0.0, 1, 2, 3]),
    )
    assert torch.equal(bias_dropout_add(x, bias, residual, 0.5, False), residual + x + bias)
    assert torch.equal(bias_dropout_add(x, None, residual, 0.0, True), residual + x)
    torch.manual_seed(0)
    out = bias_dropout_add(x, bias, residual, 0.5, True) - residual
    kept = out != 0
    assert torch.equal(out[kept], (2 * (x + bias))[kept]) and 0.45 < kept.float().mean() < 0.55


def whole_numbers(*shape):
    return torch.randint(-8, 9, shape).to(torch.float64)


@pytest.mark.parametrize("sunk", [True, False])
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(
    ("together", "biased", "views"),
    [
        (True, True, False),
        (True, False, False),
        (False, True, False),
        (False, True, True),
        (False, False, True),
    ],
)
@pytest.mark.parametrize("shape", [(6,), (2, 3, 6)])
def test_layers_of_one_input_are_those_layers(shape, together, biased, views, beside, sunk):
    """Whole numbers, so that the order of sums cannot matter. beside: the weights are one piece of
    memory.
    """
    flat, x = whole_numbers(12 * 6), whole_numbers(*shape).requires_grad_()
    pieces = (
        flat.split([4 * 6, 5 * 6, 3 * 6])
        if beside
        else [whole_numbers(rows * 6) for rows in (4, 5, 3)]
    )
    weights = [torch.nn.Parameter(piece.view(-1, 6)) for piece in pieces]
    vectors = whole_numbers(12).split([4, 5, 3]) if beside else [*map(whole_numbers, (4, 5, 3))]
    biases = [vector.requires_grad_() if biased else None for vector in vectors]
    if biased and not together:
        biases[1:] = [None, whole_numbers(3)]
    outs = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    upstream = [whole_numbers(*out.shape) for out in outs]
    inputs = [x, *weights, *(bias for bias in biases if bias is not None and bias.requires_grad)]
    used = slice(None) if together else slice(0, 2)  # a layer whose output goes nowhere
    expected = torch.autograd.grad(outs[used], inputs, upstream[used], allow_unused=True)
    sink = Sink() if sunk else None
    if together:
        found = joined_linear(x, weights, biases if biased else (), sink)
        assert torch.equal(found, torch.cat(outs, -1))
        grads = torch.autograd.grad(found, inputs, torch.cat(upstream, -1), allow_unused=True)
    else:
        found = linears(x, weights, biases, views, sink)
        one = len({out.untyped_storage().data_ptr() for out in found}) == 1
        assert one == (views and beside and biases[0] is None)
        assert all(map(torch.equal, found, outs))
        grads = torch.autograd.grad(found[used], inputs, upstream[used], allow_unused=True)
    if sunk:
        assert not any(grad is not None for grad in grads[1:4])
        grads = (grads[0], *(sink.grads.get(weight) for weight in weights), *grads[4:])
    for grad, wanted in zip(grads, expected, strict=True):
        assert grad is wanted is None or torch.equal(grad, wanted)


class Unpassed(torch.autograd.Function):
    """Returns no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_layers_side_by_side_of_which_nobody_wants_a_gradient_have_none():
    x = torch.randn(5, 6, requires_grad=True)
    weights = [torch.randn(size, 6, requires_grad=True) for size in (2, 3)]
    loss = Unpassed.apply(joined_linear(x, weights)).sum() + x.sum()
    grad, *others = torch.autograd.grad(loss, [x, *weights], allow_unused=True)
    assert torch.equal(grad, torch.ones(5, 6)) and others == [None, None]


@pytest.mark.parametrize("sunk", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("kind", ["gated", "gelu", "gelu of a sum"])
def test_a_layer_that_computes_its_input_again(kind, transposed, sunk):
    """To the bit; it keeps what the activation is made of, and nothing else but its weight."""
    x, weight, bias = (
        torch.randn(2, 3, 8),
        torch.randn(5, 4 if kind == "gated" else 8),
        torch.randn(5),
    )
    weight = torch.nn.Parameter(weight.t().contiguous() if transposed else weight)
    x, bias, inner = x.requires_grad_(), bias.requires_grad_(), torch.randn(8).requires_grad_()
    inputs, upstream = [x, weight, bias, *[inner] * (kind == "gelu of a sum")], torch.randn(2, 3, 5)
    plain, again = Sink() if sunk else None, Sink() if sunk else None
    if kind == "gated":
        wanted = linear(gated_halves(x, "silu"), weight, bias, plain, transposed)
        found = gated_linear(x, weight, bias, "silu", transposed, again)
    else:
        added = inner if kind == "gelu of a sum" else None
        wanted = linear(bias_gelu(x, added, "gelu_tanh"), weight, bias, plain, transposed)
        found = gelu_linear(x, weight, bias, added, "gelu_tanh", transposed, again)
    assert torch.equal(found, wanted)
    kept = {tensor.data_ptr() for tensor in found.grad_fn.saved_tensors}
    assert kept <= {tensor.data_ptr() for tensor in inputs}
    expected = torch.autograd.grad(wanted, inputs, upstream, allow_unused=True)
    grads = torch.autograd.grad(found, inputs, upstream, allow_unused=True)
    if sunk:
        assert grads[1] is expected[1] is None
        grads, expected = (*grads, again.grads[weight]), (*expected, plain.grads[weight])
    for grad, one in zip(grads, expected, strict=True):
        assert grad is one is None or torch.equal(grad, one)
