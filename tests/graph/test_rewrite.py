"""A rewritten model on all its ranks against the whole one: the loss and every gradient, random
weights.
"""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._ops import OpOverload
from torch.fx.node import map_aggregate, map_arg

from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.ir.kinds import NodeKind, kind
from megatron_merak.graph.ir.marks import copy_in, reduce_sum, stack
from megatron_merak.graph.ir.nodes import is_random
from megatron_merak.graph.lowering.rewrite import rewrite
from megatron_merak.graph.partition.cut import cut
from megatron_merak.graph.sharding import local
from megatron_merak.graph.sharding.shard import TensorRules, shard
from megatron_merak.segment import LayerAxis
from tests.graph import lockstep
from tests.graph.tiny import FAMILIES, gradients, randomise, tiny
from tests.ranks import run_ranks

FULL = "llama gpt2 bloom gemma2 qwen3 mixtral gpt_oss phi3 falcon olmo2 mamba bert t5 bart".split()


def check(name, tp, rules="", **overrides):
    """The family's (sharding, programs) for ``tp`` ranks, after comparing them with the eager
    model.
    """
    real, _, batch = tiny(name, **overrides)
    model = randomise(real())
    captured = capture(model, batch)
    sharding = shard(captured, tp, TensorRules.parse(rules))
    loss, grads = gradients(model, batch)
    difference, worst, where, programs = lockstep.compare(
        captured, sharding, model, batch, loss, grads
    )
    assert difference <= 1e-5 and worst <= 1e-4, (difference, where, worst)
    return sharding, programs


def trained(model, batch):
    """(loss, gradients) of any module as it is."""
    loss = model(**batch)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def marks(program):
    return Counter(
        node.target for node in program.graph.nodes if node.target in (copy_in, reduce_sum, stack)
    )


@pytest.mark.parametrize("name", FULL)
def test_loss_and_every_gradient(name):
    sharding, _ = check(name, 2)
    assert sharding.share() <= 0.55


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "phimoe"])
def test_every_family(name, tp):
    check(name, tp)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_four_ranks_with_a_padded_vocabulary(name):
    check(name, 4, vocab_size=97)


def test_a_layer_costs_two_sums_in_either_direction():
    _, programs = check("llama", 2)
    assert marks(programs[0]) == {reduce_sum: 2 * 2 + 1, copy_in: 2 * 2 + 1, stack: 1}


def test_experts_are_summed_after_their_top_k():
    _, (program, _) = check("mixtral", 2)
    tokens = 2 * 16 * 32
    assert all(
        n.meta["val"].numel() <= tokens
        for n in program.graph.nodes
        if n.target in (copy_in, reduce_sum)
    )


def test_parallel_branches_share_one_sum():
    _, programs = check("gptj", 2, tie_word_embeddings=False)
    assert marks(programs[0])[copy_in] == 2 + 1


def test_a_single_key_value_head_is_made_whole():
    sharding, (program, _) = check("llama", 2, num_key_value_heads=1)
    assert sharding.tensors["model.layers.0.self_attn.q_proj.weight"].dim == 0
    sizes = (32, 8, 8)

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, sum(sizes)), nn.Linear(32, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).split(sizes, -1)
            q, k, v = (h.view(2, 4, -1, 8).transpose(1, 2) for h in (q, k, v))
            h = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            return self.out(h.transpose(1, 2).flatten(2)).square().mean()

    torch.manual_seed(0)
    model, batch = Fused().double(), {"x": torch.randn(2, 4, 16, dtype=torch.float64)}
    captured = capture(model, batch)
    sharding = shard(captured, 2)
    loss, grads = trained(model, batch)
    difference, worst, where, _ = lockstep.compare(captured, sharding, model, batch, loss, grads)
    assert difference <= 1e-12 and worst <= 1e-12, (where, worst)
    assert sharding.tensors["qkv.weight"].blocks == sizes
    assert "a small piece of its output is all-gathered" in sharding.reasons["qkv.weight"]


def test_dropout_in_sharded_work_is_told_from_that_on_whole_values():
    real, _, batch = tiny("gpt2", resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1)
    captured = capture(real(), batch)
    program = rewrite(captured, cut(captured), shard(captured, 2), 0, 2)
    random = [node for node in program.graph.nodes if is_random(node)]
    kinds = {str(node.target): kind(node, LayerAxis.TP) for node in random}
    assert kinds == {
        "aten.dropout.default": NodeKind.FULL,
        "aten.scaled_dot_product_attention.default": NodeKind.SHARDS,
    }


def test_norms_inside_sharded_work_are_partial():
    _, (program, _) = check("qwen3", 2)
    assert [name.split(".")[-2] for name in program.partial] == ["q_norm", "k_norm"] * 2


def test_a_rule_makes_a_weight_whole_and_the_result_stays_right():
    sharding, (program, _) = check(
        "llama", 2, rules="*.o_proj.weight=replicate; *.up_proj.weight=row"
    )
    assert sharding.tensors["model.layers.0.self_attn.o_proj.weight"].dim is None
    assert "model.layers.0.self_attn.o_proj.weight" in program.partial


def test_nodes_say_where_they_belong():
    _, empty, batch = tiny("llama")
    captured = capture(empty(), batch)
    chain = cut(captured)
    program = rewrite(captured, chain, shard(captured, 2), 0, 2)
    for node in program.graph.nodes:
        if node.op != "output":
            assert {"val", "unit"} <= set(node.meta), node
        if (
            node.op == "call_function"
            and node.target not in (reduce_sum, stack)
            and not kind(node, LayerAxis.TP)
        ):
            assert not any(kind(x, LayerAxis.TP) for x in node.all_input_nodes), node
    units = [node.meta["unit"] for node in program.graph.nodes if node.meta.get("unit") is not None]
    assert sorted(set(units)) == list(range(len(chain.units)))


def test_one_rank_computes_the_captured_graph():
    _, empty, batch = tiny("gpt2")
    captured = capture(empty(), batch)
    program = rewrite(captured, cut(captured), shard(captured, 1), 0, 1)
    targets = [node.target for node in captured.module.graph.nodes]
    assert [node.target for node in program.graph.nodes] == targets and not program.partial


@pytest.mark.parametrize("vocabulary", [96, 97])
def test_logits_are_made_whole(vocabulary):
    real, _, batch = tiny("llama", vocab_size=vocabulary)
    model = randomise(real())
    captured = capture(model, batch, outputs=("loss", "logits"))
    sharding = shard(captured, 2)
    programs = [rewrite(captured, cut(captured), sharding, rank, 2) for rank in range(2)]
    assert programs[0].names == ("loss", "logits")
    held = [
        {
            n: lockstep.part(model.get_parameter(n).detach(), t, rank, 2)
            for n, t in sharding.tensors.items()
        }
        for rank in range(2)
    ]
    for _, logits in lockstep.run(programs, held, batch):
        assert (
            torch.allclose(logits, model(**batch).logits, atol=1e-6)
            and logits.shape[-1] == vocabulary
        )


class Head(nn.Module):
    """An embedding, a tied or biased output layer, and any loss."""

    def __init__(self, loss, vocabulary=67, tied=False):
        super().__init__()
        self.embedding, self.output = (
            nn.Embedding(vocabulary, 16, padding_idx=3),
            nn.Linear(16, vocabulary),
        )
        self.loss = loss
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, ids, labels):
        return self.loss(self.output(self.embedding(ids).tanh()), labels)


def shifted(logits, labels):
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(
        logits.float().view(-1, 67).to(logits.dtype), labels.view(-1), ignore_index=-100
    )


def by_hand(logits, labels, maximum):
    total = (logits - maximum).exp().sum(-1, keepdim=True).log() + maximum
    return (total - logits.gather(-1, labels.unsqueeze(-1))).mean()


LOSSES = {
    "shifted": shifted,
    "sliced": lambda x, y: F.cross_entropy(x[:, :-1].reshape(-1, 67), y[:, 1:].reshape(-1)),
    "sum": lambda x, y: F.cross_entropy(x.view(-1, 67), y.view(-1), reduction="sum") / 5.0,
    "none": lambda x, y: (
        F.cross_entropy(x.view(-1, 67), y.view(-1), reduction="none").square().mean()
    ),
    "smoothing": lambda x, y: F.cross_entropy(x.view(-1, 67), y.view(-1), label_smoothing=0.1),
    "ignored": lambda x, y: F.cross_entropy(x.view(-1, 67), y.view(-1), ignore_index=5),
    "capped": lambda x, y: F.cross_entropy((3 * torch.tanh(x / 3) * 0.5).view(-1, 67), y.view(-1)),
    "classes second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "log softmax": lambda x, y: -x.log_softmax(-1).gather(-1, y[..., None]).mean(),
    "log softmax of rows": lambda x, y: (
        -F.log_softmax(x.view(-1, 67), 1)[torch.arange(10), y.view(-1) - 67].mean()
    ),
    "nll": lambda x, y: F.nll_loss(
        F.log_softmax(x.transpose(1, 2), 1), y, ignore_index=5, reduction="sum"
    ),
    "logsumexp": lambda x, y: (x.logsumexp(-1) - x.gather(-1, y[..., None])[..., 0]).mean(),
    "amax": lambda x, y: by_hand(x, y, x.amax(-1, keepdim=True)),
    "amax, detached": lambda x, y: by_hand(x, y, x.amax(-1, keepdim=True).detach()),
    "max": lambda x, y: by_hand(x, y, x.max(-1, keepdim=True)[0]),
    "ties": lambda x, y: (x.clamp(max=0.2).amax(-1) * x.clamp(max=0.1).max(-1)[0]).mean(),
    "softmax": lambda x, y: -(x.softmax(-1) + 1e-3).log().gather(-1, y[..., None]).mean(),
    "smoothed by hand": lambda x, y: (
        -(x.log_softmax(-1).gather(-1, y[..., None]) + x.log_softmax(-1).mean(-1, True)).sum()
    ),
    "one hot": lambda x, y: -(F.one_hot(y, 67) * x.log_softmax(-1)).sum(-1).mean(),
    "accuracy beside": lambda x, y: (
        F.cross_entropy(x.transpose(1, 2), y) + (x.argmax(-1) == y).double().mean()
    ),
}


def check_head(head):
    torch.manual_seed(0)
    head = head.double()
    with torch.no_grad():
        for p in head.parameters():
            p.normal_(std=0.3)
    ids = torch.tensor([[1, 66, 3, 5, 40], [65, 33, 34, 3, 0]])
    batch = {"ids": ids, "labels": ids.roll(1, 0)}
    captured = capture(head, batch)
    sharding = shard(captured, 4)
    loss, grads = trained(head, batch)
    difference, worst, where, _ = lockstep.compare(captured, sharding, head, batch, loss, grads)
    assert difference <= 1e-12 and worst <= 1e-10, (difference, where, worst)
    return sharding


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_over_a_padded_vocabulary(loss, tied):
    sharding = check_head(Head(loss, tied=tied))
    assert {t.padded for t in sharding.tensors.values()} == {68}


def test_a_loss_that_weights_the_classes_keeps_the_output_layer_whole():
    weights = torch.linspace(0.5, 2, 67).double()
    sharding = check_head(
        Head(lambda x, y: F.cross_entropy(x.view(-1, 67), y.view(-1), weight=weights))
    )
    assert sharding.tensors["output.weight"].dim is None
    assert "weights the classes" in sharding.reasons["output.weight"]


class Both(nn.Module):
    """One scale, read by sharded work and by work that every rank does."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = self.first(x).view(-1, 4, 4).tanh() * self.scale
        return (self.second(h.flatten(1)) * self.scale).square().mean()


def test_a_parameter_read_in_both_ways_counts_once():
    torch.manual_seed(0)
    model = Both().double()
    batch = {"x": torch.randn(3, 8, dtype=torch.float64)}
    with torch.no_grad():
        model.scale.copy_(torch.tensor([0.3, -1.0, 2.0, 0.7]))
    captured = capture(model, batch)
    loss, grads = trained(model, batch)
    sharding = shard(captured, 2)
    difference, worst, where, programs = lockstep.compare(
        captured, sharding, model, batch, loss, grads
    )
    assert difference <= 1e-12 and worst <= 1e-12, (where, worst)
    assert programs[0].partial == ("scale",)
    assert any(node.target is local.grad_on_rank_0 for node in programs[0].graph.nodes)


class BothTwice(Both):
    """The same in two layers, which are units of their own."""

    def forward(self, x):
        for _ in range(2):
            h = self.first(x).view(-1, 4, 4).tanh() * self.scale
            x = x + (self.second(h.flatten(1)) * self.scale).repeat(1, 2)
        return x.square().mean()


def test_such_a_parameter_does_not_travel_from_unit_to_unit():
    model, batch = BothTwice(), {"x": torch.randn(3, 8)}
    captured = capture(model, batch)
    chain = cut(captured)
    program = rewrite(captured, chain, shard(captured, 2), 0, 2)
    owned = [node for node in program.graph.nodes if node.target is local.grad_on_rank_0]
    assert len(owned) == 2 and len(chain.units) > 2
    assert all(user.meta["unit"] == node.meta["unit"] for node in owned for user in node.users)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, grad):
        return grad[dist.get_rank()]


MARKS = {copy_in: _Copy.apply, reduce_sum: _Sum.apply, stack: _Stack.apply}


@dataclass(frozen=True)
class Ref:
    """A node, in a program that travels to another process."""

    name: str


def portable(program):
    """(name, kind, target, args, kwargs) per node; operators by name, the marks as they are."""

    def target(node):
        return str(node.target) if isinstance(node.target, OpOverload) else node.target

    def refs(value):
        return map_arg(value, lambda x: Ref(x.name))

    return [(n.name, n.op, target(n), refs(n.args), refs(n.kwargs)) for n in program.graph.nodes]


def _operator(target):
    _, packet, overload = target.split(".") if isinstance(target, str) else ("", "", "")
    return (
        getattr(getattr(torch.ops.aten, packet), overload) if packet else MARKS.get(target, target)
    )


def _step(rank, world_size, programs, parameters, constants, batch, partial):
    """A rank's (loss, gradients), collectives by gloo."""
    held = {name: value.requires_grad_() for name, value in parameters[rank].items()}
    given = {**constants, **held, **batch}
    values = {}
    for name, op, target, args, kwargs in programs[rank]:
        args, kwargs = map_aggregate(
            (args, kwargs), lambda x: values[x.name] if isinstance(x, Ref) else x
        )
        if op == "output":
            args[0][0].backward()
            break
        values[name] = (
            given[target] if op != "call_function" else _operator(target)(*args, **kwargs)
        )
    grads = {name: value.grad for name, value in held.items()}
    for name in partial:
        dist.all_reduce(grads[name])
    return args[0][0].item(), grads


def test_processes_agree_with_the_model():
    real, _, batch = tiny("gpt2", vocab_size=97)
    model = randomise(real())
    captured = capture(model, batch)
    sharding = shard(captured, 2)
    loss, grads = gradients(model, batch)
    programs = [rewrite(captured, cut(captured), sharding, rank, 2) for rank in range(2)]
    parts = [
        {
            n: lockstep.part(model.get_parameter(n).detach(), t, rank, 2)
            for n, t in sharding.tensors.items()
        }
        for rank in range(2)
    ]
    sent = [portable(program) for program in programs]
    results = run_ranks(
        _step, 2, sent, parts, dict(programs[0].constants), batch, programs[0].partial
    )
    for rank, (got, got_grads) in enumerate(results):
        assert abs(got - loss.item()) <= 1e-5
        for name, tensor in sharding.tensors.items():
            expected = lockstep.part(grads[name], tensor, rank, 2)
            assert (got_grads[name] - expected).abs().max() <= 1e-4 * grads[name].abs().max(), name
