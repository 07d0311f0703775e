"""Products of rows with the weight of their group: beside a loop over groups, with and without a
sink. Whole numbers, so that every order of additions gives the same.
"""

import pytest
import torch
from torch import Tensor

from megatron_merak import ops
from megatron_merak.ops import add_products_, grouped_linear
from megatron_merak.runtime.weights import Gradient, WeightGradients

ROWS = 9
SPLITS = {
    "uneven": [2, 3, 9],
    "one has all": [9, 9, 9],
    "first has none": [0, 4, 9],
    "last have none": [5, 9, 9],
    "not all rows": [1, 4, 7],
    "no rows": [0, 0, 0],
}
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
OF_SPLITS = pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
TRANSPOSED = pytest.mark.parametrize("transposed", [False, True])


def whole(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-3, 4, shape).to(dtype)


def operands(split: list[int], transposed: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    rows = whole(ROWS, 4, dtype=dtype).requires_grad_()
    weight = whole(3, *((4, 5) if transposed else (5, 4)), dtype=dtype).requires_grad_()
    return rows, weight, torch.tensor(split, dtype=torch.int32)


def by_loop(rows: Tensor, weight: Tensor, split: list[int], transposed: bool) -> Tensor:
    parts = []
    start = 0
    for group, end in enumerate(split):
        matrix = weight[group] if transposed else weight[group].t()
        parts.append(rows[start:end] @ matrix)
        start = end
    beyond = rows.new_zeros(ROWS - start, parts[0].shape[1])
    return torch.cat([*parts, beyond])


@TYPES
@OF_SPLITS
@TRANSPOSED
def test_it_is_a_loop_over_groups(split, transposed, dtype):
    rows, weight, ends = operands(split, transposed, dtype)
    expected = by_loop(rows, weight, split, transposed)
    found = grouped_linear(rows, weight, ends, transposed=transposed)
    assert torch.equal(found, expected)
    upstream = whole(*found.shape, dtype=dtype).t().contiguous().t()
    wanted = torch.autograd.grad(expected, (rows, weight), upstream)
    grads = torch.autograd.grad(found, (rows, weight), upstream)
    assert all(map(torch.equal, grads, wanted))


@TYPES
@OF_SPLITS
@TRANSPOSED
@pytest.mark.parametrize("deferred", [False, True])
def test_gradients_of_weights_are_added_up_in_main_grad(split, transposed, dtype, deferred):
    """The first of a step overwrites what the one before left, also of groups without rows."""
    rows, weight, ends = operands(split, transposed, dtype)
    parameter = torch.nn.Parameter(weight.detach())
    total = torch.full(weight.shape, 7.0, dtype=torch.promote_types(dtype, torch.float32))
    gradient = Gradient(total)
    gradient.start()
    sink = WeightGradients({parameter: gradient})
    sink.queue = [] if deferred else None
    expected = torch.zeros_like(total)
    for _ in range(2):
        upstream = whole(ROWS, 5, dtype=dtype)
        plain = by_loop(rows, weight, split, transposed)
        (of_rows, of_weight) = torch.autograd.grad(plain, (rows, weight), upstream)
        expected += of_weight
        out = grouped_linear(rows, parameter, ends, transposed, sink)
        found = torch.autograd.grad(out, (rows, parameter), upstream, allow_unused=True)
        assert torch.equal(found[0], of_rows) and found[1] is None
    if deferred:
        assert total.eq(7).all() and len(sink.queue) == 2
        sink.drain(sink.queue)
    assert torch.equal(total, expected)


def test_a_frozen_weight_keeps_no_rows_and_has_no_gradient():
    rows, weight, ends = operands([2, 3, 9], False, torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.data_ptr()) or x, lambda x: x
    ):
        out = grouped_linear(rows, weight.detach(), ends)
    out.sum().backward()
    assert rows.data_ptr() not in saved and weight.grad is None and rows.grad is not None


def test_products_in_16_bits_are_added_in_fp32():
    """Of 256 + 1, which bf16 rounds to 256."""
    left = torch.ones(2, 1, dtype=torch.bfloat16)
    total = torch.full((1, 1, 1), 256.0)
    add_products_(total, left[:1], left[:1], torch.tensor([1]), True)
    assert total.item() == 257


@pytest.mark.parametrize("weighted", [False, True])
@OF_SPLITS
@TRANSPOSED
def test_a_recomputed_activation_changes_no_bit(split, transposed, weighted):
    """Beside the activation, saved, and the product of it."""
    _, weight, ends = operands(split, transposed, torch.float32)
    width = weight.shape[1 if transposed else 2]
    gate_up = torch.randn(ROWS, 2 * width).requires_grad_()
    weights = torch.rand(ROWS, 1).requires_grad_() if weighted else None
    inputs = [x for x in (gate_up, weight, weights) if x is not None]
    upstream = torch.randn(ROWS, 5)

    def activation() -> Tensor:
        if weights is not None:
            return ops.weighted_swiglu(gate_up, weights)
        return ops.gated_halves(gate_up, "silu")

    plain = grouped_linear(activation(), weight, ends, transposed)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        found = ops.gated_grouped_linear(
            gate_up,
            weight,
            ends,
            row_weights=weights,
            activation="silu",
            transposed=transposed,
        )
    assert not any(tensor.shape == (ROWS, width) for tensor in saved)
    assert torch.equal(found, plain)
    grads = (torch.autograd.grad(out, inputs, upstream) for out in (found, plain))
    assert all(map(torch.equal, *grads))
