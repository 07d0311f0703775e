"""The parallel layers, calling their own collectives, against nn.Linear and nn.Embedding."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_merak.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from tests.oplog import OpLog
from tests.ranks import run_ranks

INPUT, OUTPUT, VOCABULARY = 8, 12, 16


def full():
    """One serial problem, the same on every rank: integers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randint(-4, 5, shape, generator=generator).float()

    return {
        "x": draw(3, 5, INPUT),
        "weight": draw(OUTPUT, INPUT),
        "bias": draw(OUTPUT),
        "upstream": draw(3, 5, OUTPUT),
        "table": draw(VOCABULARY, INPUT),
        "ids": torch.randint(VOCABULARY, (3, 5), generator=generator),
    }


def serial(x, weight, bias, upstream):
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    out = F.linear(*leaves)
    out.backward(upstream)
    return out.detach(), *(leaf.grad for leaf in leaves)


def part(tensor, dim, rank, n):
    return tensor.chunk(n, dim)[rank]


def fill(layer, weight, bias):
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)


def column(rank, n, gather_output):
    p = full()
    out, grad_x, grad_weight, grad_bias = serial(p["x"], p["weight"], p["bias"], p["upstream"])
    layer = ColumnParallelLinear(INPUT, OUTPUT, group=dist.group.WORLD, gather_output=gather_output)
    assert layer.weight.shape == (OUTPUT // n, INPUT) and layer.bias.shape == (OUTPUT // n,)
    fill(layer, part(p["weight"], 0, rank, n), part(p["bias"], 0, rank, n))
    x = p["x"].clone().requires_grad_()
    y = layer(x)
    assert torch.equal(y, out if gather_output else part(out, -1, rank, n))
    y.backward(p["upstream"] if gather_output else part(p["upstream"], -1, rank, n))
    assert torch.equal(x.grad, grad_x)
    assert torch.equal(layer.weight.grad, part(grad_weight, 0, rank, n))
    assert torch.equal(layer.bias.grad, part(grad_bias, 0, rank, n))


def row(rank, n, input_is_parallel, skip_bias_add):
    p = full()
    out, grad_x, grad_weight, grad_bias = serial(p["x"], p["weight"], p["bias"], p["upstream"])
    layer = RowParallelLinear(
        INPUT,
        OUTPUT,
        group=dist.group.WORLD,
        input_is_parallel=input_is_parallel,
        skip_bias_add=skip_bias_add,
    )
    assert layer.weight.shape == (OUTPUT, INPUT // n) and layer.bias.shape == (OUTPUT,)
    fill(layer, part(p["weight"], 1, rank, n), p["bias"])
    x = (part(p["x"], -1, rank, n) if input_is_parallel else p["x"]).clone().requires_grad_()
    y = layer(x)
    assert torch.equal(y, out - p["bias"] if skip_bias_add else out)
    y.backward(p["upstream"])
    assert torch.equal(x.grad, part(grad_x, -1, rank, n) if input_is_parallel else grad_x)
    assert torch.equal(layer.weight.grad, part(grad_weight, 1, rank, n))
    assert layer.bias.grad is None if skip_bias_add else torch.equal(layer.bias.grad, grad_bias)


def vocabulary(rank, n):
    p = full()
    table = p["table"].clone().requires_grad_()
    out = F.embedding(p["ids"], table)
    upstream = p["x"]
    out.backward(upstream)
    layer = VocabParallelEmbedding(VOCABULARY, INPUT, group=dist.group.WORLD)
    assert layer.weight.shape == (VOCABULARY // n, INPUT)
    with torch.no_grad():
        layer.weight.copy_(part(p["table"], 0, rank, n))
    y = layer(p["ids"])
    assert torch.equal(y, out)
    y.backward(upstream)
    assert torch.equal(layer.weight.grad, part(table.grad, 0, rank, n))


def block(rank, n):
    """Column then row, as in every transformer block: one sum forward, one backward, and nothing
    else is sent.
    """
    p = full()
    first = ColumnParallelLinear(INPUT, OUTPUT, bias=False, group=dist.group.WORLD)
    second = RowParallelLinear(OUTPUT, INPUT, bias=False, group=dist.group.WORLD)
    with torch.no_grad():
        first.weight.copy_(part(p["weight"], 0, rank, n))
        second.weight.copy_(part(p["weight"].t(), 1, rank, n))
    x = p["x"].clone().requires_grad_()
    with OpLog() as log:
        second(first(x).relu()).sum().backward()
    reference = p["x"].clone().requires_grad_()
    F.linear(F.linear(reference, p["weight"]).relu(), p["weight"].t()).sum().backward()
    assert torch.equal(x.grad, reference.grad)
    assert log.collectives == ["allreduce_"] * 2


def on_parts(rank, n):
    """Column, relu, row and its bias between parts of the sequence: one gathering and one
    reduce-scatter each way.
    """
    p, group = full(), dist.group.WORLD
    x = torch.cat([p["x"]] * 2, 1)[:, : 2 * n]  # 2 n positions of 3 samples
    upstream = x.flip(1)
    kwargs = {"group": group, "sequence_parallel": True}
    first = ColumnParallelLinear(INPUT, OUTPUT, **kwargs)
    second = RowParallelLinear(OUTPUT, INPUT, **kwargs)
    fill(first, part(p["weight"], 0, rank, n), part(p["bias"], 0, rank, n))
    fill(second, part(p["weight"].t(), 1, rank, n), p["bias"][:INPUT])
    leaf = part(x, 1, rank, n).clone().requires_grad_()
    with OpLog() as log:
        y = second(first(leaf).relu())
        forward = log.collectives
        y.backward(part(upstream, 1, rank, n))
    gather, scatter = "_allgather_base_", "_reduce_scatter_base_"
    assert forward == [gather, scatter]
    # the bias's gradient is a part, too
    assert log.collectives == [gather, scatter, "allreduce_", gather, scatter]
    whole, weight, bias, turned, last = [
        t.clone().requires_grad_()
        for t in (x, p["weight"], p["bias"], p["weight"].t(), p["bias"][:INPUT])
    ]
    out = F.linear(F.linear(whole, weight, bias).relu(), turned, last)
    out.backward(upstream)
    assert torch.equal(y, part(out, 1, rank, n))
    assert torch.equal(leaf.grad, part(whole.grad, 1, rank, n))
    assert torch.equal(first.weight.grad, part(weight.grad, 0, rank, n))
    assert torch.equal(first.bias.grad, part(bias.grad, 0, rank, n))
    assert torch.equal(second.weight.grad, part(turned.grad, 1, rank, n))
    assert torch.equal(second.bias.grad, last.grad)


def vocabulary_on_parts(rank, n):
    p = full()
    ids, upstream = torch.cat([p["ids"]] * 2, 1)[:, : 2 * n], torch.cat([p["x"]] * 2, 1)[:, : 2 * n]
    table = p["table"].clone().requires_grad_()
    out = F.embedding(ids, table)
    out.backward(upstream)
    layer = VocabParallelEmbedding(
        VOCABULARY, INPUT, group=dist.group.WORLD, sequence_parallel=True
    )
    with torch.no_grad():
        layer.weight.copy_(part(p["table"], 0, rank, n))
    y = layer(ids)
    assert torch.equal(y, part(out, 1, rank, n))
    y.backward(part(upstream, 1, rank, n))
    assert torch.equal(layer.weight.grad, part(table.grad, 0, rank, n))


def edges(rank, n):
    """Under 'edge' a layer only computes on its shard: whoever owns the segments owns the sums and
    the bias.
    """
    p, kwargs = full(), {"group": dist.group.WORLD, "collectives": "edge"}
    layers = (
        ColumnParallelLinear(INPUT, OUTPUT, **kwargs),
        RowParallelLinear(INPUT, OUTPUT, **kwargs),
    )
    fill(layers[0], part(p["weight"], 0, rank, n), part(p["bias"], 0, rank, n))
    fill(layers[1], part(p["weight"], 1, rank, n), p["bias"])
    table = VocabParallelEmbedding(VOCABULARY, INPUT, **kwargs)
    with torch.no_grad():
        table.weight.copy_(part(p["table"], 0, rank, n))
    with OpLog() as log:
        x = p["x"].clone().requires_grad_()
        column_out = layers[0](x)
        column_out.sum().backward()
        results = [column_out, layers[1](part(p["x"], -1, rank, n)), table(p["ids"]), x.grad]
    assert log.collectives == []
    return [result.detach() for result in results]


def all_layers(rank, n):
    for gather_output in (True, False):
        column(rank, n, gather_output)
    for input_is_parallel in (True, False):
        for skip_bias_add in (True, False):
            row(rank, n, input_is_parallel, skip_bias_add)
    vocabulary(rank, n)
    block(rank, n)
    on_parts(rank, n)
    vocabulary_on_parts(rank, n)
    return edges(rank, n)


@pytest.mark.parametrize("n", [2, 4])
def test_layers_equal_serial_ones(n):
    p, results = full(), run_ranks(all_layers, n)
    columns, rows, looked_up, grads = zip(*results, strict=True)
    assert torch.equal(torch.cat(columns, -1), F.linear(p["x"], p["weight"], p["bias"]))
    assert torch.equal(sum(rows), F.linear(p["x"], p["weight"]))
    assert torch.equal(sum(looked_up), F.embedding(p["ids"], p["table"]))
    assert torch.equal(sum(grads), p["weight"].sum(0).expand_as(p["x"]))


def test_alone_they_are_pytorchs_layers():
    p = full()
    column_layer, row_layer = ColumnParallelLinear(INPUT, OUTPUT), RowParallelLinear(INPUT, OUTPUT)
    for layer in (column_layer, row_layer):
        fill(layer, p["weight"], p["bias"])
        assert torch.equal(layer(p["x"]), F.linear(p["x"], p["weight"], p["bias"]))
    table = VocabParallelEmbedding(VOCABULARY, INPUT)
    with torch.no_grad():
        table.weight.copy_(p["table"])
    assert torch.equal(table(p["ids"]), F.embedding(p["ids"], p["table"]))
    assert ColumnParallelLinear(INPUT, OUTPUT, bias=False).bias is None
    assert RowParallelLinear(INPUT, OUTPUT, bias=False).bias is None
