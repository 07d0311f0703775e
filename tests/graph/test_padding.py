"""Features that the ranks do not share evenly: their padding changes no loss and no gradient, and
stays zero.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.lowering.rewrite import rewrite
from megatron_merak.graph.partition.cut import cut
from megatron_merak.graph.sharding.shard import shard
from tests.graph import lockstep

ONES = torch.ones(4, dtype=torch.float64)


class Odd(nn.Module):
    """Features 8 -> 67 -> 8, and what ``between`` makes of them."""

    def __init__(self, between):
        super().__init__()
        self.into, self.also, self.out = nn.Linear(8, 67), nn.Linear(8, 67), nn.Linear(67, 8)
        self.table, self.scale, self.between = (
            nn.Embedding(67, 8),
            nn.Parameter(torch.full((1,), 0.7)),
            between,
        )

    def forward(self, x):
        return self.between(self, x).square().sum()


# What the padding of the first layer's features would become, or what it would do to the gradient
# of other padding.
CASES = {
    "add of one number": lambda m, x: m.out(m.into(x) + m.scale),
    "add of a mean": lambda m, x: m.out(m.into(x) + x.mean(-1, keepdim=True)),
    "add of a slice": lambda m, x: m.out(m.into(x) + x[..., :1]),
    "sub with alpha": lambda m, x: m.out(torch.sub(m.into(x), m.scale, alpha=2)),
    "einsum": lambda m, x: torch.einsum("bn,on->bo", m.into(x) + m.scale, m.out.weight),
    "sum by einsum": lambda m, x: torch.einsum("bo,no->b", m.out(m.into(x)), m.into.weight),
    "tied table": lambda m, x: (F.linear(x, m.table.weight) + m.scale) @ m.table.weight + m.table(torch.arange(4) * 22),
    "quotient": lambda m, x: m.out(m.into(x) / m.also(x)),
    "divisor": lambda m, x: m.out(m.scale / m.into(x)),
    "exp": lambda m, x: m.out(m.into(x).exp()),
    "cos and sigmoid": lambda m, x: m.out(m.into(x).cos() * m.also(x).sigmoid()),
    "comparison": lambda m, x: m.out(torch.where(m.into(x) >= 0, m.also(x), 1.0)),
    "power 0": lambda m, x: m.out(m.into(x) ** 0 * m.also(x)),
    "root": lambda m, x: m.out(m.into(x).abs() ** 0.5 + m.also(x).square().sqrt()),
    "learnt power": lambda m, x: m.out(m.into(x).abs() ** m.scale),
    "rsqrt": lambda m, x: m.out(m.into(x).square().rsqrt()),
    "log": lambda m, x: m.out(m.into(x).square().log()),
    "reciprocal": lambda m, x: m.out(m.into(x).reciprocal()),
    "clamp": lambda m, x: m.out(m.into(x).clamp(min=0.1)),
    "filled by mask": lambda m, x: m.out(m.into(x).masked_fill(m.also(x) <= 0, 2.0)),
    "all masked": lambda m, x: m.out(m.into(x).masked_fill(m.also(x) <= 0, -torch.inf).softmax(0).nan_to_num()),
    "softmax of rows": lambda m, x: m.out(m.into(x).softmax(0)),
    "logsumexp of rows": lambda m, x: m.out(m.into(x).logsumexp(0)),
    "cumsum of rows": lambda m, x: m.out((m.into(x) + 1).cumsum(0)),
    "deviation of rows": lambda m, x: m.out(m.into(x) / m.into(x).std(0, keepdim=True)),
    "norm of rows": lambda m, x: m.out(F.layer_norm(m.into(x).t(), (4,), ONES, ONES).t()),
    "rows added": lambda m, x: m.out(F.pad(m.into(x), (0, 0, 0, 2), value=1.0)),
    "rows joined": lambda m, x: m.out(torch.cat([m.into(x), m.also(x).exp()], 0)),
    "rows sorted": lambda m, x: m.out((m.into(x) + m.scale).sort(0).values),
    "rows picked": lambda m, x: m.out((m.into(x) + m.scale).gather(0, m.also(x).argsort(0))),
    "row written": lambda m, x: m.out(m.into(x).index_put((torch.tensor([1]),), m.scale)),
    "maximum": lambda m, x: m.out(torch.maximum(m.into(x), m.scale)),
    "lerp": lambda m, x: m.out(torch.lerp(m.into(x), m.also(x), m.scale)),
    "function of a column": lambda m, x: m.out(F.linear(x, m.into.weight + 1.0)),
    "function of a row": lambda m, x: F.linear(m.into(x), m.out.weight.exp()),
    "sum of a weight": lambda m, x: m.out(m.into(x)) + m.into.weight.square().sum(),
    "sum and mean": lambda m, x: m.into(x).square().sum(-1) + m.also(x).cos().mean(-1),
    "classes": lambda m, x: F.cross_entropy(m.into(x) + m.scale, torch.tensor([0, 66, 34, 33])),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_three_steps_equal_one_process_and_padding_stays_zero(case):
    tp = 4
    torch.manual_seed(0)
    model, batch = Odd(CASES[case]).double(), {"x": torch.randn(4, 8, dtype=torch.float64)}
    captured = capture(model, batch)
    sharding = shard(captured, tp)
    assert any(tensor.padded for tensor in sharding.tensors.values())
    chain = cut(captured)
    programs = [rewrite(captured, chain, sharding, rank, tp) for rank in range(tp)]
    held = lockstep.shards(captured, sharding, model)
    real = {name: dict(model.named_parameters())[name] for name in sharding.tensors}
    for _ in range(3):
        loss = model(**batch)
        wanted = dict(
            zip(
                real,
                torch.autograd.grad(loss, list(real.values()), materialize_grads=True),
                strict=True,
            )
        )
        losses, found = lockstep.gradients(programs, held, batch)
        assert all(torch.allclose(one, loss.detach(), rtol=1e-11) for one in losses)
        scale = max(float(grad.abs().max()) for grad in wanted.values())
        with torch.no_grad():
            for name, tensor in sharding.tensors.items():
                for rank, grads in enumerate(found):
                    part = lockstep.part(wanted[name], tensor, rank, tp)
                    assert torch.allclose(grads[name], part, rtol=1e-9, atol=1e-12 * scale), name
                    held[rank][name] -= 1e-2 / scale * grads[name]
                    padding = lockstep.part(torch.ones_like(wanted[name]), tensor, rank, tp) == 0
                    assert not grads[name][padding].any() and not held[rank][name][padding].any(), (
                        name
                    )
                real[name] -= 1e-2 / scale * wanted[name]
