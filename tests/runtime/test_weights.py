"""The sink of weight gradients: the same sums now or later, in fp32, and never a graph."""

import pytest
import torch

from megatron_merak.runtime.weights import Gradient, WeightGradients


def sink_of(*shapes, dtype=torch.float32):
    weights = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    return WeightGradients({w: Gradient(torch.ones(w.shape)) for w in weights}), weights


def integers(*shape, dtype=torch.float32):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(sum(shape))).to(
        dtype
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_add_to_what_is_there(dtype):
    sink, (weight,) = sink_of((3, 2), dtype=dtype)
    grad_output, x = integers(5, 3, dtype=dtype), integers(5, 2, dtype=dtype)
    sink.matmul(weight, grad_output, x)
    sink.matmul(weight, grad_output, x)
    assert sink.grads[weight].total.dtype == torch.float32
    assert torch.equal(sink.grads[weight].total, 1 + 2 * grad_output.float().t() @ x.float())


def test_deferred_products_wait_for_drain():
    sink, (first, second) = sink_of((3, 2), (4, 2))
    x = integers(5, 2)
    sink.queue = queue = []
    sink.matmul(first, integers(5, 3), x)
    sink.matmul(second, integers(5, 4), x)
    assert all(torch.equal(grad.total, torch.ones_like(grad.total)) for grad in sink.grads.values())
    sink.drain(queue)
    assert torch.equal(sink.grads[first].total, 1 + integers(5, 3).t() @ x)
    assert torch.equal(sink.grads[second].total, 1 + integers(5, 4).t() @ x)


def test_a_parameter_that_a_tape_gives_back_as_another_tensor_is_known_by_its_memory():
    flat = torch.zeros(14)
    weights = [torch.nn.Parameter(flat[:6].view(3, 2)), torch.nn.Parameter(flat[6:].view(4, 2))]
    sink = WeightGradients({w: Gradient(torch.zeros(w.shape)) for w in weights})
    x = integers(5, 2)
    for moved in (False, True):
        if moved:
            for weight in weights:
                weight.data = weight.data.clone()
        sink.matmul(weights[1].detach().requires_grad_(), integers(5, 4), x)
    assert torch.equal(sink.grads[weights[1]].total, 2 * integers(5, 4).t() @ x)
    assert not sink.grads[weights[0]].total.any()
    frozen = torch.nn.Parameter(torch.zeros(4, 2), requires_grad=False)
    sink.matmul(frozen, integers(5, 4), x)
    sink.matmul(frozen.detach(), integers(5, 4), x)


def test_what_must_be_done_now_does_not_wait():
    sink, (weight,) = sink_of((3, 2))
    sink.queue = queue = []
    sink.matmul(weight, integers(5, 3), integers(5, 2), now=True)
    assert not queue and torch.equal(
        sink.grads[weight].total, 1 + integers(5, 3).t() @ integers(5, 2)
    )


def test_rows_of_a_table_add_up_and_other_gradients_too():
    sink, (table, bias) = sink_of((4, 2), (3,), dtype=torch.bfloat16)
    sink.rows(
        table,
        torch.tensor([2, 0, 2]),
        torch.tensor([[1.0, 2], [3, 4], [5, 6]], dtype=torch.bfloat16),
    )
    assert sink.grads[table].total.tolist() == [[4, 5], [1, 1], [7, 9], [1, 1]]
    sink.add(bias, torch.tensor([1.0, 2, 3], dtype=torch.bfloat16))
    assert sink.grads[bias].total.tolist() == [2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", ["product", "rows", "whole"])
def test_what_comes_first_overwrites_the_last_step(first, dtype):
    """The same bits as adding to zeros, whatever kind of gradient comes first."""
    weight = torch.nn.Parameter(torch.zeros(40, 24, dtype=dtype))
    x, grad_output, rows = (torch.randn(shape).to(dtype) for shape in ((9, 24), (9, 40), (6, 24)))
    ways = {
        "product": lambda sink: sink.matmul(weight, grad_output, x),
        "rows": lambda sink: sink.rows(weight, torch.tensor([3, 0, 3, 39, 7, 7]), rows),
        "whole": lambda sink: sink.add(weight, grad_output.t() @ x),
    }
    sums = []
    for total in (torch.zeros(40, 24), torch.full((40, 24), torch.nan)):
        sink = WeightGradients({weight: Gradient(total)})
        for _ in range(2):
            total.zero_() if not sums else sink.grads[weight].start()
            for way in (first, *ways):
                ways[way](sink)
        sums.append(total)
    assert torch.equal(*sums) and sums[0].count_nonzero() > 900


def test_no_gradient_reads_zero():
    grad = Gradient(torch.full((3,), torch.nan))
    grad.start()
    grad.settle()
    grad.add(torch.ones(3))
    grad.settle()
    assert grad.total.tolist() == [1, 1, 1]


@pytest.mark.parametrize("deferred", [True, False])
def test_gradients_never_become_a_graph(deferred):
    """The queue drains outside of a backward, where grad mode is on."""
    sink, (weight, table) = sink_of((3, 2), (4, 2))
    sink.queue = [] if deferred else None
    sink.matmul(weight, integers(5, 3).requires_grad_(), integers(5, 2).requires_grad_())
    sink.rows(table, torch.tensor([1]), integers(1, 2).requires_grad_())
    sink.drain(sink.queue or ())
    assert not any(grad.total.requires_grad for grad in sink.grads.values())
