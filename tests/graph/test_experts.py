"""Captured mixtures whose ranks divide the experts: loss, gradients, what is sent, what is refused."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product as each_of

import pytest
import torch
import torch.nn.functional as F
import transformers
import transformers.integrations.moe  # noqa: F401  (its grouped product)
from torch import nn
from torch.fx import Graph

from megatron_merak.config import ModelConfig
from megatron_merak.errors import ConfigError, PlanError
from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.fusion.fuse import fuse
from megatron_merak.graph.lowering.rewrite import rewrite
from megatron_merak.graph.lowering.routed import RoutedKind, find_routed
from megatron_merak.graph.partition.cut import cut
from megatron_merak.graph.sharding.experts import weight_of
from megatron_merak.graph.sharding.local import (
    copies_for_shards,
    padded_source,
    room_for,
    rows_to_shards,
)
from megatron_merak.graph.sharding.shard import shard
from megatron_merak.models.gpt_module import GPTModule
from tests.graph import lockstep
from tests.graph.tiny import gradients, randomise, tiny

MIXTURES = "mixtral qwen3_moe gpt_oss".split()


class Model:
    """A mixture with its capture, and what each rank runs of it."""

    def __init__(self, name, tp=2, **overrides):
        real, _, batch = tiny(name, **overrides)
        self._capture(real(), batch, tp)

    def _capture(self, model, batch, tp):
        self.model = randomise(model)
        self.batch = batch
        self.captured = capture(self.model, self.batch)
        self.sharding = shard(self.captured, tp, experts=tp)
        self.chain = cut(self.captured)
        self.tp = tp

    def programs(self):
        arguments = (self.captured, self.chain, self.sharding)
        return [rewrite(*arguments, r, self.tp, sequence_parallel=True) for r in range(self.tp)]

    def run(self, programs):
        """The loss and every gradient of each rank."""
        held = lockstep.shards(self.captured, self.sharding, self.model, len(programs))
        divided = {name for name, tensor in self.sharding.tensors.items() if tensor.experts}
        return lockstep.gradients(programs, held, self.batch, tp=self.tp, divided=divided)

    def check(self):
        """Compare the loss and every gradient of all ranks with those of one process."""
        programs = self.programs()
        losses, found = self.run(programs)
        loss, grads = gradients(self.model, self.batch)
        largest = max(float(grad.abs().max()) for grad in grads.values())
        for rank, (own, mine) in enumerate(zip(losses, found, strict=True)):
            assert float(own) == pytest.approx(float(loss), rel=1e-6)
            for name, grad in grads.items():
                tensor = self.sharding.tensors[name]
                expected = lockstep.shard_of(grad, tensor, rank, self.sharding)
                scale = max(float(grad.abs().max()), 1e-4 * largest)
                torch.testing.assert_close(mine[name], expected, rtol=0, atol=1e-5 * scale)
        return programs


class DeepSeek(Model):
    """A DeepSeek-V3, whose tokens are computed by a shared expert too, and chosen by a sigmoid."""

    @staticmethod
    def config():
        return transformers.DeepseekV3Config(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=2,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            use_cache=False,
        )

    def __init__(self, tp=2):
        ids = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(7))
        model = transformers.DeepseekV3ForCausalLM(self.config()).train()
        self._capture(model, {"input_ids": ids, "labels": ids.clone()}, tp)


class Adapted(Model):
    """A mixture with LoRA of its experts, as peft has it: A and B of all experts in one matrix each."""

    def __init__(self, tp=2):
        peft = pytest.importorskip("peft")
        real, _, batch = tiny("qwen3_moe")
        config = peft.LoraConfig(
            r=3,
            lora_alpha=6,
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
        self._capture(peft.get_peft_model(real(), config), batch, tp)


GPT = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=16,
    vocab_size=96,
    swiglu=True,
    disable_bias_linear=True,
    position_embedding_type="rope",
    normalization="RMSNorm",
    num_experts=4,
    moe_ffn_hidden_size=32,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


class Limited(Model):
    """The GPT of flags whose experts have room for half of the rows that are theirs on average."""

    def __init__(self, tp=2, length=16, policy="probs"):
        config = replace(
            GPT,
            seq_length=length,
            moe_expert_capacity_factor=0.5,
            moe_token_drop_policy=policy,
        )
        ids = torch.randint(96, (2, length), generator=torch.Generator().manual_seed(7))
        self._capture(WithLoss(config), {"input_ids": ids, "labels": ids.flip(1)}, tp)


class WithLoss(nn.Module):
    """Returns its loss as models of transformers do."""

    def __init__(self, config):
        super().__init__()
        self.gpt = GPTModule(config)

    def forward(self, input_ids, labels):
        return {"loss": self.gpt(input_ids, labels)}


def marks(program):
    names = (node.target.__name__ for node in program.graph.nodes if node.op == "call_function")
    return Counter(name for name in names if name in ("exchange", "exchange_rows"))


def exchanged(name):
    """The exchanges of a layer that are of something of each row."""
    return 2 if name == "gpt_oss" else 3


@pytest.mark.parametrize("name", MIXTURES)
def test_loss_and_every_gradient(name):
    model = Model(name)
    (program, _) = model.check()
    # a layer exchanges how many rows go where, the rows, and the rows back; SwiGLU's weights, too
    assert marks(program) == {"exchange": 2, "exchange_rows": 2 * exchanged(name)}
    weights = {n for n, t in model.sharding.tensors.items() if "experts" in n and len(t.shape) == 3}
    assert weights and all(model.sharding.tensors[name].dim == 0 for name in weights)


def test_more_ranks_than_experts_of_a_token():
    Model("gpt_oss", tp=4).check()


@pytest.mark.parametrize("favourite", [0, 3])
def test_an_expert_that_gets_all_rows(favourite):
    """The other rank then has none to multiply with, and no gradient but zeros."""
    model = Model("mixtral", num_experts_per_tok=1)
    with torch.no_grad():
        model.model.model.embed_tokens.weight.abs_().add_(5.0)
        for layer in model.model.model.layers:
            layer.post_attention_layernorm.weight.abs_().add_(0.1)
            layer.mlp.gate.weight.zero_()
            layer.mlp.gate.weight[favourite] = 1.0
    model.check()
    _, grads = gradients(model.model, model.batch)
    for name in (name for name in grads if "experts" in name):
        given = [bool(each.any()) for each in grads[name]]
        assert given == [expert == favourite for expert in range(4)]


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_batch_that_ranks_cannot_share_evenly(name):
    """Every rank has all rows then, and picks those of its experts."""
    model = Model(name, length=15)
    (program, _) = model.check()
    assert not marks(program)


def test_adapters_of_experts():
    """A rank has the rows of A of its experts, and columns of B in each of three blocks."""
    model = Adapted()
    held = {n.split(".experts.")[1]: t for n, t in model.sharding.tensors.items() if "experts" in n}
    assert {name: (t.dim, t.blocks) for name, t in held.items()} == {
        "base_layer.base_layer.gate_up_proj": (0, 1),
        "base_layer.base_layer.down_proj": (0, 1),
        "base_layer.lora_A.default.weight": (0, 1),
        "base_layer.lora_B.default.weight": (1, 3),
        "lora_A.default.weight": (0, 1),
        "lora_B.default.weight": (1, 3),
    }
    (program, _) = model.check()
    assert marks(program) == {"exchange": 2, "exchange_rows": 6}


def test_a_plan_that_divides_adapters_otherwise_is_refused_by_name():
    captured = Adapted().captured
    tensors = shard(captured, 1, experts=2).tensors
    again = shard(captured, 1, experts=2, pins=tensors, complete=True)
    assert again.tensors == tensors
    (name, *_) = (name for name, t in tensors.items() if t.experts and t.dim == 1)
    wrong = tensors | {name: replace(tensors[name], dim=0, blocks=1)}
    with pytest.raises(PlanError, match="its experts are along dimension 1, in 3 blocks"):
        shard(captured, 1, experts=2, pins=wrong, complete=True)


class SummedOverExperts(nn.Module):
    """Adds the same matrix, a mean over all experts, to the weight of each."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(96, 16)
        self.weight = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, input_ids):
        x = self.table(input_ids).flatten(0, 1)
        numbers, order = torch.sort(input_ids.flatten() % 4)
        counts = torch.histc(numbers.float(), 4, 0, 3).cumsum(0).to(torch.int32)
        weight = self.weight + self.weight.mean(0)
        y = torch.ops.transformers.grouped_mm_fallback(x[order], weight, counts)
        return {"loss": y[order.argsort()].square().mean()}


@pytest.mark.parametrize("tp", [1, 2])
def test_weights_that_follow_from_those_of_other_experts_are_refused_by_name(tp):
    torch.manual_seed(0)
    captured = capture(SummedOverExperts(), {"input_ids": torch.randint(0, 96, (2, 8))})
    with pytest.raises(PlanError) as caught:
        shard(captured, tp, experts=2)
    assert str(caught.value) == (
        "--expert-model-parallel-size 2: add in the model mixes experts, or combines "
        "their weights with others. Use 1."
    )


@pytest.mark.parametrize(("length", "policy"), [(16, "probs"), (16, "position"), (15, "probs")])
def test_rows_that_experts_have_no_room_for(length, policy):
    """They are neither sent nor multiplied, or of a batch that ranks cannot share, not picked."""
    model = Limited(length=length, policy=policy)
    (routed, _) = find_routed(model.captured.module.graph).values()
    assert routed.drops
    (program, _) = model.check()
    assert marks(program) == ({"exchange": 2, "exchange_rows": 4} if length == 16 else {})


def test_rows_that_shards_of_experts_have_no_room_for():
    model = Limited()
    model.sharding = shard(model.captured, 2)
    model.check()


ROOMY = {name: partial(Model, name) for name in MIXTURES} | {
    "adapters": Adapted,
    "a shared expert": DeepSeek,
    "capacities": Limited,
    "four ranks": partial(Model, "gpt_oss", tp=4),
}


@pytest.mark.parametrize("kind", ROOMY.values(), ids=ROOMY)
def test_room_for_rows_changes_no_bit(kind):
    """Ranks exchange equal numbers of rows. All that is inserted has run on fakes, of which nothing can
    be read, so the host waits for none of these numbers.
    """
    model = kind()
    wanted = model.run(model.programs())
    model.sharding = replace(model.sharding, room=float(model.tp))
    programs = model.programs()
    assert not marks(programs[0])["exchange_rows"]
    assert same(model.run(programs), wanted)


def same(one, other):
    """Whether losses and gradients of all ranks are the same to the bit."""
    for gradients_of_one, gradients_of_other in zip(one[1], other[1], strict=True):
        for name, gradient in gradients_of_one.items():
            assert torch.equal(gradients_of_other[name], gradient), name
    return all(map(torch.equal, one[0], other[0]))


class _Unwritten(torch.autograd.Function):
    """Rows behind the last group as kernels of GPUs may leave them: of a product, and of gradients."""

    @staticmethod
    def forward(ctx, rows, ends, forward):
        ctx.ends, ctx.forward_too = ends, forward
        return _without_values(rows, ends) if forward else rows.view_as(rows)

    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.forward_too else _without_values(grad, ctx.ends), None, None


def _without_values(rows, ends):
    return rows.clone().index_fill_(0, torch.arange(int(ends[-1]), len(rows)), float("nan"))


def unwritten(product, rows, weight, offs):
    read = _Unwritten.apply(rows, offs, False)
    return _Unwritten.apply(product(read, weight, offs=offs), offs, True)


def test_nothing_comes_of_what_is_behind_the_rows_that_there_are():
    """Experts of GPT-OSS have biases, whose gradients add rows up."""
    model = Model("gpt_oss")
    model.sharding = replace(model.sharding, room=2.0)
    programs = model.programs()
    wanted = model.run(programs)
    for program in programs:
        for node in program.graph.nodes:
            if "grouped_mm" in node.name:
                node.target = partial(unwritten, node.target)
    assert same(model.run(programs), wanted)


def test_more_rows_than_there_is_room_for():
    model = Model("mixtral", num_experts_per_tok=1)
    with torch.no_grad():
        model.model.model.embed_tokens.weight.abs_()
        for layer in model.model.model.layers:
            layer.mlp.gate.weight.zero_()
            layer.mlp.gate.weight[0] = 1.0
    model.sharding = replace(model.sharding, room=1.5)
    with pytest.raises(ConfigError) as caught:
        model.run(model.programs())
    assert str(caught.value) == (
        "--moe-expert-rank-capacity-factor 1.5: this rank has 16 rows for the experts of one "
        "rank, and room for 12. Use 1.9 or more, or leave it out."
    )


def test_the_factor_that_an_error_names_is_enough_and_the_least_of_tenths():
    for rows, parts, factor in each_of((4, 11, 50), (2, 3, 8), (1.0, 1.1, 1.25, 2.0)):
        room = room_for(rows, parts, factor)
        for most in range(room + 1, rows + 1):
            counts = torch.zeros(parts, 1, dtype=torch.int64)
            counts[0] = most
            with pytest.raises(ConfigError) as caught:
                padded_source(counts, 1, rows, factor)
            least = float(re.search("Use (.*) or more", str(caught.value))[1])
            places = padded_source(counts, 1, rows, least).unflatten(0, (parts, -1))
            assert int((places >= 0).sum()) == most
            below = room_for(rows, parts, round(least - 0.1, 1))
            assert below < most or below <= room


def test_no_factor_makes_room_for_more_rows_than_there_are():
    assert room_for(50, 8, 8.0) == room_for(50, 8, 1e308) == 50


def context(ranks, name, **overrides):
    """A mixture whose ranks divide sequences."""
    return with_contexts(Model(name, **overrides), ranks)


def with_contexts(model, ranks):
    model.sharding = shard(model.captured, 1)
    model.tp = 1
    arguments = (model.captured, model.chain, model.sharding)
    model.programs = lambda: [rewrite(*arguments, 0, 1, cp_rank=r, cp=ranks) for r in range(ranks)]
    return model


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_context_ranks_compute_experts_with_their_own_rows(name, ranks):
    program = context(ranks, name).check()[0]
    products = [node for node in program.graph.nodes if "grouped_mm" in node.name]
    rows = 2 * 16 * 2 // ranks
    assert products and all(node.meta["val"].shape[0] == rows for node in products)


@pytest.mark.parametrize("name", MIXTURES)
def test_tensor_parallel_ranks_divide_experts_of_parts_of_sequences(name):
    model = Model(name)
    arguments = (model.captured, model.chain, model.sharding)
    model.programs = lambda: [
        rewrite(*arguments, tp_rank, 2, sequence_parallel=True, cp_rank=cp_rank, cp=2)
        for cp_rank in range(2)
        for tp_rank in range(2)
    ]
    program = model.check()[0]
    assert marks(program) == {"exchange": 2 + 2 * 4, "exchange_rows": 2 * exchanged(name)}


@pytest.mark.parametrize("name", MIXTURES)
def test_context_ranks_divide_experts_of_shards_of_features(name):
    model = Model(name)
    model.sharding = shard(model.captured, 2)
    arguments = (model.captured, model.chain, model.sharding)
    model.programs = lambda: [
        rewrite(*arguments, tp_rank, 2, cp_rank=cp_rank, cp=2)
        for cp_rank in range(2)
        for tp_rank in range(2)
    ]
    program = model.check()[0]
    products = [node for node in program.graph.nodes if "grouped_mm" in node.name]
    assert products and all(node.meta["val"].shape[0] == 2 * 16 * 2 // 2 for node in products)


@pytest.mark.parametrize(("samples", "length"), [(4, 32), (8, 8)])
def test_context_ranks_tell_weights_and_samples_from_positions(samples, length):
    """A weight of 4 experts and 32 features is no batch, and 8 samples are no 8 positions."""
    program = context(2, "mixtral", batch=samples, length=length).check()[0]
    products = [node for node in program.graph.nodes if "grouped_mm" in node.name]
    rows = samples * length * 2 // 2
    assert products and all(node.meta["val"].shape[0] == rows for node in products)


def test_contexts_leave_out_what_experts_have_no_room_for():
    """What a rank leaves out depends on the tokens of all, and products are of its own alone."""
    program = with_contexts(Limited(), 2).check()[0]
    products = [node for node in program.graph.nodes if "grouped_mm" in node.name]
    assert products and all(node.meta["val"].shape[0] == 2 * 16 * 2 // 2 for node in products)


def sharded(model, ep, etp, room=None):
    """A mixture whose experts are divided in ``ep`` parts, each of them over ``etp`` ranks, of which
    some share weights and the others sequences.
    """
    cp = ep * etp // model.tp
    model.sharding = shard(model.captured, model.tp, experts=ep * etp, shards=etp, room=room)
    arguments = (model.captured, model.chain, model.sharding)
    model.programs = lambda: [
        rewrite(
            *arguments,
            rank % model.tp,
            model.tp,
            sequence_parallel=model.tp > 1,
            cp_rank=rank // model.tp,
            cp=cp,
            expert_rank=rank,
        )
        for rank in range(ep * etp)
    ]
    return model


LAYOUTS = [(1, 2, 2), (2, 2, 2), (4, 2, 2), (1, 1, 2), (2, 1, 4)]


@pytest.mark.parametrize(("tp", "ep", "etp"), LAYOUTS)
def test_several_ranks_shard_each_expert(tp, ep, etp):
    """Rows go to all of them, and what they compute of a row is added up."""
    (program, *_) = sharded(Model("qwen3_moe", tp), ep, etp).check()
    assert marks(program)["exchange_rows"] == 6
    products = [node for node in program.graph.nodes if "grouped_mm" in node.name]
    rows = 2 * 16 * 2 // ep
    shapes = [tuple(node.meta["val"].shape) for node in products]
    assert shapes == [(rows, 2 * 32 // etp), (rows, 32)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_shards_have_of_a_row_are_added_up_in_one_order(dtype):
    """With room for rows, and without: two sums of six numbers are else others."""
    parts = 3
    shards = 6
    of_part = 4
    rows = torch.randn(12, 8, dtype=dtype)
    grad = torch.randn(72, 8, dtype=dtype)
    counts = torch.full((2, parts * shards), of_part)
    ways = [
        (rows_to_shards, (counts, shards)),
        (copies_for_shards, (parts, shards)),
    ]
    found = []
    for copy, args in ways:
        given = rows.clone().requires_grad_()
        copies = copy(given, *args)
        copies.backward(grad)
        found.append((copies, given.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    "kind", [lambda tp: Model("mixtral", tp), lambda tp: Model("gpt_oss", tp), DeepSeek, Limited]
)
@pytest.mark.parametrize(("tp", "room"), [(1, None), (2, None), (2, 2.0)])
def test_shards_of_experts_of_other_mixtures(kind, tp, room):
    """With biases of experts, a shared one, or a capacity."""
    model = sharded(kind(tp), 2, 2, room)
    model.check()
    weights = [t for n, t in model.sharding.tensors.items() if t.experts]
    assert weights and all(t.dim == 0 and t.shards == 2 and t.within in (1, 2) for t in weights)


def test_rows_of_16_bits_are_shards_of_whole_16_bytes():
    real, _, batch = tiny("mixtral", intermediate_size=24)
    captured = capture(real().bfloat16(), batch)
    with pytest.raises(PlanError) as caught:
        shard(captured, 1, experts=4, shards=2)
    assert str(caught.value) == (
        "--expert-tensor-parallel-size 2: a rank's share of the 24 features of "
        "model.layers.0.mlp.experts.down_proj is not a multiple of 16 bytes. Use a smaller size."
    )


def test_features_that_ranks_cannot_share_are_refused_by_name():
    with pytest.raises(PlanError) as caught:
        shard(Model("mixtral").captured, 1, experts=6, shards=3)
    assert str(caught.value) == (
        "--expert-tensor-parallel-size 3: it does not divide the 128 features of "
        "model.layers.0.mlp.experts.gate_up_proj. Use a size that does, or 1."
    )


def test_shards_of_adapted_experts_are_refused_by_name():
    with pytest.raises(
        PlanError, match="--expert-tensor-parallel-size 2: .*combines their weights"
    ):
        shard(Adapted().captured, 1, experts=4, shards=2)


def test_what_is_routed_is_told_by_roles():
    model = Model("gpt_oss")
    (routed, *_) = find_routed(model.captured.module.graph).values()
    counts = Counter(routed.roles.values())
    assert (
        len(routed.products()) == 2
        and counts[RoutedKind.RESULT] == 1
        and counts[RoutedKind.INVERSE] == 1
    )
    assert list(routed.reads.values()) == [2, 1]  # two rows of each token, one weight of each row


class Sorted(nn.Module):
    """Sorts rows by number and reads a neighbour: no rank can do so with its own rows."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(96, 16)
        self.weight = nn.Parameter(torch.randn(4, 16, 16))
        self.out = nn.Linear(16, 96, bias=False)

    def forward(self, input_ids, labels):
        x = self.table(input_ids).flatten(0, 1)
        numbers, order = torch.sort(input_ids.flatten() % 4)
        rows = x[order]
        rows = rows + rows.roll(1, 0)
        counts = torch.histc(numbers.float(), 4, 0, 3).cumsum(0).to(torch.int32)
        y = torch.ops.transformers.grouped_mm_fallback(rows, self.weight, counts)
        y = y[order.argsort()].view(*input_ids.shape, 16)
        return {"loss": F.cross_entropy(self.out(y).flatten(0, 1), labels.flatten())}


def test_rows_that_meet_are_not_routed():
    torch.manual_seed(0)
    ids = torch.randint(0, 96, (2, 8))
    captured = capture(Sorted(), {"input_ids": ids, "labels": ids})
    assert find_routed(captured.module.graph) == {}
    sharding = shard(captured, 2, experts=2)
    with pytest.raises(PlanError, match="are not routed"):
        rewrite(captured, cut(captured), sharding, 0, 2, sequence_parallel=True)


class ReadsLate(nn.Module):
    """Reads the weights of rows behind the sort of these; ``doubled``: after it changed them."""

    def __init__(self, doubled):
        super().__init__()
        self.doubled = doubled
        self.table = nn.Embedding(96, 16)
        self.weight = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, input_ids):
        x = self.table(input_ids).flatten(0, 1)
        weights = x.sum(-1)
        numbers, order = torch.sort(input_ids.flatten() % 4)
        if self.doubled:
            weights.view(4, 4).mul_(2)
        counts = torch.histc(numbers.float(), 4, 0, 3).cumsum(0).to(torch.int32)
        y = torch.ops.transformers.grouped_mm_fallback(x[order], self.weight, counts)
        y = y * (weights + 1)[order].unsqueeze(-1)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        return {"loss": y[place].square().mean()}


@pytest.mark.parametrize("doubled", [False, True])
def test_what_is_read_behind_a_sort_is_known_before_it_unless_it_changes(doubled):
    torch.manual_seed(0)
    model = ReadsLate(doubled)
    batch = {"input_ids": torch.randint(0, 96, (2, 8))}
    module = capture(model, batch).module
    (routed,) = find_routed(module.graph).values()
    module.graph.lint()
    order = {node: at for at, node in enumerate(module.graph.nodes)}
    first = [order[read] < order[routed.sort] for read in routed.reads]
    assert first == [True, not doubled]


@pytest.mark.parametrize(("width", "sharded"), [(32, True), (24, False)])
def test_shards_of_rows_that_torch_cannot_multiply_are_not_made(width, sharded):
    """Its product in bf16 takes rows of whole 16 bytes."""
    real, _, batch = tiny("mixtral", intermediate_size=width)
    tensors = shard(capture(real().bfloat16(), batch), 2).tensors
    dims = {tensor.dim for name, tensor in tensors.items() if ".experts." in name}
    assert dims == ({1, 2} if sharded else {None})


def test_a_model_without_experts_is_refused_by_name():
    real, _, batch = tiny("llama")
    with pytest.raises(PlanError) as caught:
        shard(capture(real(), batch), 2, experts=2)
    assert str(caught.value) == (
        "--expert-model-parallel-size 2: the model has no grouped product of experts whose number "
        "it divides. Use 1, or another size."
    )


def test_weights_that_follow_from_several_have_the_name_of_the_first():
    graph = Graph()
    rows, ends, gate, up = map(graph.placeholder, ("rows", "ends", "gate", "up"))
    both = graph.call_function(torch.ops.aten.cat.default, ([gate, up], -1))
    made = graph.call_function(torch.ops.aten.ones.default, ([4, 8, 16],))
    product = torch.ops.transformers.grouped_mm_fallback.default
    assert weight_of(graph.call_function(product, (rows, both, ends))) == "gate"
    assert weight_of(graph.call_function(product, (rows, made, ends))) not in ("gate", "up")


def test_ranks_that_shard_every_expert_multiply_with_the_parameters_themselves():
    real, _, batch = tiny("mixtral")
    captured = capture(real(), batch)
    program = rewrite(captured, cut(captured), shard(captured, 2), 0, 2)
    assert fuse(program.graph, recompute_activations=True)["recomputed activation"] == 2
