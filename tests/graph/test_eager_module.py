"""Modules that decide by values run as they are, as one node, or the model is refused."""

import pytest
import torch
from torch import nn

from megatron_merak.errors import TraceError
from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.capture.empty import init_empty_weights
from megatron_merak.graph.ir.nodes import is_random
from megatron_merak.graph.ir.opaque import CustomFunction
from megatron_merak.graph.ir.operators import flops
from tests.graph.test_capture import captured_gradients

pytestmark = pytest.mark.long


class Experts(nn.Module):
    """Runs those experts that some token chose."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x, chosen, drop=0.0):
        made = torch.zeros_like(x)
        for index in chosen.unique():
            rows = torch.where(chosen == index)[0]
            made.index_add_(
                0, rows, nn.functional.dropout(self.experts[index](x[rows]) * self.scale, drop)
            )
        return made, None


class Model(nn.Module):
    def __init__(self, block, **options):
        super().__init__()
        self.first, self.last, self.options = nn.Linear(4, 4), nn.Linear(4, 32), options
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x, drop=0.0):
        x = self.first(x)
        for block in self.blocks:
            made = block(x, x[:, :3].argmax(-1), **self.options)
            x = x + (made if isinstance(made, torch.Tensor) else made[0])
        return self.last(x).logsumexp(-1).sum()


def check(block, scale=1.0, **options):
    model, x = Model(block, **options), torch.randn(6, 4) * scale
    with init_empty_weights():
        captured = capture(Model(block, **options), {"x": x})
    torch.manual_seed(3)
    loss, found = captured_gradients(captured, model, {"x": x})
    torch.manual_seed(3)
    expected = model(x)
    expected.backward()
    assert torch.equal(loss, expected.detach())
    grads = {
        name: p.grad if p.grad is not None else torch.zeros_like(p)
        for name, p in model.named_parameters()
    }
    assert grads.keys() == captured.shapes.keys()
    for name, grad in grads.items():
        assert torch.equal(found.get(name, torch.zeros_like(grad)), grad), name
    nodes = [n for n in captured.module.graph.nodes if isinstance(n.target, CustomFunction)]
    assert len(nodes) == 2
    return captured, nodes


def test_experts_that_are_chosen_by_values_run_as_they_are():
    captured, nodes = check(Experts)
    assert [n.name for n in nodes] == ["Experts_forward", "Experts_forward_1"]
    assert flops(nodes[0]) == 2 * 6 * 4 * 4
    (note,) = captured.notes
    assert (
        "Experts runs as it is, replicated on every rank" in note
        and "for index in chosen.unique()" in note
    )


def test_random_numbers_are_drawn_in_the_same_order():
    _, nodes = check(Experts, drop=0.5)
    assert is_random(nodes[0])


class Seldom(Experts):
    """Takes part, gradient and random numbers and all, for values that nobody would try."""

    def forward(self, x, chosen):
        made = torch.zeros_like(x)
        return made + nn.functional.dropout(self.experts[0](x), 0.5) if x.abs().max() > 1 else made


@pytest.mark.parametrize("scale", [1e-3, 100.0])
def test_what_a_module_does_for_rare_values_is_not_lost(scale):
    _, nodes = check(Seldom, scale=scale)
    assert is_random(nodes[0])


class Selecting(Experts):
    """Its decision leaves it: only what is around it can be one node."""

    def forward(self, x, chosen):
        return [int((chosen == i).sum()) for i in range(3)]


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.selecting, self.layer = Selecting(), nn.Linear(4, 4)

    def forward(self, x, chosen):
        counts = self.selecting(x, chosen)
        return torch.cat(
            [part * i for i, part in enumerate(x.sort(0)[0].split(counts))]
        ) + self.layer(x)


def test_what_hands_on_numbers_is_kept_with_what_reads_them():
    _, nodes = check(Around)
    assert nodes[0].name == "Around_forward"


class Remembering(Experts):
    def forward(self, x, chosen):
        made, _ = super().forward(x, chosen)
        self.kept = made
        return made


class Counting(Experts):
    def forward(self, x, chosen):
        self.scale.add_(1)
        return super().forward(x, chosen)


class OfOtherShapes(Experts):
    def forward(self, x, chosen):
        made = super().forward(x, chosen)[0]
        return made.sum() + made[chosen > 0].new_zeros(int(chosen.sum()) + 1)


@pytest.mark.parametrize("block", [Remembering, Counting, OfOtherShapes])
def test_what_does_more_or_returns_other_shapes_is_refused(block):
    with pytest.raises(
        TraceError, match=r"eager_module.py.* (decides by the values|whose shape depends on values)"
    ):
        capture(Model(block), {"x": torch.randn(6, 4)})


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.layer = Model(Experts), nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(self.layer(x)) if x.sum() > 0 else self.layer(x).sum()


def test_a_model_that_decides_itself_is_refused():
    with pytest.raises(TraceError, match="if x.sum.*decides by the values"):
        capture(Whole(), {"x": torch.rand(6, 4)})  # the branch with the experts


def test_what_already_is_of_a_dtype_is_not_converted():
    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            self.layer = self.layer.to(torch.float32)
            return self.layer(x).sum()

    with init_empty_weights():
        captured = capture(Casting(), {"x": torch.randn(2, 4)})
    assert captured.shapes.keys() == {"layer.weight", "layer.bias"}


class Sometimes(Experts):
    """Where no row is chosen, nothing that has a gradient goes into what it returns."""

    def forward(self, x, chosen):
        made = torch.zeros_like(x)
        for row in torch.where(chosen > 0)[0]:
            made.index_add_(0, row[None], self.experts[0](x[row][None]))
        return made


@pytest.mark.parametrize("value", [0, 1])
def test_a_gradient_can_be_asked_for_even_where_there_is_none(value):
    _, (node, _) = check(Sometimes)
    tensors = [
        torch.full(x.shape, value, dtype=x.dtype) for x in (n.meta["val"] for n in node.args)
    ]
    tensors = [x.requires_grad_(x.is_floating_point()) for x in tensors]
    (made,) = node.target(*tensors)
    made.sum().backward()
    assert any(x.grad is not None and x.grad.any() for x in tensors) == bool(value)
