"""Small modules captured and fused: which patterns were found, and that results stay the same."""

import torch
from torch import nn

from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.fusion.fuse import fuse
from megatron_merak.graph.lowering.rewrite import rewrite
from megatron_merak.graph.partition.cut import cut
from megatron_merak.graph.sharding.shard import shard
from tests.graph.stages import Family, Stages
from tests.graph.tiny import gradients

aten = torch.ops.aten


CAUSAL, ATTENTION = "causal attention", "attention"


def assert_errs_alike(found, eager, truth, precision):
    for name, grad in truth.items():
        scale, error = grad.abs().max(), (found[name] - grad).abs().max()
        assert error <= max(3 * (eager[name] - grad).abs().max(), precision * scale, 1e-9), (
            name,
            error / scale,
        )


# ---- pieces on their own -------------------------------------------------------------------------
class Scored(nn.Module):
    """``body`` between an embedding of width 8 and a loss."""

    def __init__(self, body, classes=6):
        super().__init__()
        self.table, self.head = nn.Embedding(classes, 8), nn.Linear(8, classes, bias=False)
        self.weight, self.body = nn.Parameter(torch.rand(8) + 0.5), body

    def forward(self, ids, labels):
        return {"loss": self.body(self, self.table(ids), labels)}


def pieces(body, ids=None, labels=None, seen=None, chunk=0):
    """How often each kind is found in ``body(module, x [2, 4, 8], labels)``, which must keep its
    loss and gradients.

    The graph is added to ``seen``.
    """
    torch.manual_seed(0)
    model = Scored(body)
    ids = torch.tensor([[0, 1, 2, 3], [5, 4, 0, 0]]) if ids is None else ids
    batch = {"ids": ids, "labels": ids if labels is None else labels}
    captured = capture(model, batch)
    chain = cut(captured)
    rewritten = rewrite(captured, chain, shard(captured, 1), 0, 1)
    counts = fuse(rewritten.graph, chunk)
    if seen is not None:
        seen.append(rewritten.graph)
    loss, grads = gradients(model, batch)
    family = Family.__new__(Family)
    family.model, family.batch, family.captured, family.rewritten = (
        model,
        batch,
        captured,
        rewritten,
    )
    family.units, family.rank, family.tp, family.sharding = (
        len(chain.units),
        0,
        1,
        shard(captured, 1),
    )
    found_loss, found = Stages(family).step(batch)
    torch.testing.assert_close(found_loss, loss, equal_nan=True)
    for name, grad in grads.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, equal_nan=True)
    return dict(counts)


def mean(module, x, labels):
    return module.head(x).square().mean()
