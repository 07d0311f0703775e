"""Linear layers in fp8, beside products that one can compute by hand, and beside plain loops."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_merak import ops
from megatron_merak.ops import fp8
from megatron_merak.runtime.weights import Gradient, WeightGradients
from tests.fp8_reference import Product

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HOWS = [(form, recipe) for form in ("e4m3", "hybrid") for recipe in ("tensorwise", "blockwise")]


def drawn(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype)


def test_integers_by_hand():
    """Scales are 1: 448 is the largest of e4m3, 57344 of e5m2. 17 has more digits than fit."""
    x = torch.tensor([[448.0, 17.0], [1.0, -2.0]], requires_grad=True)
    weight = torch.tensor([[448.0, 0.0], [3.0, 17.0], [0.0, 2.0]], requires_grad=True)
    out = ops.fp8_linear(x, weight, None, "hybrid", "tensorwise")
    assert out.tolist() == [
        [448 * 448, 448 * 3 + 16 * 16, 32],
        [448, 3 - 2 * 16, -4],
    ]
    grad = torch.tensor([[57344.0, 9.0, 0.0], [2.0, 0.0, 2.0]])  # 9 of two bits is 8
    out.backward(grad)
    assert x.grad.tolist() == [[57344 * 448 + 8 * 3, 8 * 16], [2 * 448, 2 * 2]]
    assert weight.grad.tolist() == [
        [57344 * 448 + 2, 57344 * 16 - 4],
        [8 * 448, 8 * 16],
        [2, -4],
    ]


def test_scales():
    amax = torch.tensor([448.0, 896.0, 3.5, 0.0, 1e-45])
    assert fp8.scales(amax, E4M3).tolist()[:4] == [1.0, 0.5, 128.0, 1.0]
    assert fp8.scales(amax + 1, E4M3, True).tolist()[:4] == [0.5, 0.25, 64.0, 256.0]
    assert fp8.scales(amax, E4M3).isfinite().all()
    assert fp8.scales(amax, E4M3, True).isfinite().all()


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(recipe, value):
    """A loss scale that is too large has to show."""
    x = drawn(3, 32)
    x[1, 2] = value
    out = ops.fp8_linear(x, drawn(16, 32, seed=1), None, "hybrid", recipe)
    assert not out[1].isfinite().any()


@pytest.mark.parametrize(("form", "recipe"), HOWS)
@pytest.mark.parametrize("transposed", [False, True])
def test_loops_compute_the_same(form, recipe, transposed):
    x = drawn(2, 70, 144)
    weight = drawn(160, 144, seed=1)
    grad = drawn(2, 70, 160, seed=2)
    plain = [each.clone().requires_grad_() for each in (x, weight)]
    Product.apply(*plain, form, recipe).backward(grad)
    own = [x.requires_grad_(), (weight.t() if transposed else weight).contiguous()]
    own[1].requires_grad_()
    bias = torch.zeros(160, requires_grad=True)
    ops.fp8_linear(*own, bias, form, recipe, transposed=transposed).backward(grad)
    expected = plain[1].grad.t() if transposed else plain[1].grad
    torch.testing.assert_close(own[0].grad, plain[0].grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(own[1].grad, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(bias.grad, grad.sum((0, 1)))


@pytest.mark.parametrize(("form", "recipe"), HOWS)
def test_layers_of_one_input_are_layers(form, recipe):
    x = drawn(64, 48).requires_grad_()
    weights = [drawn(n, 48, seed=n).requires_grad_() for n in (32, 16)]
    biases = [drawn(32, seed=3).requires_grad_(), None]
    grads = [drawn(64, n, seed=n + 1) for n in (32, 16)]
    torch.autograd.backward(ops.fp8_linears(x, weights, biases, form, recipe), grads)
    found = [each.grad for each in (x, *weights, biases[0])]
    for each in (x, *weights, biases[0]):
        each.grad = None
    for weight, bias, grad in zip(weights, biases, grads, strict=True):
        ops.fp8_linear(x, weight, bias, form, recipe).backward(grad)
    assert all(
        torch.equal(one, each.grad)
        for one, each in zip(found, (x, *weights, biases[0]), strict=True)
    )


class Maxima:
    """The ranks of a layer, one after the other: the largest values are known from a first pass."""

    def __init__(self, known=()):
        self.known = list(known)
        self.seen = []

    def largest(self, values):
        self.seen.append(values)
        return self.known[len(self.seen) - 1] if self.known else values


@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
@pytest.mark.parametrize("rows", [False, True])
def test_shards_have_the_scales_of_the_whole(form, rows):
    """By columns: outputs and weights are sharded; by rows: inputs and weights."""
    x = drawn(24, 64, dtype=torch.float64).requires_grad_()
    weight = drawn(32, 64, seed=1, dtype=torch.float64).requires_grad_()
    grad = drawn(24, 32, seed=2, dtype=torch.float64)
    out = ops.fp8_linear(x, weight, None, form, "tensorwise")
    out.backward(grad)

    def shard(rank, ranks):
        own = x.detach().chunk(2, 1)[rank] if rows else x.detach()
        part = weight.detach().chunk(2, int(rows))[rank]
        own, part = own.clone().requires_grad_(), part.clone().requires_grad_()
        result = ops.fp8_linear(own, part, None, form, "tensorwise", True, ranks=ranks)
        result.backward(grad if rows else grad.chunk(2, 1)[rank])
        return result.detach(), own.grad, part.grad

    first = [Maxima(), Maxima()]
    for rank in range(2):
        shard(rank, first[rank])
    maxima = [torch.maximum(*pair) for pair in zip(first[0].seen, first[1].seen, strict=True)]
    parts = [shard(rank, Maxima(maxima)) for rank in range(2)]
    outs, inputs, weights = zip(*parts, strict=True)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(sum(outs) if rows else torch.cat(outs, 1), out, **close)
    torch.testing.assert_close(torch.cat(inputs, 1) if rows else sum(inputs), x.grad, **close)
    torch.testing.assert_close(torch.cat(weights, int(rows)), weight.grad, **close)
    alone = [shard(rank, Maxima())[0] for rank in range(2)]
    assert not torch.allclose(sum(alone) if rows else torch.cat(alone, 1), out, rtol=1e-3)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("deferred", [False, True])
def test_a_sink_gets_the_gradient(recipe, deferred):
    x = drawn(32, 48).requires_grad_()
    weight = torch.nn.Parameter(drawn(16, 48, seed=1))
    grad = drawn(32, 16, seed=2)
    ops.fp8_linear(x, weight, None, "hybrid", recipe).backward(grad)
    total = torch.zeros(16, 48)
    sink = WeightGradients({weight: Gradient(total)})
    sink.queue = [] if deferred else None
    sink.grads[weight].start()
    out = ops.fp8_linear(x, weight, None, "hybrid", recipe, sink=sink)
    (of_input,) = torch.autograd.grad(out, [x], grad)
    assert deferred == (not torch.equal(total, weight.grad))
    sink.drain(sink.queue or [])
    assert torch.equal(total, weight.grad) and torch.equal(of_input, x.grad)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_the_input_is_kept_in_a_byte_a_value_and_a_frozen_layer_keeps_none(recipe):
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    x = drawn(128, 256).bfloat16().requires_grad_()
    weight = drawn(32, 256, seed=1).bfloat16()
    for trained in (True, False):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            ops.fp8_linear(x, weight.requires_grad_(trained), None, "hybrid", recipe)
        sizes = [tensor.nbytes for tensor in kept.values() if tensor.dtype.itemsize == 1]
        assert sizes == ([x.numel()] if trained else [])
        assert not any(tensor.data_ptr() == x.data_ptr() for tensor in kept.values())


@pytest.mark.parametrize("m", [1, 24, 130])
@pytest.mark.parametrize(("n", "k"), [(16, 16), (160, 272), (24, 520)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_operands_fit_the_kernels_of_cuda(m, n, k, dtype):
    """By the checks of the operator's fake: no GPU computes here."""
    with FakeTensorMode():
        x = torch.empty(m, k, device="cuda", dtype=torch.bfloat16)
        weight = torch.empty(n, k, device="cuda", dtype=torch.bfloat16)
        amax = torch.empty((), device="cuda")
        one = fp8.scaled_product(fp8.rounded(x, amax, E5M2), fp8.rounded(weight, amax, E4M3), dtype)
        by_blocks = fp8.rounded_blocks(x, 1, E4M3)
        others = [fp8.rounded_blocks(weight, rows, E4M3) for rows in (128, 1)]
        found = [one, *(fp8.scaled_product(by_blocks, each, dtype) for each in others)]
        assert all(each.shape == (m, n) and each.dtype == dtype for each in found)


def test_scales_of_rows_lie_along_their_columns_and_rows_of_those_of_blocks_apart():
    rows = fp8._of_kernel(torch.ones(130, 3), 130)
    assert rows.shape == (130, 3) and rows.stride() == (1, 130)
    blocks = fp8._of_kernel(torch.ones(2, 3), 160)
    assert blocks.shape == (2, 3) and blocks.stride() == (4, 1)
