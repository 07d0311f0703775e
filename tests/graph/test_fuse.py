"""Fusion: which pieces are found in which model, that nothing else changes, and what must be left
alone.
"""

import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from packaging.version import parse

from megatron_merak import ops
from megatron_merak.config.fp8 import Fp8
from megatron_merak.errors import PlanError
from megatron_merak.graph.fusion.fp8 import fp8_weights
from megatron_merak.graph.fusion.fuse import fuse
from megatron_merak.graph.measure import measure
from megatron_merak.graph.more_flops import product_flops
from megatron_merak.graph.partition.cut import cut
from megatron_merak.ops import FourBit
from tests.graph.fused import ATTENTION, CAUSAL, assert_errs_alike, aten, mean, pieces
from tests.graph.lockstep import part
from tests.graph.sketch import Sketch
from tests.graph.stages import Family, Stages, unequal, worst
from tests.graph.tiny import gradients
from tests.ranks import run_ranks

LOSS, NORM, LAYER_NORM = "output layer with loss", "rms norm", "layer norm"


PAIR, SHARED = "gate and up as one", "linears of one input"
HEADS = "query, key and value as one"


# Two layers each. gemma2 caps scores and logits, bloom adds alibi in its product, t5 learns its
# position bias and has two attentions to the encoder's output; the output layers of bert and gptj
# have a bias; mistral, phi3 slide a window. gptj multiplies by an explicit mask up to transformers
# 5.23 and calls an attention function from 5.24.
GPTJ = CAUSAL if parse(transformers.__version__) >= parse("5.24") else ATTENTION


COUNTS = {
    "llama": {NORM: 5, "rotary": 4, CAUSAL: 2, "gated silu": 2, LOSS: 1, PAIR: 2, HEADS: 2},
    "qwen3": {NORM: 9, "rotary": 4, CAUSAL: 2, "gated silu": 2, LOSS: 1, PAIR: 2, SHARED: 2},
    "gemma2": {NORM: 9, "rotary": 4, "gated gelu_tanh": 2, PAIR: 2, SHARED: 2},
    "gpt2": {LAYER_NORM: 5, CAUSAL: 2, "gelu tanh": 2, "bias gelu": 2, LOSS: 1},
    "mistral": {NORM: 5, "rotary": 4, ATTENTION: 2, "gated silu": 2, LOSS: 1, PAIR: 2, HEADS: 2},
    "phi3": {NORM: 5, "rotary": 4, ATTENTION: 2, "swiglu": 2, LOSS: 1},
    "gpt_neox": {LAYER_NORM: 5, "partial rotary": 4, CAUSAL: 2, "bias gelu": 2, LOSS: 1},
    "gptj": {
        LAYER_NORM: 3,
        "partial rotary": 4,
        GPTJ: 2,
        "gelu tanh": 2,
        "bias gelu": 2,
        SHARED: 2,
    },
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


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "mixtral", "t5"])
def test_recomputed_activations(name):
    """One in each of two layers; T5's is no activation that is known, so asking for it is
    an error.
    """
    family = Family(name)
    if name == "t5":
        with pytest.raises(
            PlanError, match="--recompute-granularity selective .* no linear layer behind an activ"
        ):
            measure(
                family.captured,
                cut(family.captured),
                family.sharding,
                1,
                recompute_activations=True,
            )
    counts = fuse(family.rewritten.graph, recompute_activations=True)
    assert counts["recomputed activation"] == (0 if name == "t5" else 2), dict(counts)
    plain = Family(name)
    fuse(plain.rewritten.graph)
    (loss, grads), (again, found) = (
        Stages(plain, 2).step(plain.batch),
        Stages(family, 2).step(family.batch),
    )
    assert torch.equal(loss, again) and not unequal(found, grads)


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_what_reads_matrices_alone_leaves_weights_in_4_bits(name, monkeypatch):
    """But for those that a product reads as before, without its bias."""
    monkeypatch.setattr("megatron_merak.graph.fusion.fuse.to_four_bit", lambda graph, weights: 0)
    family = Family(name)
    packed = [
        weight
        for weight, shape in family.captured.shapes.items()
        if len(shape) == 2 and not any(each in weight for each in ("embed_tokens", "embed_in"))
    ]
    how = FourBit("nf4", block=64, rows=32, columns=64, dtype="float32", nested=False)
    counts = fuse(
        family.rewritten.graph,
        recompute_activations=True,
        four_bit=dict.fromkeys(packed, how),
    )
    assert counts == Counter(COUNTS[name]) - Counter({LOSS: 1})


def test_products_with_weights_in_4_bits_have_the_flops_of_matrices():
    pytest.importorskip("bitsandbytes")
    work = []
    for packs in (False, True):
        family = Family("llama")
        formats = {
            name: FourBit("nf4", 32, *shape, dtype="float32", nested=False)
            for name, shape in family.captured.shapes.items()
            if packs and "_proj" in name
        }
        fuse(family.rewritten.graph, four_bit=formats)
        found = [product_flops(node) for node in family.rewritten.graph.nodes]
        work.append([flops for flops in found if any(flops)])
    of_matrices, of_packed = work
    assert of_packed == of_matrices and of_matrices


def test_layers_of_one_input_in_fp8_are_no_views_of_one_product():
    """Their results in bert are what attention keeps."""
    family = Family("bert")
    how = Fp8("hybrid")
    counts = fuse(family.rewritten.graph, fp8=fp8_weights(family.captured, family.model, how))
    assert counts["linear layers in fp8"] == 2 * 6
    groups = family.rewritten.graph.find_nodes(op="call_function", target=ops.fp8_linears)
    assert [len(node.args) for node in groups] == [3, 3]
    assert [node.kwargs["form"] for node in groups] == ["hybrid"] * 2


GROUPED = "rows with the weights of experts"
ROWS = ("inverse of an order", "rows in order", "rows by expert", "sums of rows")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "mixtral",
            {NORM: 5, "rotary": 4, ATTENTION: 2, "swiglu": 2, LOSS: 1, HEADS: 2}
            | dict.fromkeys(("weighted swiglu", *ROWS), 2)
            | {GROUPED: 4},
        ),
        (
            "gpt_oss",
            {NORM: 5, "rotary": 4, LOSS: 1, SHARED: 2} | dict.fromkeys(ROWS, 2) | {GROUPED: 4},
        ),
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


@pytest.mark.parametrize("name", ["gpt2", "bert", "phi3", "gpt_neox"])
def test_what_does_not_narrow_is_exact_in_double_precision(name):
    family = Family(name, dtype=torch.float64)
    counts = fuse(family.rewritten.graph)
    assert counts and NORM not in counts and LOSS not in counts, (
        "they would be more precise than the model"
    )
    loss, grads = gradients(family.model, family.batch)
    found_loss, found = Stages(family, 2).step(family.batch)
    differ = unequal(found, grads)
    assert abs(found_loss - loss) < 1e-12 and worst(differ) < 1e-10, differ


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_half_precision(name):
    """The same pieces behind the conversions that half precision brings; no less precise than the
    eager model.
    """
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
        dropout = (
            {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1} if name == "gpt2" else {}
        )
        family = Family(name, rank, world_size, **dropout)
        loss, grads = gradients(family.model, family.batch)
        counts = fuse(family.rewritten.graph, chunk)
        found_loss, shards = Stages(family, 2, True, dist.group.WORLD).step(family.batch)
        found[name, chunk] = float(found_loss), dict(counts)
        if dropout:
            continue
        wanted = {
            name: part(g, family.sharding.tensors[name], rank, world_size)
            for name, g in grads.items()
        }
        assert abs(found_loss - loss) < 1e-5 and worst(unequal(shards, wanted)) < 1e-4
    return found


def test_pieces_of_sharded_work():
    first, second = run_ranks(two_ranks, 2, timeout=110)
    assert first == second
    for name in ("llama", "phi3"):
        others = {kind: n for kind, n in COUNTS[name].items() if kind != LOSS}
        assert first[name, 0][1] == others | {"loss in place of logits": 1}
    assert first["llama", 5][1] == COUNTS["llama"]
    assert first["gpt2", 0][1] == {
        LAYER_NORM: 5,
        CAUSAL: 2,
        "gelu tanh": 2,
        "bias gelu": 2,
        "bias dropout add": 4,
        "loss in place of logits": 1,
    }


def cross_entropy(module, x, labels, **options):
    return F.cross_entropy(module.head(x).view(-1, 6), labels.view(-1), **options)


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
    assert pieces(lambda m, x, y: cross_entropy(m, x, y, **options), None, labels, seen, chunk) == {
        LOSS: 1
    }
    (node,) = seen[0].find_nodes(op="call_function", target=ops.linear_cross_entropy)
    assert node.kwargs.get("chunk", 0) == chunk


def test_loss_over_the_items_of_a_whole_batch():
    assert pieces(
        lambda m, x, y: cross_entropy(m, x, y, reduction="sum") / 17.0, labels=IGNORED
    ) == {LOSS: 1}


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x, y: cross_entropy(m, x, y, label_smoothing=0.1),
        lambda m, x, y: cross_entropy(m, x, y, weight=torch.arange(6.0)),
        lambda m, x, y: F.cross_entropy(torch.tanh(m.head(x)).view(-1, 6), y.view(-1)),
        lambda m, x, y: (lambda z: F.cross_entropy(z.view(-1, 6), y.view(-1)) + z.mean())(
            m.head(x)
        ),
        lambda m, x, y: cross_entropy(m, x, (x.sum(-1) > 0).long()),
        lambda m, x, y: F.cross_entropy((x @ (2 * m.head.weight).T).view(-1, 6), y.view(-1)),
    ],
    ids=[
        "smoothing",
        "weights of classes",
        "capped logits",
        "logits read twice",
        "labels computed",
        "weight computed",
    ],
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
        lambda m, x, y: mean(
            m, m.weight * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5)), y
        ),
        lambda m, x, y: mean(
            m, m.weight * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True).abs() + 1e-5)), y
        ),
        lambda m, x, y: (lambda z: mean(m, m.weight * z, y) + z.mean())(rms(x)),
        lambda m, x, y: mean(
            m, m.weight * (m.table.weight[:1] * torch.rsqrt(x.pow(2).mean(-1, True) + 1.0)), y
        ),
        lambda m, x, y: mean(
            m, m.weight * (x * torch.rsqrt(x.pow(2).mean(-1, True) + x[..., :1].abs() + 1)), y
        ),
        lambda m, x, y: mean(
            m, m.weight * (x * torch.rsqrt(torch.add(x.pow(2).mean(-1, True), 0.1, alpha=3))), y
        ),
    ],
    ids=[
        "no weight",
        "other dimension",
        "other power",
        "read in between",
        "other value",
        "eps computed",
        "eps scaled",
    ],
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


@pytest.mark.parametrize(
    ("body", "counts"),
    [
        (lambda m, x, y: mean(m, F.silu(x) * m.weight * 1.0, y), {}),
        (lambda m, x, y: mean(m, F.silu(x) * x.tanh(), y), {"gated silu": 1}),
        (lambda m, x, y: mean(m, x.tanh() * F.gelu(x), y), {"gated gelu": 1}),
        (
            lambda m, x, y: mean(m, x.tanh() * F.gelu(x, approximate="tanh"), y),
            {"gated gelu_tanh": 1},
        ),
        (
            lambda m, x, y: mean(
                m, (lambda g, u: F.silu(g) * u)(*torch.cat((x, x.tanh()), -1).chunk(2, -1)), y
            ),
            {"swiglu": 1},
        ),
        (
            lambda m, x, y: mean(
                m, (lambda g, u: g * F.silu(u))(*torch.cat((x, x.tanh()), -1).chunk(2, -1)), y
            ),
            {"gated silu": 1},
        ),
        (
            lambda m, x, y: mean(
                m, 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), y
            ),
            {"gelu tanh": 1},
        ),
        (
            lambda m, x, y: mean(
                m, 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))), y
            ),
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
    assert pieces(lambda m, x, y: mean(m, body(m, x), y), seen=seen) == (
        {BIAS_GELU: count} if count else {}
    )
    assert not count or not any(node.target is aten.addmm.default for node in seen[0].nodes)


@pytest.mark.parametrize(
    ("body", "fused"),
    [
        (
            lambda m, x: F.layer_norm(x + x.tanh(), (8,), m.weight, m.weight),
            {LAYER_NORM: 1, "add layer norm": 1},
        ),
        (lambda m, x: m.weight * rms(x + x.tanh()), {NORM: 1, "add rms norm": 1}),
        (lambda m, x: m.weight * rms(torch.add(x, x.tanh(), alpha=2)), {NORM: 1}),
        (lambda m, x: m.weight * rms(x + m.weight), {NORM: 1}),
        (lambda m, x: m.weight * rms(x + 1.0), {NORM: 1}),
        (
            lambda m, x: (lambda z: m.weight * rms(z) + z)(x + x.tanh()),
            {NORM: 1, "add rms norm": 1},
        ),
        (lambda m, x: (lambda z: z.sin() + m.weight * rms(z))(x + x.tanh()), {NORM: 1}),
    ],
    ids=[
        "layer norm",
        "rms norm",
        "scaled",
        "of a vector",
        "of a number",
        "read later",
        "read before",
    ],
)
def test_norms_of_sums(body, fused):
    assert pieces(lambda m, x, y: mean(m, body(m, x), y)) == fused


def test_nothing_is_fused_across_units():
    family = Family("llama")
    for node in family.rewritten.graph.nodes:
        if node.name.startswith("rsqrt"):
            node.meta["unit"] = -1
    assert fuse(family.rewritten.graph) == {k: n for k, n in COUNTS["llama"].items() if k != NORM}


SUMS = {"llama": "add rms norm", "qwen3": "add rms norm", "gpt2": "add layer norm"}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", SUMS)
def test_a_unit_may_begin_with_the_sum_that_ends_the_one_before(name, stages):
    """Both sums of each of two layers, but where a stage ends; nothing changes by a bit."""
    apart, family = Family(name), Family(name)
    fuse(apart.rewritten.graph)
    ends = {units.start for units in family.ranges(stages)}
    within = [unit for unit in range(family.units) if unit not in ends]
    counts = fuse(family.rewritten.graph, continued=within)
    assert counts[SUMS[name]] == 4 - (stages - 1)
    loss, grads = Stages(apart, stages).step(apart.batch)
    found_loss, found = Stages(family, stages).step(family.batch)
    assert torch.equal(found_loss, loss) and not unequal(found, grads)


@pytest.mark.parametrize(
    ("what", "continued", "fused"),
    [("", [1], 1), ("", [], 0), ("read before", [1], 0), ("a parameter", [1], 0)],
)
def test_a_sum_stays_where_its_parts_cannot_pass(what, continued, fused):
    s = Sketch()
    x, w = s.input("x"), s.weight("w")
    first = s.call(aten.mul.Tensor, x, w, unit=0)
    other = s.call(aten.tanh.default, first, unit=0)
    if what == "a parameter":
        other = s.weight("v", 2, 4)
    total = s.call(aten.add.Tensor, first, other, unit=0)
    if what == "read before":
        s.call(aten.sin.default, total, unit=0)
    normed = s.call(aten.rms_norm.default, total, [4], w, 1e-5, unit=1)
    graph = s.done(s.call(aten.add.Tensor, normed, total, unit=1)).graph
    assert fuse(graph, continued=continued)["add rms norm"] == fused


def test_tables_are_halved_before_any_unit_runs():
    family = Family("qwen3")
    fuse(family.rewritten.graph)
    turned = [node for node in family.rewritten.graph.nodes if node.target is ops.rotary_heads]
    assert len({node.args[1:] for node in turned}) == 2 and len(turned) == 4, (
        "query and key of a layer share them"
    )
    assert all(table.meta["unit"] is None for table in turned[0].args[1:])
    assert isinstance(fuse(family.rewritten.graph), Counter) and not fuse(family.rewritten.graph)
