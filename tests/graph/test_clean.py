"""Every repair on a module made for it: the graph has the shape that later passes rely on, and
computes the same.
"""

import operator

import pytest
import torch
from torch import nn

from megatron_merak.errors import TraceError
from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.ir.aliases import aliased
from tests.graph.tiny import run


class Net(nn.Module):
    """Parameters and buffers for a forward that the test gives."""

    def __init__(self, function):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.function, self.layer = function, nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(8, 6, generator=generator))
        self.experts = nn.Parameter(torch.randn(2, 6, 4, generator=generator))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("unsaved", torch.arange(6.0) / 7, persistent=False)
        self.plain = torch.tensor([3.0])

    def forward(self, x):
        return self.function(self, x)


def check(function, x=None):
    """The graph of a forward, after a comparison of its loss and gradients with the module's."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)) if x is None else x
    model = Net(function)
    captured = capture(model, {"x": x})
    parameters = {
        k: p.detach().clone().requires_grad_(p.requires_grad) for k, p in model.named_parameters()
    }
    expected = model(x.clone())
    (found,) = run(captured, parameters, {"x": x.clone()})
    assert torch.equal(expected, found)
    expected.backward()
    found.backward()
    for key, parameter in model.named_parameters():
        assert (parameter.grad is None) == (parameters[key].grad is None), key
        assert parameter.grad is None or torch.equal(parameter.grad, parameters[key].grad), key
    nodes = list(captured.module.graph.nodes)
    assert all("val" in node.meta for node in nodes if node.op != "output")
    dead = [node for node in nodes if not node.users and node.op not in ("output", "placeholder")]
    assert all(aliased(node)[1] for node in dead), "dead code"
    assert {node.op for node in nodes} <= {"placeholder", "get_attr", "call_function", "output"}
    assert not any("_assert" in str(node.target) for node in nodes)
    return captured


def test_a_copy_that_is_asked_for_is_made():
    def copied(module, x):
        hidden = x * module.weight[0]
        before = hidden.to(torch.float32, copy=True)
        hidden.mul_(2)
        return (before * hidden).sum() + hidden[:, 1:].sum()

    check(copied)


def names(captured):
    """The operations of a graph, in order."""
    calls = [node for node in captured.module.graph.nodes if node.op == "call_function"]
    return [str(node.target).removeprefix("aten.").split(".")[0] for node in calls]


def written(captured):
    return [name for name in names(captured) if name.endswith("_") and not name.endswith("__")]


def test_parameters_constants_and_buffers_keep_their_names():
    captured = check(lambda m, x: (m.layer(x) * m.table * m.plain * m.frozen * m.unsaved).sum())
    held = {
        node.target: node.meta["val"] for node in captured.module.graph.find_nodes(op="get_attr")
    }
    assert held.keys() == {"layer.weight", "layer.bias", "table", "plain", "frozen", "unsaved"}
    assert captured.buffers == ("table",) and captured.shapes.keys() == {
        "layer.weight",
        "layer.bias",
        "frozen",
    }
    assert captured.trainable == {"layer.weight", "layer.bias"}
    assert torch.equal(held["table"], torch.arange(6.0)) and torch.equal(
        captured.module.table, torch.arange(6.0)
    )


def test_regions_without_gradient_are_flat():
    def function(m, x):
        y = m.layer(x)
        with torch.no_grad():
            scale, constant = y.abs().amax(), m.table * 2
            with torch.no_grad():
                scale = scale + 1
        return (y / scale + constant).sum()

    captured = check(function)
    assert "wrap_with_set_grad_enabled" not in names(captured)
    assert names(captured).count("detach") == 1, "only where a gradient would flow"


def test_gradients_switched_on_within_a_region_that_has_them_off():
    def function(m, x):
        with torch.no_grad():
            y = m.layer(x)
            with torch.enable_grad():
                y = m.layer(y)
            z = m.layer(y) * m.weight[:4]
        return (y * m.layer(x) + z).sum()

    assert names(check(function)).count("detach") == 2


@pytest.mark.parametrize(
    ("inside", "detached"),
    [
        (lambda y: y.to(torch.float32).float().contiguous(), 0),
        (lambda y: nn.functional.dropout(y.type_as(y), 0.0), 0),
        (lambda y: y.view(4, 6), 1),
        (lambda y: y.t().contiguous().t(), 1),
        (lambda y: y.to(torch.float64).to(torch.float32), 1),
    ],
)
def test_a_tensor_that_a_region_returns_as_it_is_keeps_its_gradient(inside, detached):
    def function(m, x):
        y = m.layer(x)
        with torch.no_grad():
            z = inside(y)
            best = z.argmax(-1)
        return (z * y + best[:, None]).sum() + y.cos().sum()

    assert names(check(function)).count("detach") == detached


def test_autocast_is_refused_where_it_is_on_and_dropped_where_it_is_off():
    def function(on):
        def forward(m, x):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
                return m.layer(x).float().sum()

        return forward

    assert names(check(function(False))) == ["linear", "sum"]
    with pytest.raises(TraceError, match="model Net: .*test_clean.py.* runs under autocast"):
        capture(Net(function(True)), {"x": torch.randn(4, 6)})


def test_a_forward_that_changes_its_tables_is_refused():
    def counting(m, x):
        m.table.add_(1)
        return (m.layer(x) * m.table).sum()

    def unread(m, x):
        loss = (m.layer(x) * m.table).sum()
        m.table.mul_(0.5)
        return loss

    def hidden(m, x):
        y = m.layer(x)
        with torch.no_grad():
            y[:, 0] = 0
        return y.sum()

    for function in (counting, unread):
        with pytest.raises(TraceError, match="buffer table: .* changes it in the forward"):
            capture(Net(function), {"x": torch.randn(4, 6)})
    with pytest.raises(TraceError, match="writes into a value from outside of torch.no_grad"):
        capture(Net(hidden), {"x": torch.randn(4, 6)})


def test_a_write_without_gradients_into_a_value_without_one_is_kept():
    """The second region writes into a result of the first, and into a copy of an entry of the
    batch.
    """

    def weighted(m, x):
        with torch.no_grad():
            weights = m.layer(x).sigmoid()
        y, scale = m.layer(x), x.clone()
        with torch.no_grad():
            weights *= y.detach().exp()
            weights[:, 0] += y[:, 1]
            scale.mul_(m.weight[0])
        return (weights * y * scale).sum()

    check(weighted)

    def evaluated(m, x):
        with torch.no_grad():
            loss = m.layer(x).square()
            with torch.no_grad():
                weights = loss.exp()
            loss *= weights
            return loss.sum()

    model, x = Net(evaluated).eval(), torch.randn(4, 6)
    (found,) = run(
        capture(model, {"x": x}, training=False), dict(model.named_parameters()), {"x": x}
    )
    assert torch.equal(found, model(x)) and not found.requires_grad


def test_batch_norm_counts_nothing():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x):
            return (self.norm(x) * x).sum()

    model = Normed()
    captured = capture(model, {"x": torch.randn(4, 6)})
    assert names(captured) == ["batch_norm", "mul", "sum"]
    assert (
        "norm.num_batches_tracked" not in captured.buffers and model.norm.num_batches_tracked == 0
    )
    assert torch.equal(model.norm.running_mean, torch.zeros(6))
    assert (
        len(captured.notes) == 1
        and not capture(model, {"x": torch.randn(4, 6)}, training=False).notes
    )


def test_the_batch_is_not_written():
    def function(m, x):
        x[x < 0] = 0
        return (m.layer(x) * x).sum()

    assert written(check(function)) == []


def test_what_changes_nothing_is_gone():
    def function(m, x):
        y = m.layer(x).float().to(torch.float32).reshape(4, 6)[:, 0:6][:, :]
        y = nn.functional.dropout(y, 0.0, True)
        return (
            nn.functional.dropout(y, 0.5, False).expand(4, 6).view(4, 6).sum()
            + m.table.detach().sum()
        )

    assert names(check(function)) == ["linear", "sum", "sum", "add"]


def test_a_detached_value_stays_detached():
    captured = check(lambda m, x: (m.layer(x).detach() * m.weight[:4]).sum())
    assert "detach" in names(captured)


def test_dead_code_is_gone():
    def function(m, x):
        torch.rand(3)
        unread = m.layer(x) * 2
        unread.add_(1)
        return (x @ m.weight.T).sum()

    captured = check(function)
    assert names(captured) == ["linear", "sum"] and captured.shapes.keys() == {"weight"}


@pytest.mark.parametrize(
    "turn",
    [lambda w: w.T, lambda w: w.t(), lambda w: w.transpose(-1, 0), lambda w: w.permute(1, 0)],
)
def test_a_product_with_a_transposed_weight_is_linear(turn):
    assert names(check(lambda m, x: (x @ turn(m.weight)).sum())) == ["linear", "sum"]


def test_a_product_with_a_weight_that_is_not_transposed_is_none():
    captured = check(
        lambda m, x: (x @ m.layer.weight.permute(0, 1)).sum() + (x @ m.layer.weight).sum()
    )
    assert "linear" not in names(captured)


def test_each_reader_of_a_parameters_view_has_its_own():
    def function(m, x):
        first, second = m.experts.transpose(1, 2).unbind(0)
        y = x @ first.T
        return (y.sum() + (x @ second.T).sum()) * (x @ first.T).sum()

    captured = check(function)
    nodes = list(captured.module.graph.nodes)
    views = [
        n
        for n in nodes
        if n.op == "call_function" and ("transpose" in n.name or "unbind" in n.name)
    ]
    views += [n for n in nodes if n.target is operator.getitem]
    assert len(views) >= 9 and all(len(n.users) == 1 for n in views)
    assert all(next(iter(n.users)) is n.next for n in views)


class TestInPlace:
    def test_a_chain_of_writes(self):
        def function(m, x):
            y = m.layer(x)
            y = y.mul_(2).add_(m.frozen).clamp_(min=-1)
            y.masked_fill_(x > 0, 0.5)
            return (y * m.layer(x)).sum()

        assert written(check(function)) == []

    def test_earlier_readers_read_the_old_value(self):
        def function(m, x):
            y = m.layer(x)
            before = y.clone() * y.sum()
            y.add_(1)
            return (before * y).sum()

        assert written(check(function)) == []

    def test_a_write_keeps_the_dtype(self):
        def function(m, x):
            y = m.layer(x).half()
            y.add_(torch.ones(6))
            y.copy_(m.layer(x) * 2)
            return (y * 1).float().sum()

        captured = check(function)
        assert written(captured) == []

    def test_writes_into_slices(self):
        """The shift of labels in encoder-decoder models."""

        def function(m, x):
            shifted = x.new_zeros(x.shape)
            shifted[:, 1:] = m.layer(x)[:, :-1].clone()
            shifted[:, 0] = 3
            shifted[1:3][:, 2] = m.layer(x)[1:3, 1]
            shifted[0] += m.frozen
            return (shifted * m.table).sum()

        assert written(check(function)) == []

    def test_a_part_written_twice_stays(self):
        def function(m, x):
            y = m.layer(x) * 1
            part = y[:, :3]
            part.mul_(2)
            part.add_(1)
            return (y * m.table).sum()

        assert len(written(check(function))) >= 1

    def test_a_write_seen_through_a_view_stays(self):
        def function(m, x):
            y = m.layer(x) * 1
            turned = y.t()
            y.add_(1)
            return (turned @ y).sum()

        assert written(check(function)) == ["add_"]

    def test_results_of_one_operation_do_not_share(self):
        def function(m, x):
            values, indices = m.layer(x).topk(2)
            values /= values.sum(-1, keepdim=True)
            return (values * indices).sum()

        assert written(check(function)) == []

    def test_a_write_through_a_reshape_whose_source_is_not_read_again(self):
        def function(m, x):
            y = m.layer(x).flatten()
            return y.relu_().sum()

        assert written(check(function)) == []

    def test_a_constant_that_is_written_is_copied_first(self):
        def function(m, x):
            y = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
            y.t().add_(1)
            return (m.layer(x) * y).sum()

        first = check(function)
        x = torch.ones(4, 6)
        parameters = {k: p for k, p in Net(function).named_parameters()}
        assert torch.equal(run(first, parameters, {"x": x})[0], run(first, parameters, {"x": x})[0])
