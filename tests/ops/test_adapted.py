"""Adapters in the products of frozen layers, against the layers and the adapters each by itself."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_merak.ops import adapted_linear, adapted_linears

WIDTHS = (4, 5, 3)
INPUTS = 6
PLACES, RANKS = (0, 2), (2, 3)


class Sink:
    def __init__(self):
        self.grads: dict[Tensor, Tensor] = {}

    def matmul(self, weight: Tensor, grad_output: Tensor, input: Tensor, now: bool = False) -> None:
        assert weight not in self.grads
        self.grads[weight] = grad_output.t() @ input

    def getter(self, input: Tensor) -> None:
        return None


def whole_numbers(*shape):
    return torch.randint(-8, 9, shape).to(torch.float64)


def matrices(rows, columns, beside):
    """Matrices, of which all are in one piece of memory if they are ``beside`` one another."""
    sizes = [count * columns for count in rows]
    pieces = whole_numbers(sum(sizes)).split(sizes) if beside else map(whole_numbers, sizes)
    return [piece.view(-1, columns) for piece in pieces]


@pytest.mark.parametrize("sunk", [True, False])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("scales", [(2.0, 2.0), (0.5, 4.0)], ids=str)
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(("together", "views"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("shape", [(INPUTS,), (2, 3, INPUTS)], ids=str)
def test_the_sums_are_those_of_layers_and_adapters(
    shape, together, views, beside, scales, given, sunk
):
    """Whole numbers and powers of two, so that the order of sums cannot matter."""
    x = whole_numbers(*shape).requires_grad_()
    weights = matrices(WIDTHS, INPUTS, beside)
    biases = [whole_numbers(WIDTHS[0]).requires_grad_(), None, whole_numbers(WIDTHS[2])]
    downs = [x.requires_grad_() for x in matrices(RANKS, INPUTS, beside)]
    ups = [
        whole_numbers(WIDTHS[place], rank).requires_grad_()
        for place, rank in zip(PLACES, RANKS, strict=True)
    ]
    outs = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    hiddens = [F.linear(x, down) for down in downs]
    for place, hidden, up, scale in zip(PLACES, hiddens, ups, scales, strict=True):
        outs[place] = outs[place] + F.linear(hidden, up) * scale
    upstream = [whole_numbers(*out.shape) for out in outs]
    used = slice(None) if together else slice(1, None)  # a layer whose output goes nowhere
    wanted = [x, biases[0], *downs, *ups]
    expected = torch.autograd.grad(outs[used], wanted, upstream[used], allow_unused=True)

    sink = Sink() if sunk else None
    factors = ups if given else [*downs, *ups]
    more = [F.linear(x, down) for down in downs] if given else []
    given_to = (x, [*weights, *factors], biases, more, PLACES, scales)
    if together:
        found = adapted_linear(*given_to, sink=sink)
        assert torch.equal(found, torch.cat(outs, -1))
        grads = torch.autograd.grad(found, wanted, torch.cat(upstream, -1), allow_unused=True)
    else:
        found = adapted_linears(*given_to, views, sink=sink)
        assert all(map(torch.equal, found, outs))
        grads = torch.autograd.grad(found[used], wanted, upstream[used], allow_unused=True)
    for tensor, grad, value in zip(wanted, grads, expected, strict=True):
        own = grad if sink is None or grad is not None else sink.grads.get(tensor)
        assert own is value is None or torch.equal(own, value)
    if sunk:
        through = {*ups} if given else {*ups, *downs}
        assert sink.grads.keys() == (through if together else through - {ups[0], downs[0]})


def test_nothing_is_computed_for_an_input_without_a_gradient():
    x = whole_numbers(5, INPUTS)
    weight, down, up = (whole_numbers(*shape) for shape in ((4, INPUTS), (2, INPUTS), (4, 2)))
    leaves = [down.requires_grad_(), up.requires_grad_()]
    found = adapted_linear(x, [weight, *leaves], [None], [], [0], [1.0])
    products = []

    class Products(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "mm" in func.overloadpacket.__name__:
                products.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Products():
        torch.autograd.grad(found.sum(), leaves)
    assert len(products) == 3  # of what A and B get, and of x A^T
