"""Fusion: which pieces are found in which model, that nothing else changes, and what must be left alone."""

import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from packaging.version import parse
from torch import nn

from megatron_merak import ops
from megatron_merak.errors import PlanError
from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.fusion.fuse import fuse
from megatron_merak.graph.lowering.rewrite import rewrite
from megatron_merak.graph.measure import measure
from megatron_merak.graph.partition.cut import cut
from megatron_merak.graph.sharding.shard import shard
from tests.graph.lockstep import part
from tests.graph.sketch import Sketch
from tests.graph.stages import Family, Stages, unequal, worst
from tests.graph.tiny import gradients
from tests.ranks import run_ranks

aten = torch.ops.aten
LOSS, NORM, LAYER_NORM = "output layer with loss", "rms norm", "layer norm"
CAUSAL, ATTENTION = "causal attention", "attention"
PAIR, SHARED = "gate and up as one", "linears of one input"

# Two layers each. gemma2 caps scores and logits, bloom adds alibi in its product, t5 learns its position bias and has
# two attentions to the encoder's output; the output layers of bert and gptj have a bias; mistral, phi3 slide a window.
# gptj multiplies by an explicit mask up to transformers 5.23 and calls an attention function from 5.24.
GPTJ = CAUSAL if parse(transformers.__version__) >= parse("5.24") else ATTENTION
COUNTS = {
    "llama": {NORM: 5, "rotary": 4, CAUSAL: 2, "gated silu": 2, LOSS: 1, PAIR: 2, SHARED: 2},
    "qwen3": {NORM: 9, "rotary": 4, CAUSAL: 2, "gated silu": 2, LOSS: 1, PAIR: 2, SHARED: 2},
    "gemma2": {NORM: 9, "rotary": 4, "gated gelu_tanh": 2, PAIR: 2, SHARED: 2},
    "gpt2": {LAYER_NORM: 5, CAUSAL: 2, "gelu tanh": 2, "bias gelu": 2, LOSS: 1},
    "mistral": {NORM: 5, "rotary": 4, ATTENTION: 2, "gated silu": 2, LOSS: 1, PAIR: 2, SHARED: 2},
    "phi3": {NORM: 5, "rotary": 4, ATTENTION: 2, "swiglu": 2, LOSS: 1},
    "gpt_neox": {LAYER_NORM: 5, "partial rotary": 4, CAUSAL: 2, "bias gelu": 2, LOSS: 1},
    "gptj": {LAYER_NORM: 3, "partial rotary": 4, GPTJ: 2, "gelu tanh": 2, "bias gelu": 2, SHARED: 2},
    "bloom": {LAYER_NORM: 6, "gelu tanh": 2, "bias gelu": 2, LOSS: 1},
    "t5": {NORM: 12, ATTENTION: 2, LOSS: 1, SHARED: 6},
    "bert": {LAYER_NORM: 6, "add layer norm": 4, ATTENTION: 2, "bias gelu": 3, SHARED: 2},
}


@pytest.mark.parametrize("name", COUNTS)
def test_what_is_found_and_that_the_model_stays_the_same(name):
    """Against fp64, the fused fp32 model errs like the eager fp32 model does."""
    family, exact = Family(name), Family(name, dtype=torch.float64)
    counts = fuse(family.rewritten.graph)
    assert counts == COUNTS[name], dict(counts)
    loss, grads = gradients(family.model, family.batch)
    _, truth = gradients(exact.model, exact.batch)
    found_loss, found = Stages(family, 2, True).step(family.batch)
    assert abs(found_loss - loss) <= 4e-7 * abs(loss)
    assert_errs_alike(found, grads, truth, 1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "t5"])
def test_recomputed_activations(name):
    """One in each of two layers; T5's is no activation that is known, so asking for it is an error."""
    family = Family(name)
    if name == "t5":
        with pytest.raises(PlanError, match="--recompute-granularity selective .* no linear layer behind an activ"):
            measure(family.captured, cut(family.captured), family.sharding, 1, recompute_activations=True)
    counts = fuse(family.rewritten.graph, recompute_activations=True)
    assert counts["recomputed activation"] == (0 if name == "t5" else 2), dict(counts)
    plain = Family(name)
    fuse(plain.rewritten.graph)
    (loss, grads), (again, found) = Stages(plain, 2).step(plain.batch), Stages(family, 2).step(family.batch)
    assert torch.equal(loss, again) and not unequal(found, grads)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("mixtral", {NORM: 5, "rotary": 4, ATTENTION: 2, "swiglu": 2, LOSS: 1, SHARED: 2}),
        ("gpt_oss", {NORM: 5, "rotary": 4, LOSS: 1, SHARED: 2}),
    ],
)
def test_mixtures_of_experts(name, wanted):
    """Their products exist up to fp32 only."""
    family = Family(name)
    counts = fuse(family.rewritten.graph)
    assert counts == wanted, dict(counts)
    loss, grads = gradients(family.model, family.batch)
    found_loss, found = Stages(family, 2, True).step(family.batch)
    assert abs(found_loss - loss) <= 4e-7 * abs(loss) and worst(unequal(found, grads)) < 1e-5


def assert_errs_alike(found, eager, truth, precision):
    for name, grad in truth.items():
        scale, error = grad.abs().max(), (found[name] - grad).abs().max()
        assert error <= max(3 * (eager[name] - grad).abs().max(), precision * scale, 1e-9), (name, error / scale)


@pytest.mark.parametrize("name", ["gpt2", "bert", "phi3", "gpt_neox"])
def test_what_does_not_narrow_is_exact_in_double_precision(name):
    family = Family(name, dtype=torch.float64)
    counts = fuse(family.rewritten.graph)
    assert counts and NORM not in counts and LOSS not in counts, "they would be more precise than the model"
    loss, grads = gradients(family.model, family.batch)
    found_loss, found = Stages(family, 2).step(family.batch)
    differ = unequal(found, grads)
    assert abs(found_loss - loss) < 1e-12 and worst(differ) < 1e-10, differ


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_half_precision(name):
    """The same pieces behind the conversions that half precision brings; no less precise than the eager model."""
    family, exact = Family(name, dtype=torch.bfloat16), Family(name, dtype=torch.float64)
    counts = fuse(family.rewritten.graph)
    assert counts == COUNTS[name], dict(counts)
    _, grads = gradients(family.model, family.batch)
    loss, truth = gradients(exact.model, exact.batch)
    found_loss, found = Stages(family).step(family.batch)
    assert abs(found_loss - loss) < 5e-3 * loss
    assert_errs_alike(found, grads, truth, 2e-2)


def two_ranks(rank, world_size):
    found = {}
    for name, chunk in (("llama", 0), ("phi3", 0), ("gpt2", 0), ("llama", 5)):
        dropout = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1} if name == "gpt2" else {}
        family = Family(name, rank, world_size, **dropout)
        loss, grads = gradients(family.model, family.batch)
        counts = fuse(family.rewritten.graph, chunk)
        found_loss, shards = Stages(family, 2, True, dist.group.WORLD).step(family.batch)
        found[name, chunk] = float(found_loss), dict(counts)
        if dropout:
            continue
        wanted = {name: part(g, family.sharding.tensors[name], rank, world_size) for name, g in grads.items()}
        assert abs(found_loss - loss) < 1e-5 and worst(unequal(shards, wanted)) < 1e-4
    return found


def test_pieces_of_sharded_work():
    first, second = run_ranks(two_ranks, 2, timeout=110)
    assert first == second
    for name in ("llama", "phi3"):
        assert first[name, 0][1] == {kind: n for kind, n in COUNTS[name].items() if kind != LOSS}
    assert first["llama", 5][1] == COUNTS["llama"]
    assert first["gpt2", 0][1] == {LAYER_NORM: 5, CAUSAL: 2, "gelu tanh": 2, "bias gelu": 2, "bias dropout add": 4}


# ---- pieces on their own ------------------------------------------------------------------------------------------
class Scored(nn.Module):
    """``body`` between an embedding of width 8 and a loss."""

    def __init__(self, body, classes=6):
        super().__init__()
        self.table, self.head = nn.Embedding(classes, 8), nn.Linear(8, classes, bias=False)
        self.weight, self.body = nn.Parameter(torch.rand(8) + 0.5), body

    def forward(self, ids, labels):
        return {"loss": self.body(self, self.table(ids), labels)}


def pieces(body, ids=None, labels=None, seen=None, chunk=0):
    """How often each kind is found in ``body(module, x [2, 4, 8], labels)``, which must keep its loss and gradients.

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
    family.model, family.batch, family.captured, family.rewritten = model, batch, captured, rewritten
    family.units, family.rank, family.tp, family.sharding = len(chain.units), 0, 1, shard(captured, 1)
    found_loss, found = Stages(family).step(batch)
    torch.testing.assert_close(found_loss, loss, equal_nan=True)
    for name, grad in grads.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, equal_nan=True)
    return dict(counts)


def cross_entropy(module, x, labels, **options):
    return F.cross_entropy(module.head(x).view(-1, 6), labels.view(-1), **options)


def mean(module, x, labels):
    return module.head(x).square().mean()


def rms(x, eps=1e-5):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


IGNORED = torch.tensor([[-100, 1, 2, -100], [5, 4, 0, 0]])


@pytest.mark.parametrize(
    ("labels", "options"),
    [
        (None, {}),
        (IGNORED, {}),
        (IGNORED, {"reduction": "sum"}),
        (torch.full((2, 4), -100), {}),
        (torch.full((2, 4), -100), {"reduction": "sum"}),
        (torch.tensor([[3, 1, 2, 3], [5, 4, 0, 0]]), {"ignore_index": 3}),
    ],
)
@pytest.mark.parametrize("chunk", [0, 3])
def test_loss_of_rows_that_count(labels, options, chunk):
    seen = []
    assert pieces(lambda m, x, y: cross_entropy(m, x, y, **options), None, labels, seen, chunk) == {LOSS: 1}
    (node,) = seen[0].find_nodes(op="call_function", target=ops.linear_cross_entropy)
    assert node.kwargs.get("chunk", 0) == chunk


def test_loss_over_the_items_of_a_whole_batch():
    assert pieces(lambda m, x, y: cross_entropy(m, x, y, reduction="sum") / 17.0, labels=IGNORED) == {LOSS: 1}


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x, y: cross_entropy(m, x, y, label_smoothing=0.1),
        lambda m, x, y: cross_entropy(m, x, y, weight=torch.arange(6.0)),
        lambda m, x, y: F.cross_entropy(torch.tanh(m.head(x)).view(-1, 6), y.view(-1)),
        lambda m, x, y: (lambda z: F.cross_entropy(z.view(-1, 6), y.view(-1)) + z.mean())(m.head(x)),
        lambda m, x, y: cross_entropy(m, x, (x.sum(-1) > 0).long()),
        lambda m, x, y: F.cross_entropy((x @ (2 * m.head.weight).T).view(-1, 6), y.view(-1)),
    ],
    ids=["smoothing", "weights of classes", "capped logits", "logits read twice", "labels computed", "weight computed"],
)
def test_other_losses_are_left_alone(body):
    assert pieces(body) == {}


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x, y: mean(m, m.weight * rms(x), y),
        lambda m, x, y: mean(m, rms(x) * (1.0 + m.weight), y),
        lambda m, x, y: mean(m, m.weight * (x * torch.rsqrt((x * x).mean(-1, True) + 0.1)), y),
        lambda m, x, y: mean(m, F.rms_norm(x, (8,), m.weight, 1e-3), y),
        lambda m, x, y: mean(m, F.rms_norm(x, (8,), m.weight), y),
    ],
)
def test_rms_norms(body):
    assert pieces(body) == {NORM: 1}


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x, y: mean(m, x * rms(x), y),
        lambda m, x, y: mean(m, m.weight * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5)), y),
        lambda m, x, y: mean(m, m.weight * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True).abs() + 1e-5)), y),
        lambda m, x, y: (lambda z: mean(m, m.weight * z, y) + z.mean())(rms(x)),
        lambda m, x, y: mean(m, m.weight * (m.table.weight[:1] * torch.rsqrt(x.pow(2).mean(-1, True) + 1.0)), y),
        lambda m, x, y: mean(m, m.weight * (x * torch.rsqrt(x.pow(2).mean(-1, True) + x[..., :1].abs() + 1)), y),
        lambda m, x, y: mean(m, m.weight * (x * torch.rsqrt(torch.add(x.pow(2).mean(-1, True), 0.1, alpha=3))), y),
    ],
    ids=["no weight", "other dimension", "other power", "read in between", "other value", "eps computed", "eps scaled"],
)
def test_what_only_looks_like_a_norm(body):
    assert pieces(body) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_epsilon_of_torch_is_not_guessed_in_half_precision(dtype):
    s = Sketch()
    x, w = s.input("x", dtype), s.weight("w")
    w.meta["val"] = w.meta["val"].to(dtype)
    program = s.done(s.call(aten.rms_norm.default, x, [4], w, unit=0))
    assert fuse(program.graph) == ({} if dtype == torch.bfloat16 else {NORM: 1})


@pytest.mark.parametrize("writes", [False, True])
def test_what_is_written_in_place_is_left_alone(writes):
    """The fused operation would read its input later than the first of those that it replaces."""
    s = Sketch()
    x, w = s.input("x"), s.weight("w")
    y = s.call(aten.mul.Tensor, x, w, unit=0)
    mean = s.call(aten.mean.dim, s.call(aten.pow.Tensor_Scalar, y, 2, unit=0), [-1], True, unit=0)
    scale = s.call(aten.rsqrt.default, s.call(aten.add.Tensor, mean, 1e-5, unit=0), unit=0)
    normed = s.call(aten.mul.Tensor, y, scale, unit=0)
    if writes:
        s.call(aten.zero_.default, y, unit=0)
    program = s.done(s.call(aten.mul.Tensor, normed, w, unit=0))
    assert fuse(program.graph) == ({} if writes else {NORM: 1})


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def angles(width, repeat=True):
    angle = torch.outer(torch.arange(4.0), 0.3 ** torch.arange(width // 2 if repeat else width))
    angle = torch.cat((angle, angle), -1) if repeat else angle
    return angle.cos()[None], angle.sin()[None]


def test_rotary_needs_tables_that_repeat():
    assert pieces(lambda m, x, y: mean(m, rotate(x, *angles(8)), y)) == {"rotary": 1}
    assert pieces(lambda m, x, y: mean(m, rotate(x, *angles(8, repeat=False)), y)) == {}

    def partial(m, x, y):
        return mean(m, torch.cat((rotate(x[..., :4], *angles(4)), x[..., 4:]), -1), y)

    assert pieces(partial) == {"partial rotary": 1}

    def by_halves(m, x, y):
        (a, b), (cos, sin) = x.chunk(2, -1), (t[..., :4] for t in angles(8))
        return mean(m, torch.cat((a * cos - b * sin, b * cos + a * sin), -1), y)

    assert pieces(by_halves) == {"rotary": 1}

    def swapped(m, x, y):
        return mean(m, torch.cat((x[..., 4:], rotate(x[..., :4], *angles(4))), -1), y)

    assert pieces(swapped) == {"rotary": 1}


def rotate_pairs(x, cos, sin):
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


def angles_of_pairs(width, repeat=lambda table: table.repeat_interleave(2, 2)):
    angle = torch.outer(torch.arange(4.0), 0.3 ** torch.arange(width // 2))[None]
    return repeat(angle.cos()), repeat(angle.sin())


def test_interleaved_rotary_needs_tables_that_repeat_pair_by_pair():
    assert pieces(lambda m, x, y: mean(m, rotate_pairs(x, *angles_of_pairs(8)), y)) == {"rotary": 1}

    def partial(m, x, y):
        return mean(m, torch.cat((rotate_pairs(x[..., :4], *angles_of_pairs(4)), x[..., 4:]), -1), y)

    assert pieces(partial) == {"partial rotary": 1}

    def halves(table):
        return torch.cat((table, table), -1)

    def by_position(table):
        return table.repeat_interleave(2, 1)[:, :4].repeat(1, 1, 2)

    for repeat in (halves, by_position):
        assert pieces(lambda m, x, y, r=repeat: mean(m, rotate_pairs(x, *angles_of_pairs(8, r)), y)) == {}

    def unsigned(m, x, y):
        cos, sin = angles_of_pairs(8)
        return mean(m, x * cos + torch.stack((x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin, y)

    assert pieces(unsigned) == {}


def heads(x, count=2):
    return x.view(2, 4, count, -1).transpose(1, 2)


TRIANGLE = torch.ones(4, 4).tril().bool()


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"is_causal": True}, CAUSAL),
        ({"is_causal": True, "scale": 0.7}, CAUSAL),
        ({"scale": 0.7}, ATTENTION),
        ({"attn_mask": TRIANGLE[None, None]}, ATTENTION),
        ({"attn_mask": torch.randn(2, 1, 4, 4)}, ATTENTION),
        ({"attn_mask": TRIANGLE}, None),
    ],
)
def test_attention(options, kind):
    def body(m, x, y):
        out = F.scaled_dot_product_attention(heads(x), heads(x * m.weight), heads(x.tanh()), **options)
        return mean(m, out.transpose(1, 2).reshape(2, 4, 8), y)

    assert pieces(body) == ({kind: 1} if kind else {})


def test_attention_with_a_learned_bias_is_left_alone():
    def body(m, x, y):
        bias = (x @ x.mT)[:, None]
        out = F.scaled_dot_product_attention(heads(x), heads(x * m.weight), heads(x.tanh()), attn_mask=bias)
        return mean(m, out.transpose(1, 2).reshape(2, 4, 8), y)

    assert pieces(body) == {}


def test_attention_that_is_read_head_by_head():
    def body(m, x, y):
        out = F.scaled_dot_product_attention(heads(x), heads(x * m.weight), heads(x.tanh()), is_causal=True)
        return mean(m, out.flip(1).transpose(1, 2).reshape(2, 4, 8), y)

    assert pieces(body) == {CAUSAL: 1}


def shared(x):
    """One key head [2, 1, 4, 4] for two query heads."""
    return heads(x, 1)[:, :, None].expand(2, 1, 2, 4, 4).reshape(2, 2, 4, 4)


@pytest.mark.parametrize("causal", [False, True])
def test_key_heads_of_a_group_are_not_repeated(causal):
    seen = []

    def body(m, x, y):
        out = F.scaled_dot_product_attention(heads(x), shared(x[..., :4]), shared(x[..., 4:]), is_causal=causal)
        return mean(m, out.transpose(1, 2).reshape(2, 4, 8), y)

    assert pieces(body, seen=seen) == {CAUSAL if causal else ATTENTION: 1}
    assert not any(node.target is aten.expand.default for node in seen[0].nodes)


def written_out(m, x, mask=None, scale=lambda scores: scores * 0.5, softmax=torch.softmax):
    scores = scale(heads(x) @ shared(x[..., :4]).transpose(2, 3))
    part = softmax(scores if mask is None else scores + mask, -1)
    return (part @ shared(x[..., 4:])).transpose(1, 2).reshape(2, 4, 8)


BIAS = torch.zeros(1, 1, 4, 4).masked_fill(~TRIANGLE, torch.finfo(torch.float32).min)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 1),
        ({"mask": BIAS}, 1),
        ({"mask": BIAS, "scale": lambda scores: scores / 3.0}, 1),
        ({"mask": BIAS, "scale": lambda scores: scores}, 1),
        ({"softmax": lambda scores, dim: torch.softmax(scores, dim, dtype=torch.float32)}, 1),
        ({"scale": lambda scores: scores.tanh() * 2}, 0),
        ({"scale": lambda scores: scores * scores.detach().amax()}, 0),
        ({"softmax": lambda scores, dim: torch.softmax(scores, 1)}, 0),
        ({"softmax": lambda scores, dim: torch.sigmoid(scores)}, 0),
    ],
)
def test_attention_written_out(options, count):
    assert pieces(lambda m, x, y: mean(m, written_out(m, x, **options), y)) == ({ATTENTION: 1} if count else {})


@pytest.mark.parametrize(
    ("body", "counts"),
    [
        (lambda m, x, y: mean(m, F.silu(x) * m.weight * 1.0, y), {}),
        (lambda m, x, y: mean(m, F.silu(x) * x.tanh(), y), {"gated silu": 1}),
        (lambda m, x, y: mean(m, x.tanh() * F.gelu(x), y), {"gated gelu": 1}),
        (lambda m, x, y: mean(m, x.tanh() * F.gelu(x, approximate="tanh"), y), {"gated gelu_tanh": 1}),
        (
            lambda m, x, y: mean(m, (lambda g, u: F.silu(g) * u)(*torch.cat((x, x.tanh()), -1).chunk(2, -1)), y),
            {"swiglu": 1},
        ),
        (
            lambda m, x, y: mean(m, (lambda g, u: g * F.silu(u))(*torch.cat((x, x.tanh()), -1).chunk(2, -1)), y),
            {"gated silu": 1},
        ),
        (
            lambda m, x, y: mean(m, 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), y),
            {"gelu tanh": 1},
        ),
        (
            lambda m, x, y: mean(m, 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))), y),
            {"gelu tanh": 1},
        ),
        (lambda m, x, y: mean(m, 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3))), y), {}),
    ],
)
def test_activations(body, counts):
    assert pieces(body) == counts


def dense(m, x):
    return F.linear(x, m.weight.diag(), m.weight)


def transposed(m, x, **factors):
    return torch.addmm(m.weight, x.view(-1, 8), m.weight.diag(), **factors).view(2, 4, 8)


BIAS_GELU = "bias gelu"


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (lambda m, x: F.gelu(x + m.weight), 1),
        (lambda m, x: F.gelu(m.weight + x, approximate="tanh"), 1),
        (lambda m, x: F.gelu(dense(m, x)), 1),
        (lambda m, x: F.gelu(transposed(m, x), approximate="tanh"), 1),
        (lambda m, x: F.gelu(transposed(m, x, beta=0.5)), 0),
        (lambda m, x: F.gelu(torch.add(x, m.weight, alpha=2)), 0),
        (lambda m, x: F.gelu(x + x.tanh()), 0),
        (lambda m, x: F.gelu(x + m.weight[:1]), 0),
        (lambda m, x: F.gelu(F.linear(x, m.weight.diag())), 0),
        (lambda m, x: (lambda z: F.gelu(z) + z)(dense(m, x)), 0),
    ],
)
def test_activations_take_the_bias(body, count):
    seen = []
    assert pieces(lambda m, x, y: mean(m, body(m, x), y), seen=seen) == ({BIAS_GELU: count} if count else {})
    assert not count or not any(node.target is aten.addmm.default for node in seen[0].nodes)


@pytest.mark.parametrize(
    ("body", "fused"),
    [
        (lambda m, x: F.layer_norm(x + x.tanh(), (8,), m.weight, m.weight), {LAYER_NORM: 1, "add layer norm": 1}),
        (lambda m, x: m.weight * rms(x + x.tanh()), {NORM: 1, "add rms norm": 1}),
        (lambda m, x: m.weight * rms(torch.add(x, x.tanh(), alpha=2)), {NORM: 1}),
        (lambda m, x: m.weight * rms(x + m.weight), {NORM: 1}),
        (lambda m, x: m.weight * rms(x + 1.0), {NORM: 1}),
        (lambda m, x: (lambda z: m.weight * rms(z) + z)(x + x.tanh()), {NORM: 1}),
    ],
    ids=["layer norm", "rms norm", "scaled", "of a vector", "of a number", "read again"],
)
def test_norms_of_sums(body, fused):
    assert pieces(lambda m, x, y: mean(m, body(m, x), y)) == fused


def test_nothing_is_fused_across_units():
    family = Family("llama")
    for node in family.rewritten.graph.nodes:
        if node.name.startswith("rsqrt"):
            node.meta["unit"] = -1
    assert fuse(family.rewritten.graph) == {k: n for k, n in COUNTS["llama"].items() if k != NORM}


def test_tables_are_halved_before_any_unit_runs():
    family = Family("llama")
    fuse(family.rewritten.graph)
    turned = [node for node in family.rewritten.graph.nodes if node.target is ops.rotary]
    assert len({node.args[1:] for node in turned}) == 2 and len(turned) == 4, "query and key of a layer share them"
    assert all(table.meta["unit"] is None for table in turned[0].args[1:])
    assert isinstance(fuse(family.rewritten.graph), Counter) and not fuse(family.rewritten.graph)
