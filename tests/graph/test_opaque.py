"""Custom autograd Functions: traced through where that changes no gradient, else one node that is
the Function.
"""

import copy

import pytest
import torch

from megatron_merak.errors import TraceError
from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.capture.empty import init_empty_weights
from megatron_merak.graph.ir.nodes import classify, is_random
from megatron_merak.graph.ir.opaque import CustomFunction
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid
from tests.engines import engine_of
from tests.graph.test_capture import Net, captured_gradients, check_fidelity


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


class Clipped(torch.autograd.Function):
    """Differs from the derivative of its forward for tiny arguments only."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 0.5 / x.clamp(min=1e-6).sqrt()


class OnlySome(torch.autograd.Function):
    """Works for the shape it was made for, which is large: nothing to compare."""

    @staticmethod
    def forward(ctx, x):
        assert x.numel() > 1 << 23
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g


class Saturating(torch.autograd.Function):
    """Several results, one of them no tensor and one without gradient; bounds what all its readers
    send back.
    """

    @staticmethod
    def forward(ctx, x, options):
        largest = x.abs().amax()
        ctx.mark_non_differentiable(largest)
        ctx.bound = options["bound"]
        return x.view_as(x), None, largest

    @staticmethod
    def backward(ctx, g, *_):
        return g.clamp(-ctx.bound, ctx.bound), None


class Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-50, 50)


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx, g):
        return 3 * g


class WithNumpy(torch.autograd.Function):
    """Its backward, which is not that of its forward, is computed with numpy."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x.exp())
        return x.square()

    @staticmethod
    def backward(ctx, g):
        x, _ = ctx.saved_tensors
        return torch.from_numpy(3 * x.numpy()) * g


def customs(captured):
    return [n for n in captured.module.graph.nodes if isinstance(n.target, CustomFunction)]


def check(function, count=1):
    """The captured gradients are the model's own, to the bit; returns what was captured."""
    model, x = Net(function), torch.randn(3, 4)
    with init_empty_weights():
        captured = capture(Net(function), {"x": x})
    torch.manual_seed(3)
    loss, found = captured_gradients(captured, model, {"x": x})
    torch.manual_seed(3)
    expected = model(x)
    expected.backward()
    assert torch.equal(loss, expected.detach())
    assert all(torch.equal(found[name], p.grad) for name, p in model.named_parameters())
    assert len(customs(captured)) == count
    return captured


def test_a_function_whose_backward_is_that_of_its_forward_is_traced_through():
    captured = check(lambda m, y: Double.apply(y).sum(), count=0)
    (note,) = captured.notes
    assert "Double" in note and "give the same" in note


@pytest.mark.parametrize("function", [StraightThrough, Clipped, WithNumpy])
def test_a_function_with_another_backward_keeps_it(function):
    captured = check(lambda m, y: (function.apply(y.abs() * 1e-7) * 3).sum())
    (note,) = captured.notes
    assert function.__name__ in note and "its backward is its own: the two differ" in note


def test_a_backward_that_needs_values_is_planned_without_and_trains():
    """The planner runs each unit's backward on tensors without values."""
    model, x = Net(lambda m, y: WithNumpy.apply(y).sum()), torch.randn(3, 4)
    expected = copy.deepcopy(model)
    expected(x).backward()
    engine = engine_of(model, {"x": x}, build_mesh(Grid(), 0, torch.device("cpu")))
    engine.backward([{"x": x}])
    for name, parameter in expected.named_parameters():
        assert torch.equal(engine.buffer.grad(name), parameter.grad)


def test_a_function_that_bounds_large_gradients_keeps_it():
    check(lambda m, y: (Bounded.apply(y) * 1000).sum())


def test_a_function_that_cannot_be_compared_is_kept():
    with init_empty_weights():
        model = Net(lambda m, y: OnlySome.apply(y.expand(1 << 20, 3, 4)).sum())
    captured = capture(model, {"x": torch.randn(3, 4)})
    assert customs(captured) and "could not be compared (AssertionError" in captured.notes[0]


def test_results_of_every_kind_and_readers_whose_gradients_are_bounded_together():
    def several(module, y):
        made, nothing, largest = Saturating.apply(y, {"bound": 1.5})
        assert nothing is None
        return made.sum() + (made * largest).sum() + (module.layer.weight * largest).sum()

    (node,) = customs(check(several))
    assert node.target.aliases_input


def test_a_parameter_is_read_once_by_a_function_that_may_hand_it_on():
    def twice(module, y):
        weight, _, _ = Saturating.apply(module.layer.weight, {"bound": 1.5})
        return (y @ weight).sum() + (weight * 2).sum()

    check(twice)


def test_what_is_written_into_the_argument_of_a_view_is_seen():
    def written(module, y):
        y = y * 1
        seen = Saturating.apply(y.detach(), {"bound": 1.5})[0]
        y.mul_(2)
        return (seen * y).sum()

    check(written)


def loss_beside_one_that_nothing_reads(model, y):
    (y - 1).square().mean()
    return WithNumpy.apply(y).sum()


def test_what_nothing_reads_before_a_function_is_dropped():
    """As a model's own loss, where a script computes another one of its outputs."""
    captured = check(loss_beside_one_that_nothing_reads)
    assert not any(node.name == "sub" for node in captured.module.graph.nodes)


def test_a_function_that_draws_random_numbers_is_random():
    (node,) = customs(captured := check(lambda m, y: Noisy.apply(y).sum()))
    assert is_random(node) and classify(captured.module.graph, captured.shapes)[node] == "main"


def test_nodes_survive_copies_of_the_graph_and_have_stable_names():
    captured = check(
        lambda m, y: StraightThrough.apply(StraightThrough.apply(y) * 1.5).sum(), count=2
    )
    again = copy.deepcopy(captured.module.graph)
    assert [n.name for n in again.nodes if isinstance(n.target, CustomFunction)] == [
        "StraightThrough_apply",
        "StraightThrough_apply_1",
    ]
    assert "StraightThrough_apply(" in captured.module.code


class ReadsMore(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        return x * module.weight if isinstance(module, torch.nn.Module) else x * module()

    @staticmethod
    def backward(ctx, g):
        return g, None


class Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (
            lambda m, y: ReadsMore.apply(y, m.layer).sum(),
            "ReadsMore.*in a module that is an argument",
        ),
        (
            lambda m, y: ReadsMore.apply(y, lambda: m.layer.bias).sum(),
            "ReadsMore.*that is not one of its arguments",
        ),
        (lambda m, y: Writes.apply(y * 1).sum(), "Writes.*changes memory of its arguments"),
    ],
)
def test_functions_that_do_more_than_their_results_are_refused(function, why):
    with init_empty_weights(), pytest.raises(TraceError, match=why):
        capture(Net(function), {"x": torch.randn(3, 4)})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phimoe", "recurrent_gemma"])
def test_models_with_functions_of_their_own(name):
    assert customs(check_fidelity(name))
