"""Each rule in a small module: a linear layer, the op, a loss. Right on two ranks, and sharded
where a rule says so.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.sharding import local
from megatron_merak.graph.sharding.rules import RULES, STARTERS
from megatron_merak.graph.sharding.rules_value import pointwise
from megatron_merak.graph.sharding.shard import shard
from tests.graph.lockstep import compare

TRIANGLE = (torch.eye(4) + torch.ones(4, 4).tril(-1) / 4).double().expand(2, 4, 4, 4)
FEATURES = 24  # 4 heads of 6, 3 blocks of 8, or a gate and a value of 12


class Between(nn.Module):
    """loss(op(linear(x))) with x [2, 4, 16]."""

    def __init__(self, op, features=FEATURES):
        super().__init__()
        self.linear = nn.Linear(16, features)
        self.op = op

    def forward(self, x):
        made = self.op(self.linear(x))
        scale = torch.linspace(0.5, 1.5, made.numel()).view(made.shape)
        return (made * scale).square().mean()


def trained(module, *args, **kwargs):
    """(loss, gradients) of a module as it is."""
    loss = module(*args, **kwargs)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return loss.detach(), grads


def check(module, tp=2, **batch):
    """The module's sharding, after comparing loss and gradients in double precision."""
    torch.manual_seed(0)
    module = module.double()
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(std=0.5)
    captured = capture(module, batch)
    sharding = shard(captured, tp)
    loss, grads = trained(module, **batch)
    difference, worst, where, programs = compare(captured, sharding, module, batch, loss, grads)
    assert difference <= 1e-12 and worst <= 1e-10, (difference, worst, where)
    return sharding, programs


def heads(h):
    return h.view(2, 4, 4, 6).transpose(1, 2)


def qkv(h):
    """[2, 4, 24] -> three of [2, 4 heads, 4, 2]."""
    return h.view(2, 4, 3, 4, 2).permute(2, 0, 3, 1, 4).unbind(0)


def fused(h):
    return F.scaled_dot_product_attention(*qkv(h))


def eager(h):
    q, k, v = qkv(h)
    return (q @ k.transpose(-1, -2)).masked_fill(torch.ones(4, 4).triu(1).bool(), -1e4).softmax(
        -1
    ) @ v


def grouped_queries(h):
    q, k, v = (x.view(2, 4, -1, 3).transpose(1, 2) for x in h.split((12, 6, 6), -1))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def rms(h):
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


def scatter(h):
    return h.gather(1, torch.tensor([3, 1, 2]).view(1, 3, 1).expand(2, 3, FEATURES))


def complex_product(h):
    turned = torch.view_as_complex(heads(h).reshape(2, 4, 4, 3, 2)) * torch.polar(
        torch.ones(3), torch.arange(3.0)
    )
    return torch.view_as_real(turned).flatten(3)


def gates(h):
    gate, value = h.chunk(2, -1)
    return F.silu(gate) * value


def pieces(h):
    made = heads(h).new_empty(2, 4, 4, 8)
    made[..., :6] = heads(h)
    made[..., 6:] = heads(h)[..., :2].tanh()
    return made


def every_other(h):
    return h[..., ::2] * h[..., 1::2].sigmoid()


DIVIDED = {
    "pointwise": lambda h: F.gelu(h).clamp(-3, 3),
    "where": lambda h: torch.where(h > 0, h, 0.1 * h),
    "maximum": lambda h: torch.max(h, torch.tensor(-0.5, dtype=h.dtype)),
    "constant": lambda h: h + torch.arange(24.0),
    "heads": heads,
    "flatten": lambda h: heads(h).transpose(1, 2).flatten(2),
    "unflatten": lambda h: h.unflatten(-1, (4, 6)),
    "movedim": lambda h: heads(h).movedim(1, -1),
    "narrowed": lambda h: (
        h.narrow(-1, 0, 8) * h.narrow(-1, 16, 8) + h[:, 1:2].narrow(1, 0, 1)[..., 8:16]
    ),
    "broadcast": lambda h: (
        torch.broadcast_to(heads(h)[:, :, :1], (2, 4, 3, 6)).swapdims(1, 2).moveaxis(1, 2)
    ),
    "transposed": lambda h: heads(h).mT @ h[0].t().view(4, 6, 4).mT,
    "squeeze": lambda h: h.unsqueeze(1).unsqueeze(-1).squeeze(1),
    "expand_as": lambda h: h * (torch.arange(24.0) / 24).expand_as(h),
    "view_as": lambda h: h[0] * (torch.arange(96.0) / 96).view_as(h[0]),
    "expand": lambda h: h.unsqueeze(1).expand(-1, 3, -1, -1),
    "repeat": lambda h: h.repeat(1, 2, 1),
    "repeat_interleave": lambda h: heads(h).repeat_interleave(2, 1),
    "repeat_heads": lambda h: heads(h)[:, :, None].expand(2, 4, 2, 4, 6).reshape(2, 8, 4, 6),
    "chunk": gates,
    "split": lambda h: h.split((16, 8), -1)[0],
    "slice": lambda h: h[..., :12] + h[..., 12:],
    "steps": every_other,
    "select": lambda h: h.view(2, 4, 3, 8)[:, :, 1],
    "rows": lambda h: h[:, 1:, :] * h[:, :-1, :],
    "cat": lambda h: torch.cat([h, h.tanh()], -1),
    "cat_rows": lambda h: torch.cat([h, h.tanh()], 1),
    "stack": lambda h: torch.stack([h, h.tanh()], 1),
    "new_zeros": lambda h: torch.cat([heads(h), heads(h).new_zeros(2, 4, 4, 2)], -1),
    "slice_scatter": lambda h: heads(h).slice_scatter(heads(h)[..., :2].tanh(), 3, 2, 4),
    "select_scatter": lambda h: heads(h).select_scatter(
        h.view(2, 4, 4, 6)[:, 0, :, :].tanh(), 2, 3
    ),
    "written piece by piece": pieces,
    "index_put": lambda h: h.transpose(0, 1).index_put(
        (torch.tensor([2, 0]),), h.transpose(0, 1)[:2].tanh()
    ),
    "index_add": lambda h: h.index_add(1, torch.tensor([2, 0]), h[:, :2].tanh()),
    "solve": lambda h: torch.linalg.solve_triangular(TRIANGLE, heads(h)[..., :4].mT, upper=False),
    "windows": lambda h: heads(h).unfold(2, 2, 1),
    "roll": lambda h: h.roll(1, 1),
    "pad": lambda h: F.pad(h, (0, 0, 1, 0)),
    "index": lambda h: h[:, torch.tensor([2, 0, 1])],
    "index_select": lambda h: h.index_select(1, torch.tensor([2, 0])),
    "gather": scatter,
    "topk": lambda h: heads(h).topk(2, -1).values,
    "cumsum": lambda h: h.cumsum(1),
    "softmax": lambda h: heads(h).softmax(-1),
    "head_norm": lambda h: F.layer_norm(heads(h), (6,)),
    "statistic": rms,
    "sum": lambda h: h.sum(1),
    "einsum": lambda h: torch.einsum("bhsd,bhtd->bhst", heads(h), heads(h)),
    "attention": fused,
    "eager_attention": eager,
    "grouped_queries": grouped_queries,
    "complex": complex_product,
}
WHOLE = {
    "softmax over features": lambda h: h.softmax(-1),
    "norm over features": lambda h: F.layer_norm(h, (FEATURES,)),
    "largest feature": lambda h: h.amax(-1),
    "scanned features": lambda h: 0.1 * h.cumsum(-1),  # else the loss is above 1e3
    "features in reverse": lambda h: h.flip(-1),
    "sorted": lambda h: h.sort(-1).values,
    "positions of features": lambda h: h[..., torch.tensor([5, 2])],
    "no rule": lambda h: torch.linalg.matrix_exp(0.1 * h.view(2, 4, 4, 6)[..., :4]),
    "another grouping": lambda h: h.view(2, 4, 3, 8)[:, :, :, :5],
}


@pytest.mark.parametrize("op", DIVIDED.values(), ids=DIVIDED)
def test_divided(op):
    sharding, _ = check(Between(op), x=torch.randn(2, 4, 16, dtype=torch.float64))
    assert sharding.tensors["linear.weight"].dim == 0, sharding.reasons
    assert sharding.tensors["linear.bias"].dim == 0


# Elementwise, although PyTorch does not tag them so: other names of operators, random ones, copies
# and parts of a value, and those of a value's shape only.
UNTAGGED = """
    absolute divide greater greater_equal less less_equal multiply negative not_equal subtract
    alpha_dropout bernoulli.p dropout feature_dropout rand_like rrelu_with_noise
    _to_copy alias conj contiguous copy detach imag lift_fresh_copy real to type_as
    empty_like fill full_like ones_like zero zeros_like
    __and__ __or__ floor_divide hardswish log_sigmoid
""".split()


def packet(name):
    return getattr(torch.ops.aten, name.partition(".")[0], None)


def test_rules_are_of_operators_that_exist():
    names = [*RULES, *STARTERS]
    unknown = [name for name in names if packet(name) is None]
    assert all(name.startswith("transformers.") for name in unknown), unknown


def test_elementwise_operators_are_what_pytorch_tags():
    """A rule for them would be silently wrong for one that looks at its neighbours."""
    names = [name for name, rule in RULES.items() if rule is pointwise]
    plain = {name if name.startswith("_") else name.rstrip("_") for name in names}
    overloads = {
        name: [getattr(packet(name), each) for each in packet(name).overloads()] for name in plain
    }
    untagged = [
        name
        for name, each in overloads.items()
        if not any(torch.Tag.pointwise in overload.tags for overload in each)
    ]
    assert sorted(untagged) == sorted(UNTAGGED)


class Pair(nn.Module):
    """A layer that can be sharded beside the one with the op."""

    def __init__(self, op):
        super().__init__()
        self.between, self.first, self.second = Between(op), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.between(x + self.second(F.gelu(self.first(x))))


@pytest.mark.parametrize("op", WHOLE.values(), ids=WHOLE)
def test_whole(op):
    sharding, _ = check(Pair(op), x=torch.randn(2, 4, 16, dtype=torch.float64))
    assert sharding.tensors["between.linear.weight"].dim is None
    assert sharding.reasons["between.linear.weight"].startswith("replicated: ")
    assert (sharding.tensors["first.weight"].dim, sharding.tensors["second.weight"].dim) == (0, 1)


class Residual(nn.Module):
    """x + linear(x), between two layers that can be sharded."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.lone = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 16)

    def forward(self, x):
        x = self.second(F.gelu(self.first(x)))
        return (x + self.lone(x)).square().mean()


def test_a_lone_layer_on_the_residual_stream_stays_whole():
    sharding, _ = check(Residual(), x=torch.randn(2, 4, 16, dtype=torch.float64))
    assert sharding.tensors["lone.weight"].dim is None
    assert "replicated value of the same size" in sharding.reasons["lone.weight"]


class Uneven(nn.Module):
    """A hidden width that two ranks would have to pad, behind an activation that is not 0 at 0."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 91), nn.Linear(91, 16)

    def forward(self, x):
        return self.second(self.first(x).sigmoid()).square().mean()


def test_padding_that_is_not_zero_is_replaced_before_it_is_summed_over():
    sharding, programs = check(Uneven(), x=torch.randn(2, 4, 16, dtype=torch.float64))
    assert sharding.tensors["first.weight"].padded
    assert [node.args[3] for node in programs[0].graph.nodes if node.target is local.fill] == [0]


class Beside(Uneven):
    """A layer that can be sharded, and a function of a lone weight."""

    def __init__(self, op):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.lone, self.op = nn.Parameter(torch.ones(8, 8)), op

    def forward(self, x):
        return super().forward(x) + self.op(self.lone).square().mean()


TWICE = {
    "transposed": lambda w: w @ w.T,
    "as it is": lambda w: w @ w,
    "einsum": lambda w: torch.einsum("oi,pi->op", w, w),
}


@pytest.mark.parametrize("op", TWICE.values(), ids=TWICE)
def test_a_product_of_a_weight_with_itself(op):
    """Dividing it for one operand divides the other as well."""
    sharding, _ = check(Beside(op), x=torch.randn(2, 4, 16, dtype=torch.float64))
    assert "reads one weight in two ways" in sharding.reasons["lone"]
    assert sharding.tensors["first.weight"].dim == 0
