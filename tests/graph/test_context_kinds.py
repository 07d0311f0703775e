"""Captured models whose ranks gather keys and values (all_gather), or pass them on (p2p): loss,
gradients, what is sent, which positions a rank has.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen2Config

from megatron_merak import ops
from megatron_merak.graph.ir.marks import all_gather
from megatron_merak.graph.ir.nodes import is_random
from megatron_merak.graph.ir.operators import flops
from megatron_merak.graph.lowering.split import split
from megatron_merak.graph.measure import measure
from megatron_merak.graph.sharding import local
from megatron_merak.graph.sharding.shard import shard
from tests.fuzz.check import Way, step
from tests.graph.test_context import (
    LOSSES,
    READS,
    Attending,
    Crossing,
    measured,
    next_token,
    program,
    refusal,
    tokens,
)
from tests.graph.test_sequence import DROPS, Model, check, collectives
from tests.graph.tiny import FAMILIES, randomise, tiny
from tests.zoo.doubled import doubled


def some(cases, *quick):
    """Cases, of which all but some take long."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


FAST = "llama gpt2 gemma2 qwen3 bert t5 bloom".split()
GATHERS = {"all_gather": 2 * 2, "copy_in": 2 * 2, "reduce_sum": 1}  # keys and values of two layers
GOES_ROUND = {"rotate": 2, "turn_back": 2, "reduce_sum": 1}
THREE = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1}
ODD = {"llama": THREE, "gpt2": {"n_embd": 24, "n_head": 3}, "gemma2": THREE}


@pytest.fixture(autouse=True)
def in_fp64():
    """Where models ask for fp32, too."""
    with doubled():
        yield


def exchanged(subject, kind=None):
    """What ranks exchange in the units that the planner knows of."""
    return {unit.cp_comm_type for unit in measured(subject, kind=kind)} - {""}


def gathering(tp=1, cp=2, kind="all_gather", **how):
    return Way(tp, cp=cp, kind=kind, **how)


KINDS = ("all_gather", "p2p")
RINGS = {"gemma2": {"all_gather"}, "bloom": {"all_gather"}, "t5": {"all_gather", "p2p"}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", some(FAST, "llama", "t5"))
def test_loss_and_every_gradient(name, kind):
    subject = Model.of(name)
    found = {kind} if kind == "all_gather" else RINGS.get(name, {kind})
    if kind in found:
        assert exchanged(subject, kind) == found
    check(subject, gathering(stages=2, recompute=True, kind=kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequence", some([False, True], True))
@pytest.mark.parametrize("name", some(["llama", "gpt2", "gemma2", "t5"], "llama"))
def test_tensor_parallel_ranks_gather_those_of_their_heads(name, sequence, kind):
    check(Model.of(name), gathering(2, stages=2, recompute=True, sequence=sequence, kind=kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "phimoe"])
def test_every_family(name, ranks, kind):
    subject = Model.of(name)
    check(subject, gathering(cp=ranks, kind=kind))
    check(subject, gathering(cp=ranks, stages=3, recompute=True, fused=False, kind=kind))


@pytest.mark.parametrize("name", some(ODD, "gpt2"))
def test_heads_that_ranks_do_not_divide(name):
    """They gather, unless they are told what to do; one sample cannot be divided either."""
    subject = Model.of(name, batch=1, **ODD[name])
    assert collectives(program(subject)) == GATHERS
    assert exchanged(subject) == {"all_gather"}
    check(subject, Way(1, stages=2, recompute=True, cp=2))


def test_heads_that_ranks_divide_are_exchanged_as_before():
    subject = Model.of("llama")
    assert exchanged(subject) == {"a2a"}
    assert collectives(program(subject, kind="all_gather")) == GATHERS


# ---- which positions a rank has ------------------------------------------------------------------
def starts(subject, ranks):
    programs = subject.made(gathering(cp=ranks)).programs
    nodes = [
        next(node for node in each.graph.nodes if node.target is ops.causal_chunks)
        for each in programs
    ]
    return [node.args[3] for node in nodes], [flops(node) for node in nodes]


def test_ranks_have_as_much_of_a_causal_mask_as_one_another():
    found, work = starts(Model.of("llama"), 4)
    assert found == [(0, 14), (2, 12), (4, 10), (6, 8)]
    assert len(set(work)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_without_chunks_for_both_ends_are_exact(kind):
    check(Model.of("llama", length=15), gathering(cp=3, kind=kind))


def test_lengths_without_chunks_for_both_ends_are_cut_in_order():
    subject = Model.of("llama", length=15)
    found, work = starts(subject, 3)
    assert found == [(0,), (5,), (10,)]
    assert work == sorted(work) and work[0] < work[-1]


def test_attention_that_is_not_causal_needs_no_balance():
    taken = {node.target for node in program(Model.of("bert"), kind="all_gather").graph.nodes}
    assert local.take in taken and local.take_ends not in taken


@pytest.mark.parametrize("blocks", [(12,), (4, 4, 4)])
def test_chunks_of_ranks_make_up_the_whole(blocks):
    x = torch.arange(2 * 12 * 3).view(2, 12, 3)
    parts = [local.take_ends(x, 1, blocks, rank, 2) for rank in range(2)]
    shares = [part.unflatten(1, (len(blocks), -1)) for part in parts]
    by_rank = torch.stack(shares, 2).flatten(1, 3)
    assert torch.equal(local.by_rank(x, 1, blocks, 2), by_rank)
    assert torch.equal(local.by_position(by_rank, 1, blocks, 2), x)
    if len(blocks) == 1:
        assert parts[0][0, :, 0].tolist() == [0, 3, 6, 27, 30, 33]


# ---- what models do with positions ---------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read", some(READS, "convolution"))
def test_what_reads_many_positions_is_exact(read, kind):
    """Neighbours of a position may be another rank's."""
    subject = Model(
        randomise(Attending(LOSSES["mean"], READS[read])),
        {"input_ids": tokens(1), "labels": tokens(2)},
    )
    check(subject, gathering(stages=2, recompute=True, kind=kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", some(LOSSES, "shifted logits"))
def test_losses_are_those_of_whole_sequences(loss, kind):
    subject = Model(
        randomise(Attending(LOSSES[loss])), {"input_ids": tokens(1), "labels": tokens(2)}
    )
    check(subject, gathering(stages=2, recompute=True, kind=kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("samples", some([1, 4, 8], 4))
def test_samples_and_features_may_be_as_many_as_positions(samples, kind):
    """A part of one is no part of the other."""
    batch = {"input_ids": tokens(1, (samples, 4)), "labels": tokens(2, (samples, 4))}
    check(Model(randomise(Attending(next_token)), batch), gathering(kind=kind))
    square = {"input_ids": tokens(1, (samples, 16)), "labels": tokens(2, (samples, 16))}
    mixed = Attending(next_token, lambda x: x + x.transpose(1, 2) + x.cumsum(1))
    check(Model(randomise(mixed), square), gathering(kind=kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", some([(8, 4), (4, 12), (9, 4), (8, 5), (6, 8)], (4, 12)))
def test_an_encoder_has_another_length(lengths, kind):
    source, target = lengths
    batch = {
        "input_ids": tokens(1, (2, source)),
        "decoder_input_ids": tokens(2, (2, target)),
        "labels": tokens(3, (2, target)),
    }
    check(Model(randomise(Crossing()), batch), gathering(stages=2, recompute=True, kind=kind))


def padded(name="llama"):
    subject = Model.of(name)
    attention = torch.ones(2, 16, dtype=torch.int64)
    attention[0, :5] = 0
    return Model(subject.model, {**subject.batch, "attention_mask": attention})


def packed(name="llama"):
    subject = Model.of(name)
    places = torch.cat([torch.arange(6), torch.arange(10)]).expand(2, -1).contiguous()
    return Model(subject.model, {**subject.batch, "position_ids": places})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("made", some([padded, packed], padded))
def test_masks_are_cut_by_rows(made, kind):
    subject = made()
    sent = GATHERS if kind == "all_gather" else GOES_ROUND
    assert collectives(program(subject, kind=kind)) == sent
    check(subject, gathering(stages=2, recompute=True, kind=kind))


class Biased(nn.Module):
    """A layer of causal attention, then one with a bias that each key computes for all queries."""

    def __init__(self, hidden=16, heads=3):
        super().__init__()
        self.table = nn.Embedding(96, hidden)
        self.qkv = nn.Linear(hidden, 3 * 4 * heads)
        self.bias = nn.Linear(hidden, heads)
        self.out = nn.Linear(4 * heads, hidden)
        self.head = nn.Linear(hidden, 96)
        self.heads = heads

    def forward(self, input_ids, labels):
        x = self.table(input_ids)
        for causal in (True, False):
            joined = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
            q, k, v = (each.transpose(1, 2) for each in joined)
            bias = self.bias(x).transpose(1, 2)[:, :, None].expand(-1, -1, x.shape[1], -1)
            mask = None if causal else bias.contiguous()
            mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return {"loss": next_token(self.head(x), labels)}


def test_a_mask_that_keys_compute_is_gathered():
    """It is cut by keys, and each rank takes the rows of its queries."""
    batch = {"input_ids": tokens(1, (1, 8)), "labels": tokens(2, (1, 8))}
    subject = Model(randomise(Biased()), batch)
    assert exchanged(subject) == {"all_gather"}
    check(subject, Way(1, stages=2, recompute=True, cp=2))


SIZES = {"vocab_size": 96, "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2}
QWEN2 = Qwen2Config(**SIZES, num_attention_heads=3, num_key_value_heads=1, use_cache=False)
LATENT = DeepseekV3Config(
    **SIZES,
    num_attention_heads=3,
    num_key_value_heads=3,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=6,  # other than that of keys
    first_k_dense_replace=2,
    use_cache=False,
)


@pytest.mark.parametrize("config", [QWEN2, LATENT], ids=lambda config: config.model_type)
def test_models_of_three_heads(config):
    batch = {"input_ids": tokens(1, (1, 16)), "labels": tokens(2, (1, 16))}
    subject = Model(randomise(AutoModelForCausalLM.from_config(config)), batch)
    assert exchanged(subject) == {"all_gather"}
    check(subject, Way(1, stages=2, recompute=True, cp=2))


# ---- what is sent --------------------------------------------------------------------------------
def test_of_repeated_heads_one_is_gathered():
    """Beside a mask transformers repeats the heads of keys and values for queries."""
    subject = Model.of("mistral")
    made = subject.made(gathering()).programs[0]
    gathered = made.graph.find_nodes(op="call_function", target=all_gather)
    assert {node.meta["val"].numel() for node in gathered} == {2 * 16 * 2 * 8}
    assert sum(node.target is ops.attention for node in made.graph.nodes) == 2


def test_layers_are_priced_by_what_they_gather():
    """Two halves of an all-reduce of keys, or values, [2, 16, 2, 8] in fp64: in the backward they
    are gathered again, and their gradients reduce-scattered. A layer has no more work than its share.
    """
    subject = Model.of("llama")
    one = measure(subject.captured, subject.chain, shard(subject.captured, 1), 1)[1]
    layer = measured(subject, kind="all_gather")[1]
    half = 2 * 16 * 2 * 8 * 8 // 2
    assert layer.reduces == (1, 2)
    assert layer.reduced_bytes == (2 * half, 4 * half)
    assert layer.exchanged_bytes == (0, 0)
    products = one.flops - one.attention_flops
    assert layer.flops - layer.attention_flops == products // 2
    assert layer.attention_flops == one.attention_flops // 2
    sharding = shard(subject.captured, 2)
    beside = measure(subject.captured, subject.chain, sharding, 2, cp=2, cp_comm_type="all_gather")[
        1
    ]
    assert beside.exchanged_bytes == (half, 2 * half)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        (
            "gpt2",
            {"attn_pdrop": 0.1},
            "attention in transformer.h.0.attn has dropout. Use all_gather, which has memory for "
            "those of all ranks, or an attention dropout of 0.",
        ),
        (
            "gemma2",
            {},
            "this model has no scaled_dot_product_attention whose keys and values could go round. "
            "Use all_gather, which has memory for those of all ranks, or attn_implementation sdpa.",
        ),
    ],
)
def test_a_model_without_a_ring_is_refused_by_name(name, changes, reason):
    """And a plan that was made for another batch of it is exact."""
    subject = Model.of(name, **changes)
    assert refusal(subject, kind="p2p") == f"--cp-comm-type p2p: {reason}"


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_ring_keeps_its_own_part_and_sends_it_on(name):
    """Keys and values [2, 2, 16 / n, 16] in fp64, n - 1 times; in the backward with their gradients.
    Ranks that are twice as many keep half as much each.
    """
    subject = Model.of(name)
    two, four = (measured(subject, ranks, "p2p")[1] for ranks in (2, 4))
    assert two.saved_bytes == 2 * four.saved_bytes
    for ranks, layer in ((2, two), (4, four)):
        sent = (ranks - 1) * (2 * 2 * 16 // ranks * 16 * 8)
        # of an all-reduce as much is sent 2 (n - 1) / n times
        found = [2 * (ranks - 1) * size / ranks for size in layer.ring_bytes]
        assert found == pytest.approx([sent, 2 * sent], rel=1e-3)
        assert layer.exchanged_bytes == layer.reduced_bytes == layer.ring_bytes


def check_trained_in_part(trained: str, way: Way) -> None:
    """A llama of which only weights with ``trained`` in their name are trained has their gradients."""
    real, _, batch = tiny("llama")
    model = randomise(real())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    subject = Model(model, batch)
    loss = model(**batch).loss
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    wanted = torch.autograd.grad(loss, list(weights.values()))
    _, losses, found = step(subject, way)
    for own, grads in zip(losses, found, strict=True):
        assert float(own) == pytest.approx(loss.item(), rel=1e-12)
        for name, grad in zip(weights, wanted, strict=True):
            torch.testing.assert_close(grads[name], grad, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("trained", some(["q_proj", "k_proj", "v_proj"], "q_proj"))
def test_a_ring_of_what_is_trained_in_part(trained):
    """Of the first layer keys and values, or queries, have no gradient."""
    check_trained_in_part(trained, gathering(cp=4, kind="p2p"))


def test_a_part_begins_when_the_next_one_is_on_its_way():
    """Segments of a layer: before attention, four parts with what arrives between them, and after it."""
    subject = Model.of("llama")
    parts = split(program(subject, 4, "p2p"), range(1, 2)).parts
    sent = [any(out.collective == "rotation" for out in part.outs) for part in parts]
    back = [any(read.collective == "rotation back" for read in part.ins) for part in parts]
    assert sent == [True, False, True, False, True, False, False, False, False, False]
    #        before  part   hop   part  hop   part   hop   part   pass   after
    assert back == [False, False, True, False, True, False, True, False, True, True]


# ---- dropout -------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_dropout_has_the_mask_of_one_process(kind):
    subject = Model.of("gpt2", embd_pdrop=0.3)
    _, (wanted,), (grads,) = step(subject, Way(1, fused=False))
    _, losses, found = step(subject, gathering(fused=False, kind=kind))
    for loss, mine in zip(losses, found, strict=True):
        assert float(loss) == pytest.approx(float(wanted), rel=1e-12)
        for key, grad in grads.items():
            torch.testing.assert_close(mine[key], grad, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("name", some(["gpt2", "bert"], "bert"))
def test_dropout_is_the_same_in_every_layout_of_stages(name):
    """Hidden dropout and that of attention, of which each rank draws that of its queries."""
    subject = Model.of(name, **DROPS[name])
    assert any(map(is_random, program(subject, kind="all_gather").graph.nodes))
    for fused in (False, True):
        _, losses, grads = step(subject, gathering(fused=fused))
        _, again, found = step(subject, gathering(stages=2, recompute=True, fused=fused))
        assert all(torch.equal(loss, losses[0]) for loss in (*losses, *again))
        for one, two in zip(grads, found, strict=True):
            for key in one:
                torch.testing.assert_close(one[key], two[key], rtol=1e-10, atol=1e-14)


# ---- the operation -------------------------------------------------------------------------------
@pytest.mark.parametrize("length", [16, 640])
@pytest.mark.parametrize("heads", [(4, 4, 8, 8), (6, 2, 8, 8), (3, 3, 8, 4)])
@pytest.mark.parametrize("chunks", [(0,), (4,), (1, 6)])
def test_chunks_attend_to_what_they_attend_to_in_the_whole(length, heads, chunks):
    queries, keys, width, values = heads
    size = length // 8
    draw = {"dtype": torch.float64, "requires_grad": True}
    query = torch.randn(2, queries, length, width, **draw)
    key = torch.randn(2, keys, length, width, **draw)
    value = torch.randn(2, keys, length, values, **draw)
    rows = torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in chunks])
    whole = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    wanted = whole[:, :, rows]
    found = ops.causal_chunks(query[:, :, rows], key, value, [chunk * size for chunk in chunks])
    assert found.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(wanted)
    operands = (query, key, value)
    ours = torch.autograd.grad((found * weights).sum(), operands)
    theirs = torch.autograd.grad((wanted * weights).sum(), operands)
    torch.testing.assert_close(ours, theirs)
