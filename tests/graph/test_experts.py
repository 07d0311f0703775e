"""Captured mixtures whose ranks divide the experts: loss, gradients, what is sent, what is refused."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (its grouped product)
from torch import nn

from megatron_merak.errors import PlanError
from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.lowering.rewrite import rewrite
from megatron_merak.graph.lowering.routed import RoutedKind, find_routed
from megatron_merak.graph.partition.cut import cut
from megatron_merak.graph.sharding.shard import shard
from tests.graph import lockstep
from tests.graph.tiny import gradients, randomise, tiny

MIXTURES = "mixtral qwen3_moe gpt_oss".split()


class Model:
    """A mixture with its capture, and what each rank runs of it."""

    def __init__(self, name, tp=2, **overrides):
        real, _, self.batch = tiny(name, **overrides)
        self.model = randomise(real())
        self.captured = capture(self.model, self.batch)
        self.sharding = shard(self.captured, tp, experts=tp)
        self.chain = cut(self.captured)
        self.tp = tp

    def programs(self):
        arguments = (self.captured, self.chain, self.sharding)
        return [rewrite(*arguments, r, self.tp, sequence_parallel=True) for r in range(self.tp)]

    def check(self):
        """Compare the loss and every gradient of all ranks with those of one process."""
        programs = self.programs()
        copies = len(programs) // self.tp
        shards = (lockstep.shards(self.captured, self.sharding, self.model) for _ in range(copies))
        held = [each for copy in shards for each in copy]
        losses, found = lockstep.gradients(programs, held, self.batch, self.tp)
        loss, grads = gradients(self.model, self.batch)
        largest = max(float(grad.abs().max()) for grad in grads.values())
        for rank, (own, mine) in enumerate(zip(losses, found, strict=True)):
            assert float(own) == pytest.approx(float(loss), rel=1e-6)
            for name, grad in grads.items():
                expected = lockstep.part(grad, self.sharding.tensors[name], rank % self.tp, self.tp)
                scale = max(float(grad.abs().max()), 1e-4 * largest)
                torch.testing.assert_close(mine[name], expected, rtol=0, atol=1e-5 * scale)
        return programs


def marks(program):
    names = (node.target.__name__ for node in program.graph.nodes if node.op == "call_function")
    return Counter(name for name in names if name in ("exchange", "exchange_rows"))


@pytest.mark.parametrize("name", MIXTURES)
def test_loss_and_every_gradient(name):
    model = Model(name)
    (program, _) = model.check()
    # a layer exchanges how many rows go where, the rows, and the rows back
    assert marks(program) == {"exchange": 2, "exchange_rows": 4}
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


def context(ranks, name, **overrides):
    """A mixture whose ranks divide sequences."""
    model = Model(name, **overrides)
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
    assert marks(program) == {"exchange": 2 + 2 * 4, "exchange_rows": 4}


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
