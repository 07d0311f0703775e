"""Weights of routed rows: where they come before the last product, and where they stay."""

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (its grouped product)
from torch import nn

from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.ir.nodes import op_name, operand
from megatron_merak.graph.lowering.rewrite import rewrite
from megatron_merak.graph.partition.cut import cut
from megatron_merak.graph.sharding.experts import GROUPED
from megatron_merak.graph.sharding.shard import shard
from tests.graph import lockstep
from tests.graph.tiny import gradients

product = torch.ops.transformers.grouped_mm_fallback
K = 2


class Mixture(nn.Module):
    """Two experts of width 4, whose rows ``weigh(rows, weights, module)`` weighs."""

    def __init__(self, weigh, activation=F.silu):
        super().__init__()
        self.weigh = weigh
        self.activation = activation
        self.table = nn.Embedding(6, 8)
        self.router = nn.Linear(8, 3, bias=False)
        self.first = nn.Parameter(torch.randn(3, 8, 8) * 0.3)
        self.last = nn.Parameter(torch.randn(3, 4, 8) * 0.3)

    def forward(self, ids, labels):
        x = self.table(ids).flatten(0, 1)
        weights, experts = self.router(x).softmax(-1).topk(K)
        found, order = experts.flatten().sort()
        ends = torch.histc(found.float(), 3, 0, 2).cumsum(0, dtype=torch.int32)
        gate, up = product(x[order // K], self.first, ends).chunk(2, -1)
        rows = product(self.activation(gate) * up, self.last, ends)
        rows = self.weigh(rows, weights.flatten()[order].unsqueeze(-1))
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        y = rows[inverse].view(len(x), K, 8).sum(1)
        return {"loss": F.cross_entropy(x + y, labels.flatten())}


def lowered(model):
    """The graph of one rank, whose loss and gradients are the model's."""
    ids = torch.tensor([[0, 1, 2, 3], [5, 4, 0, 0]])
    batch = {"ids": ids, "labels": ids}
    captured = capture(model, batch)
    sharding = shard(captured, 1)
    program = rewrite(captured, cut(captured), sharding, 0, 1)
    held = lockstep.shards(captured, sharding, model, 1)
    (loss,), (found,) = lockstep.gradients([program], held, batch, tp=1)
    expected, grads = gradients(model, batch)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-6)
    return program.graph


def is_weighted(graph):
    """Whether the last product's rows are weighted: both factors of a product of another one."""
    *_, last = (node for node in graph.nodes if op_name(node) in GROUPED)
    rows = operand(last)
    return op_name(rows) == "mul" and any(op_name(x) == "mul" for x in rows.all_input_nodes)


def plainly(rows, weights):
    return rows * weights


CASES = {
    "as models do": (plainly, F.silu, True),
    "the other way round": (lambda rows, weights: weights * rows, F.silu, True),
    "read by others": (lambda rows, weights: rows * weights + rows.detach(), F.silu, False),
    "of the rows themselves": (lambda rows, _: rows * rows.mean(-1, keepdim=True), F.silu, False),
    "for each feature": (lambda rows, weights: rows * weights.expand(-1, 8), F.silu, False),
    "written in place": (lambda rows, weights: (rows * weights).add_(1.0), F.silu, True),
    "behind a bias": (lambda rows, weights: (rows + 1.0) * weights, F.silu, False),
    "behind another activation": (plainly, F.gelu, False),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_come_before_the_last_product(case):
    weigh, activation, expected = CASES[case]
    torch.manual_seed(0)
    graph = lowered(Mixture(weigh, activation))
    assert is_weighted(graph) is expected
