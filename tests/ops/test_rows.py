"""Routed rows: what indices and their gradients are, to the bit where nothing is added up."""

import pytest
import torch
import torch.nn.functional as F

from megatron_merak import ops

TOKENS = 7
K = 3
EXPERTS = 4
TO_FP32 = (torch.bfloat16, torch.float32)


def routing(tokens=TOKENS):
    """(order, inverse) of rows by expert."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(EXPERTS, (tokens * K,), generator=generator)
    _, order = ids.sort()
    return order, ops.inverse_order(order)


def whole(*shape, dtype=torch.float64):
    """Whole numbers, whose sums no order changes."""
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randint(-9, 10, shape, generator=generator).to(dtype)


def gradients(function, *inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    result = function(*leaves)
    upstream = whole(*result.shape, dtype=result.dtype)
    return result, *torch.autograd.grad(result, leaves, upstream)


def same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("tokens", [TOKENS, 1, 0])
def test_an_inverse_undoes_an_order(tokens):
    order, inverse = routing(tokens)
    assert torch.equal(inverse, order.argsort())
    rows = whole(tokens * K, 5)
    there = ops.permuted(rows, order, inverse)
    assert torch.equal(there, rows[order])
    assert torch.equal(ops.permuted(there, inverse, order), rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [TOKENS, 1, 0])
def test_rows_have_the_gradients_of_indices(tokens, dtype):
    order, inverse = routing(tokens)
    x = whole(tokens, 5, dtype=dtype)
    rows = whole(tokens * K, 5, dtype=dtype)
    same(
        gradients(lambda x: ops.rows_by_expert(x, order, inverse, K), x),
        gradients(lambda x: x[order // K], x),
    )
    same(
        gradients(lambda rows: ops.permuted(rows, order, inverse), rows),
        gradients(lambda rows: rows[order], rows),
    )


@pytest.mark.parametrize("types", [(torch.float32,) * 2, (torch.bfloat16,) * 2, TO_FP32], ids=str)
@pytest.mark.parametrize("tokens", [TOKENS, 1, 0])
def test_sums_have_the_gradients_of_indices(tokens, types):
    order, inverse = routing(tokens)
    dtype, result = types
    rows = whole(tokens * K, 5, dtype=dtype)
    same(
        gradients(lambda rows: ops.sums_of_rows(rows, order, inverse, K, dtype=result), rows),
        gradients(lambda rows: rows[inverse].to(result).view(tokens, K, 5).sum(1), rows),
    )


def test_sums_are_rounded_once():
    order, inverse = routing()
    rows = torch.randn(TOKENS * K, 5, dtype=torch.bfloat16)
    exact = rows[inverse].float().view(TOKENS, K, 5).sum(1)
    found = ops.sums_of_rows(rows, order, inverse, K, dtype=torch.bfloat16)
    assert torch.equal(found, exact.bfloat16())


def weighted(gate_up, weights):
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up * weights


def test_weighted_swiglu_has_the_gradient_of_its_formula():
    gate_up = torch.randn(6, 10, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(6, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ops.weighted_swiglu, (gate_up, weights))
    torch.testing.assert_close(
        ops.weighted_swiglu(gate_up, weights), weighted(gate_up, weights), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("of_weights", [torch.float32, torch.bfloat16])
def test_weighted_swiglu_errs_as_its_parts_do(of_weights):
    torch.manual_seed(0)
    gate_up = torch.randn(40, 64)
    weights = torch.rand(40, 1)
    upstream = torch.randn(40, 32).bfloat16()

    def results(function, dtype, of_weights):
        leaves = [
            gate_up.bfloat16().to(dtype).requires_grad_(),
            weights.to(torch.bfloat16).to(of_weights).requires_grad_(),
        ]
        result = function(*leaves).to(dtype)
        return result, *torch.autograd.grad(result, leaves, upstream.to(dtype))

    truth = results(weighted, torch.float64, torch.float64)
    eager = results(weighted, torch.bfloat16, of_weights)
    found = results(ops.weighted_swiglu, torch.bfloat16, of_weights)
    for ours, theirs, exact in zip(found, eager, truth, strict=True):
        assert ours.dtype == theirs.dtype
        error = float((ours - exact).abs().max())
        assert error <= 1.5 * float((theirs - exact).abs().max())


def test_weights_that_are_given_have_no_gradient():
    gate_up = torch.randn(6, 10, requires_grad=True)
    ops.weighted_swiglu(gate_up, torch.ones(6, 1)).sum().backward()
    other = gate_up.detach().requires_grad_()
    ops.swiglu(other).sum().backward()
    assert torch.equal(gate_up.grad, other.grad)
