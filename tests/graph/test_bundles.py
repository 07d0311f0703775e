"""Groups of pointwise operations as one node: which there are, and that they change nothing until a
compiler rounds otherwise.
"""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.fusion.bundles import bundle, traffic
from megatron_merak.graph.fusion.fuse import fuse
from megatron_merak.graph.ir.bundle import Bundle
from megatron_merak.graph.lowering.flow import Flow
from megatron_merak.graph.lowering.rewrite import rewrite
from megatron_merak.graph.lowering.split import crossing_nodes
from megatron_merak.graph.measure import measure
from megatron_merak.graph.partition.cut import cut
from megatron_merak.graph.sharding.shard import shard
from tests.graph.stages import Family, Stages, unequal
from tests.graph.tiny import gradients

# The operations of each bundle, in the order of the graph.
SCORES = "mul div tanh mul add softmax"
FOUND = {
    "llama": [],
    "gemma2": [SCORES, "div tanh mul"],
}


def names(made):
    calls = [node for node in made.forward.graph.nodes if node.op == "call_function"]
    return " ".join(node.target.overloadpacket.__name__ for node in calls)


@pytest.mark.parametrize("name", FOUND)
def test_which_groups_there_are(name):
    family = Family(name)
    fuse(family.rewritten.graph)
    assert [names(made) for made in bundle(family.rewritten, least=0)] == FOUND[name]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gemma2", torch.bfloat16),
        ("gemma2", torch.float32),
        ("mamba", torch.float32),
        ("olmo2", torch.bfloat16),
        ("recurrent_gemma", torch.float32),
    ],
    ids=str,
)
def test_losses_and_gradients_keep_their_bits_where_nothing_is_compiled(name, dtype):
    """Computed again in the backward, one by one, each value is what it was."""
    plain, bundled = Family(name, dtype=dtype), Family(name, dtype=dtype)
    for family in (plain, bundled):
        fuse(family.rewritten.graph)
    assert bundle(bundled.rewritten, least=0)
    loss, grads = Stages(plain, 2).step(plain.batch)
    for recompute in (False, True):
        again, found = Stages(bundled, 2, recompute).step(bundled.batch)
        assert torch.equal(loss, again) and not unequal(found, grads)


class Written(nn.Module):
    """``body`` of rows of a table, and a loss."""

    def __init__(self, body):
        super().__init__()
        self.table, self.weight = nn.Embedding(8, 16), nn.Parameter(torch.rand(16) + 0.5)
        self.body = body

    def forward(self, ids):
        return {"loss": self.body(self, self.table(ids)).mean()}


def family_of(model):
    """A module that reads ids [2, 4], as a ``Family``."""
    family = Family.__new__(Family)
    family.model, family.batch = model, {"ids": torch.arange(8).view(2, 4)}
    family.captured = capture(model, family.batch)
    chain = cut(family.captured)
    family.sharding = shard(family.captured, 1)
    family.rewritten = rewrite(family.captured, chain, family.sharding, 0, 1)
    family.units, family.rank, family.tp = len(chain.units), 0, 1
    return family


def groups(body):
    """The operations of each group of ``body(module, x [2, 4, 16])``, which must keep its loss and
    gradients.
    """
    torch.manual_seed(0)
    family = family_of(Written(body))
    made = bundle(family.rewritten, least=0)
    loss, grads = gradients(family.model, family.batch)
    found_loss, found = Stages(family).step(family.batch)
    assert torch.equal(found_loss, loss) and not unequal(found, grads)
    return [names(each) for each in made]


def through_a_product(module, x):
    first = (x * 2 + 1).tanh()
    product = first @ module.table.weight.T @ module.table.weight
    return (product * first - x).sigmoid() * module.weight


def test_a_path_through_another_operation_parts_a_group():
    """What is read on both sides of the product is a result of the first group."""
    assert groups(through_a_product) == ["mul add tanh", "mul sub sigmoid mul"]


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (lambda m, x: (x * 3).cumsum(-1) * m.weight, []),
        (lambda m, x: (x * 3).softmax(1) * m.weight, []),
        (lambda m, x: (x * (x * 3).detach()).cumsum(-1), []),
        (
            lambda m, x: (x.view(8, 16) * 3).view(4, 32).sigmoid().cumsum(-1),
            ["mul reshape sigmoid"],
        ),
    ],
    ids=["a scan", "another dimension", "no gradient", "views between"],
)
def test_what_may_be_in_a_group(body, wanted):
    assert groups(body) == wanted


def test_a_number_is_not_the_value_that_is_numbered_so():
    """``x * weight`` is value 2 of both groups, of which one is doubled and the other one squared."""

    def body(module, x):
        doubled = (x * module.weight * 2).cumsum(-1)
        again = doubled * module.weight
        return (again * again).cumsum(-1)

    assert groups(body) == ["mul mul", "mul mul"]


def test_a_group_is_left_where_others_read_it_before_what_it_waits_for_now():
    """``doubled`` is a result of the group of ``late``, which the graph computes after ``scanned``."""

    def body(module, x):
        doubled = x * 2
        waved = (x + 1).cumsum(-1).sin()
        scanned = waved.cumsum(-1)
        late = ((module.weight.cumsum(-1) + doubled) * 3).tanh().exp()
        own = (waved * doubled).tanh().exp()
        return scanned + own.cumsum(-1) + late.cumsum(-1)

    assert groups(body) == ["mul add mul tanh exp"]


def test_layers_alike_share_one_bundle():
    family = Family("gemma2")
    fuse(family.rewritten.graph)
    scores, _ = bundle(family.rewritten, least=0)
    calls = [node for node in family.rewritten.graph.nodes if node.target is scores]
    assert len(calls) == 2 and traffic(scores)[0] > 3 * traffic(scores)[1]


def crossings(family):
    flow = Flow(family.rewritten)
    borders = range(1, family.units)
    return [[node.name for node in crossing_nodes(flow, border)] for border in borders]


class Layers(nn.Module):
    """Each layer ends with a group of two results, of which the next ones read both."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, ids):
        x = self.table(ids)
        gate = x
        for layer in self.layers:
            gate = layer(x * gate).mul(0.5).sigmoid()
            x = (x + gate) * 0.7
        return {"loss": (x * gate).mean()}


def test_what_crosses_between_stages_keeps_its_name_and_order():
    torch.manual_seed(0)
    plain = family_of(Layers())
    bundled = family_of(plain.model)
    before = crossings(bundled)
    made = bundle(bundled.rewritten, least=0)
    flow = Flow(bundled.rewritten)
    ends = [
        node
        for border in range(1, bundled.units)
        for node in crossing_nodes(flow, border)
        if any(isinstance(x.target, Bundle) for x in (node, *node.all_input_nodes))
    ]
    assert made and ends and crossings(bundled) == before
    loss, grads = Stages(plain, 2).step(plain.batch)
    again, found = Stages(bundled, 2).step(bundled.batch)
    assert torch.equal(loss, again) and not unequal(found, grads)


def test_small_groups_are_left():
    family = Family("gemma2")
    assert bundle(family.rewritten) == ()


def measured(compiles):
    family = Family("gemma2", batch=2, length=64)
    chain = cut(family.captured)
    units = measure(family.captured, chain, family.sharding, 1, compile_pointwise=compiles)
    return dict(zip(chain.names, units, strict=True))["model.layers.0.self_attn"]


def test_plans_count_what_the_compiled_form_keeps_and_starts():
    """Of scores [2, 4, 64, 64] in fp32: their product, and what the next one reads, which is the
    softmax of them; no more tanh.
    """
    plain, compiled = measured(False), measured(True)
    scores = 2 * 4 * 64 * 64 * 4
    assert plain.saved_bytes - compiled.saved_bytes == 0
    assert compiled.operations[0] < plain.operations[0]
    assert compiled.running_bytes[1] >= scores


# ---- compiled ------------------------------------------------------------------------------------
def scaled(x, y, weight):
    return (x * 0.22 + y) * weight - x


def squared_relu(x, y, weight):
    return (x.relu().square() + y) * weight


def capped(x, y, weight):
    return ((x * 0.1).tanh() * 50 + y).softmax(-1) * weight


def eager_and_compiled(body, dtype):
    """Results of a body and gradients of its arguments, eager and of a compiled bundle."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(dtype) for shape in ((96, 256), (96, 256), (256,))]
    grad = torch.randn(96, 256).to(dtype)
    graph = make_fx(lambda *given: (body(*given),))(*inputs)
    made = Bundle(graph, inputs, range(3))
    made.compile(torch.device("cpu"))
    found = []
    for run in (body, made):
        leaves = [x.clone().requires_grad_() for x in inputs]
        result = run(*leaves)
        found.append((result.detach(), *torch.autograd.grad(result, leaves, grad)))
    return zip(*found, strict=True)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("body", [scaled, squared_relu])
def test_compiled_sums_and_products_have_the_bits_of_eager_ones(body, dtype):
    result, dx, dy, dweight = eager_and_compiled(body, dtype)
    assert all(torch.equal(*pair) for pair in (result, dx, dy))
    eager, compiled = dweight  # summed over rows in another order
    bound = 1e-6 if dtype is torch.float32 else 2**-8
    assert (eager - compiled).abs().max() <= bound * eager.abs().max()


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 4e-7), (torch.bfloat16, 2**-8)])
def test_compiled_exponentials_are_as_near_as_the_page_says(dtype, bound):
    for eager, compiled in eager_and_compiled(capped, dtype):
        assert (eager - compiled).abs().max() <= bound * eager.abs().max()
