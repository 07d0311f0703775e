"""Captured models whose ranks exchange heads among neighbours, and pass keys and values on between
groups of these (a2a+p2p): loss, gradients, what is sent, what is refused.
"""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_merak.errors import PlanError
from megatron_merak.graph.ir.kinds import over
from megatron_merak.graph.ir.marks import MARKS, exchange, reduce_sum, rotate, turn_back
from megatron_merak.graph.measure import measure
from megatron_merak.graph.sharding.shard import shard
from megatron_merak.segment import LayerAxis
from tests.fuzz.check import Way, step
from tests.graph.test_context import Attending, next_token, tokens
from tests.graph.test_context_kinds import check_trained_in_part, packed, padded, some
from tests.graph.test_sequence import Model, check
from tests.graph.tiny import FAMILIES, randomise
from tests.zoo.doubled import doubled

KIND = "a2a+p2p"
FAST = "llama gpt2 gemma2 qwen3 bert t5 bloom mistral".split()


@pytest.fixture(autouse=True)
def in_fp64():
    """Where models ask for fp32, too."""
    with doubled():
        yield


def levels(inner=2, outer=2, tp=1, **how):
    return Way(tp, cp=inner * outer, kind=KIND, inner=inner, **how)


def program(subject, way):
    return subject.made(way).programs[0]


ROUND = {  # what ranks send in two layers
    (exchange, LayerAxis.INNER): 6,
    (rotate, LayerAxis.OUTER): 2,
    (turn_back, LayerAxis.OUTER): 2,
}


def marks_of(subject):
    """How many marks there are for ranks that divide sequences, but for the loss."""
    nodes = program(subject, levels(fused=False)).graph.nodes
    marks = [node for node in nodes if node.target in MARKS and node.target is not reduce_sum]
    return Counter((node.target, over(node)) for node in marks)


@pytest.mark.parametrize("name", some(FAST, "llama", "mistral"))
def test_loss_and_every_gradient(name):
    check(Model.of(name), levels(stages=2, recompute=True))


@pytest.mark.parametrize("sequence", some([False, True], True))
@pytest.mark.parametrize("name", some(["llama", "gpt2", "t5"], "llama"))
def test_beside_tensor_parallel_ranks(name, sequence):
    check(Model.of(name), levels(tp=2, stages=2, recompute=True, sequence=sequence))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "phimoe"])
def test_every_family(name):
    subject = Model.of(name)
    check(subject, levels())
    check(subject, levels(stages=3, recompute=True, fused=False))


HEADS = {  # of queries, of keys and values; neighbours, groups of these
    "fewer keys than neighbours": (4, 2, 4, 2),
    "one key": (4, 1, 2, 2),
    "keys that neighbours cannot share": (12, 6, 4, 2),
    "as many keys as queries": (4, 4, 4, 2),
    "several each": (6, 2, 3, 2),
    "several groups": (4, 2, 2, 4),
}


@pytest.mark.parametrize("case", some(HEADS, "fewer keys than neighbours", "several each"))
def test_heads_of_neighbours(case):
    heads, keys, inner, outer = HEADS[case]
    sizes = {"num_attention_heads": heads, "num_key_value_heads": keys, "hidden_size": 8 * heads}
    subject = Model.of("llama", length=2 * inner * outer, **sizes)
    check(subject, levels(inner, outer, stages=2, recompute=True))
    check(subject, levels(inner, outer, fused=False))


def test_lengths_without_chunks_for_both_ends():
    subject = Model.of("llama", length=12)
    check(subject, levels(stages=2, recompute=True))
    ends = levels().cp * 2
    assert 12 % ends and not 12 % levels().cp


@pytest.mark.parametrize("name", ["llama", "mistral"])  # of these one has a sliding window
@pytest.mark.parametrize("made", [padded, packed])
def test_masks_are_cut_by_the_rows_of_neighbours(made, name):
    subject = made(name)
    marks = marks_of(subject)
    assert marks == ROUND
    check(subject, levels(stages=2, recompute=True))


class Positioned(nn.Module):
    """Attention with a bias of its own for each head, which is no parameter."""

    def __init__(self, hidden=16, heads=4, length=16):
        super().__init__()
        self.table = nn.Embedding(96, hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, 96)
        self.heads = heads
        generator = torch.Generator().manual_seed(5)
        bias = torch.randn(heads, length, length, generator=generator, dtype=torch.float64)
        self.register_buffer("bias", bias)

    def forward(self, input_ids, labels):
        x = self.table(input_ids)
        q, k, v = (
            each.transpose(1, 2)
            for each in self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, self.bias.to(q.dtype)[None])
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return {"loss": next_token(self.head(x), labels)}


def test_a_bias_of_each_head_is_that_of_its_neighbour():
    batch = {"input_ids": tokens(1, (2, 16)), "labels": tokens(2, (2, 16))}
    subject = Model(randomise(Positioned()), batch)
    assert marks_of(subject) == {name: count // 2 for name, count in ROUND.items()}
    check(subject, levels(stages=2, recompute=True))
    check(subject, levels(4, 2, fused=False))


def test_what_is_outside_of_attention_is_as_in_a_ring():
    """A convolution and a running sum along the sequence."""
    batch = {"input_ids": tokens(1, (2, 16)), "labels": tokens(2, (2, 16))}
    mixed = Attending(next_token, lambda x: x + x.transpose(1, 2) + x.cumsum(1))
    check(Model(randomise(mixed), batch), levels(stages=2))


@pytest.mark.parametrize("trained", some(["q_proj", "k_proj", "v_proj"], "q_proj"))
def test_what_is_trained_in_part(trained):
    check_trained_in_part(trained, levels())


def test_hidden_dropout_has_the_mask_of_one_process():
    subject = Model.of("gpt2", embd_pdrop=0.3)
    _, (wanted,), (grads,) = step(subject, Way(1, fused=False))
    _, losses, found = step(subject, levels(fused=False))
    for loss, own in zip(losses, found, strict=True):
        torch.testing.assert_close(loss, wanted)
        for name, grad in grads.items():
            torch.testing.assert_close(own[name], grad)


# ---- what is sent --------------------------------------------------------------------------------
def test_layers_are_priced_by_what_both_levels_send():
    """Queries [2, 4, 4, 8], results, and keys and values beside each other, of as many bytes, go to the
    neighbours; keys and values [2, 1, 8, 16] of its heads then go round once, and twice in the
    backward. The result's own gradient has the weight gradient of a product behind it.
    """
    subject = Model.of("llama")
    sharding = shard(subject.captured, 1)
    layer = measure(
        subject.captured, subject.chain, sharding, 1, cp=4, cp_comm_type=KIND, cp_inner=2
    )[1]
    part = 2 * 4 * 4 * 8 * 8
    passed = 2 * 8 * 16 * 8
    assert layer.cp_comm_type == KIND and layer.cp_inner == 2
    assert layer.inner_sent == ((3, 3 * part), (3, 3 * part), (2, 2 * part))
    assert layer.outer_sent == ((1, passed), (2, 2 * passed), (2, 2 * passed))
    assert layer.exchanged_bytes == layer.reduced_bytes == layer.reduces == (0, 0)
    one = measure(subject.captured, subject.chain, sharding, 1)[1]
    assert layer.flops - layer.attention_flops == (one.flops - one.attention_flops) // 4
    assert layer.attention_flops == one.attention_flops // 4


def test_ranks_keep_less_than_a_ring_of_all_has_on_its_way():
    """Of one ring half as many rotations are left, of as many bytes each."""
    subject = Model.of("llama")
    ring = program(subject, Way(1, cp=4, kind="p2p"))
    both = program(subject, levels())
    sizes = [
        [node.meta["val"].nbytes for node in each.graph.nodes if node.target is rotate]
        for each in (ring, both)
    ]
    assert [len(each) for each in sizes] == [2 * 3, 2 * 1]
    assert len({*sizes[0], *sizes[1]}) == 1


# ---- what is refused -----------------------------------------------------------------------------
def test_heads_that_neighbours_cannot_share_are_refused_by_name():
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}
    subject = Model.of("llama", **sizes)
    with pytest.raises(PlanError) as caught:
        measure(
            subject.captured,
            subject.chain,
            shard(subject.captured, 1),
            1,
            cp=4,
            cp_comm_type=KIND,
            cp_inner=2,
        )
    assert str(caught.value) == (
        "--cp-comm-type a2a+p2p: attention in model.layers.0.self_attn has 3 heads, which 2 ranks "
        "cannot share evenly. Use p2p, or a first size that divides them."
    )
