"""Facts about nodes, on graphs small enough to know the answer."""

import operator

import pytest
import torch
from torch import nn

from megatron_merak.graph.ir.nodes import (
    classify,
    is_op,
    is_random,
    mutation_deps,
    nbytes,
    op_name,
    storages,
    values,
    writers,
)
from megatron_merak.graph.ir.operators import flops


def export(function, *inputs, parameters=()):
    """The aten graph of ``function(module, *inputs)``, its get_attr nodes with values, all of it in
    training mode.
    """

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            for name, parameter in dict(parameters).items():
                self.register_parameter(name, nn.Parameter(parameter))

        def forward(self, *inputs):
            return function(self, *inputs)

    module = torch.export.export(Model().train(), inputs, strict=False).module(check_guards=False)
    for node in module.graph.nodes:
        if node.op == "get_attr" and "val" not in node.meta:
            node.meta["val"] = operator.attrgetter(node.target)(module)
    return module.graph


def find(graph, name):
    found = [node for node in graph.nodes if op_name(node) == name]
    assert len(found) == 1, found
    return found[0]


F = nn.functional
x, image, attention = torch.rand(3, 5), torch.rand(2, 4, 9, 9), torch.rand(2, 3, 8, 6)
grouped = (torch.rand(6, 8, dtype=torch.bfloat16), torch.rand(2, 8, 16, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("function", "inputs", "name", "expected"),
    [
        (lambda m, a, b: F.linear(a, b), (x, torch.rand(7, 5)), "linear", 2 * 3 * 5 * 7),
        (
            lambda m, a, b, c: torch.addmm(c, a, b),
            (x, torch.rand(5, 7), torch.rand(7)),
            "addmm",
            2 * 3 * 5 * 7,
        ),
        (
            lambda m, a, b: a @ b,
            (torch.rand(2, 3, 5), torch.rand(2, 5, 7)),
            "matmul",
            2 * 2 * 3 * 5 * 7,
        ),
        (
            lambda m, a, b: torch.bmm(a, b),
            (torch.rand(2, 3, 5), torch.rand(2, 5, 7)),
            "bmm",
            2 * 2 * 3 * 5 * 7,
        ),
        (
            lambda m, a, w: F.conv2d(a, w, groups=2),
            (image, torch.rand(6, 2, 3, 3)),
            "conv2d",
            2 * 2 * 6 * 49 * 2 * 9,
        ),
        (
            lambda m, a, w: F.conv_transpose2d(a, w),
            (image, torch.rand(4, 6, 3, 3)),
            "conv_transpose2d",
            2 * 2 * 4 * 81 * 6 * 9,
        ),
        (
            lambda m, q: F.scaled_dot_product_attention(q, q, q),
            (attention,),
            None,
            4 * 2 * 3 * 8 * 8 * 6,
        ),
        (
            lambda m, q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
            (attention,),
            None,
            2 * 2 * 3 * 8 * 8 * 6,
        ),
        (
            lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v),
            (attention, torch.rand(2, 3, 7, 6), torch.rand(2, 3, 7, 4)),
            None,
            2 * 2 * 3 * 8 * 7 * (6 + 4),
        ),
        (
            lambda m, a, b: torch.einsum("bij,bjk->bik", a, b),
            (torch.rand(2, 3, 5), torch.rand(2, 5, 7)),
            "einsum",
            2 * 2 * 3 * 5 * 7,
        ),
        (
            lambda m, a: torch.einsum("bij,bkj->bik", a, a),
            (torch.rand(2, 3, 5),),
            "einsum",
            2 * 2 * 3 * 3 * 5,
        ),
        (lambda m, a, b: a * b, (x, x), "mul", 0),
    ],
)
def test_flops(function, inputs, name, expected):
    assert (
        flops(find(export(function, *inputs), name or "scaled_dot_product_attention")) == expected
    )


def test_an_opaque_region_costs_what_is_in_it():
    def f(m, a):
        with torch.no_grad():
            b = a @ a
        return b + a

    graph = export(f, torch.rand(4, 4))
    assert [flops(node) for node in graph.nodes if "set_grad" in op_name(node)] == [2 * 4 * 4 * 4]


def test_names_values_and_bytes():
    graph = export(lambda m, a: torch.split(a, 2)[1].add(1), torch.rand(4, 3))
    split, add = find(graph, "split"), find(graph, "add")
    getitem = add.args[0]
    assert op_name(getitem) == "getitem"
    assert is_op(split, "chunk", "split") and not is_op(split, "spli") and not is_op(0, "split")
    assert [len(values(node)) for node in (split, getitem, add)] == [2, 1, 1]
    assert [nbytes(node) for node in (split, getitem, add)] == [48, 24, 24]
    assert op_name(next(iter(graph.nodes))) == ""


def test_storages_go_through_views_and_pieces():
    def f(m, a):
        b = a + 1
        b.view(-1)[2:3].fill_(0)
        torch.split(b, 2)[1].mul_(2)
        return b + 1

    graph = export(f, torch.rand(4, 3))
    made, final = (node for node in graph.nodes if op_name(node) == "add")
    fill, multiply = find(graph, "fill_"), find(graph, "mul_")
    root = storages(graph)
    assert root[fill] is made and root[multiply] is made and root[final] is final
    assert writers(graph) == {made: [fill, multiply]}
    deps = mutation_deps(graph)
    assert deps[final] == (fill, multiply) and deps[multiply] == (fill,)
    assert made not in deps and fill not in deps


@pytest.mark.parametrize(
    ("function", "random"),
    [
        (lambda m, a: F.dropout(a, 0.5), True),
        (lambda m, a: F.dropout(a, 0.0), False),
        (lambda m, a: F.dropout(a, 0.5, training=False), False),
        (lambda m, a: F.scaled_dot_product_attention(a, a, a), False),
        (lambda m, a: F.scaled_dot_product_attention(a, a, a, dropout_p=0.1), True),
        (lambda m, a: a + torch.rand(6), True),
        (lambda m, a: a + a.new_empty(6).bernoulli_(0.5), True),
        (lambda m, a: a + 1, False),
    ],
)
def test_random(function, random):
    assert any(is_random(node) for node in export(function, attention).nodes) == random


def kinds_of(graph):
    kinds = classify(graph, ("w", "bias"))
    return {name: kinds[node] for node in graph.nodes if (name := op_name(node) or node.op)}


def test_classes():
    def f(m, a, mask):
        table = torch.arange(5).cos()
        side = m.bias.exp()
        return (F.linear(a * table, m.w) + side).masked_fill(mask.logical_not(), 0)

    graph = export(
        f, x, torch.ones(7, dtype=bool), parameters={"w": torch.rand(7, 5), "bias": torch.rand(7)}
    )
    kinds = kinds_of(graph)
    expected = dict.fromkeys(("arange", "cos", "mul", "logical_not"), "common") | {
        "exp": "side",
        "linear": "main",
    }
    expected |= {
        "add": "main",
        "masked_fill": "main",
        "placeholder": "leaf",
        "get_attr": "param",
        "output": "output",
    }
    assert kinds == expected


def test_chance_is_never_computed_twice():
    graph = export(
        lambda m, a: F.linear(a * torch.rand(5).sqrt(), m.w), x, parameters={"w": torch.rand(7, 5)}
    )
    assert kinds_of(graph) | {"rand": "main", "sqrt": "main", "mul": "main"} == kinds_of(graph)


def test_a_storage_written_by_main_is_main_from_its_start():
    def f(m, a):
        buffer = torch.zeros(4, 7)
        alone = torch.ones(4, 7)
        alone[1:].mul_(2)
        buffer[:3] = F.linear(a, m.w)
        return buffer.relu() + alone.exp()

    kinds = kinds_of(export(f, x, parameters={"w": torch.rand(7, 5)}))
    assert kinds | {"zeros": "main", "relu": "main", "copy_": "main"} == kinds
    assert kinds | {"ones": "common", "mul_": "common", "exp": "common"} == kinds
