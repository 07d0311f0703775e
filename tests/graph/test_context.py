"""Captured models whose ranks divide sequences: loss, gradients, what is exchanged, dropout masks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_merak.errors import PlanError
from megatron_merak.graph.fusion.fuse import fuse
from megatron_merak.graph.ir.nodes import is_random
from megatron_merak.graph.lowering.split import split
from megatron_merak.graph.measure import measure
from megatron_merak.graph.sharding.shard import shard
from tests.fuzz.check import Way, step
from tests.graph.test_sequence import DROPS, Model, check, collectives
from tests.graph.tiny import FAMILIES, randomise
from tests.zoo.doubled import doubled

FAST = "llama gpt2 gemma2 qwen3 bert t5".split()


@pytest.fixture(autouse=True)
def in_fp64():
    """Where models ask for fp32, too."""
    with doubled():
        yield


def program(subject, ranks=2, kind=None):
    return subject.made(Way(1, fused=False, cp=ranks, kind=kind)).programs[0]


def measured(subject, ranks=2, kind=None):
    """What the planner knows of the units."""
    sharding = shard(subject.captured, 1)
    return measure(subject.captured, subject.chain, sharding, tp=1, cp=ranks, cp_comm_type=kind)


def refusal(subject, ranks=2, kind=None):
    with pytest.raises(PlanError) as caught:
        measured(subject, ranks, kind)
    return str(caught.value)


@pytest.mark.parametrize("name", FAST)
def test_loss_and_every_gradient(name):
    subject = Model.of(name)
    measured(subject)
    check(subject, Way(1, stages=2, recompute=True, cp=2))


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", FAST)
def test_tensor_parallel_ranks_divide_sequences_too(name, sequence):
    subject = Model.of(name)
    way = Way(2, stages=2, recompute=True, sequence=sequence, cp=2)
    check(subject, way)
    sharding = shard(subject.captured, 2)
    measure(subject.captured, subject.chain, sharding, 2, sequence_parallel=sequence, cp=2)


def test_marks_of_both_axes_in_a_layer():
    """Four exchanges of heads, and what tensor parallelism has without them."""
    alone = collectives(Model.of("gpt2").made(Way(2, fused=False)).programs[0])
    both = collectives(Model.of("gpt2").made(Way(2, fused=False, cp=2)).programs[0])
    assert both - alone == {"exchange": 2 * 4, "reduce_sum": 1} and not alone - both


def test_heads_of_tensor_parallel_ranks_that_the_others_do_not_divide_are_refused_by_name():
    subject = Model.of("llama", length=15)
    sharding = shard(subject.captured, 2)
    with pytest.raises(PlanError, match="divides the number of heads of a tensor-parallel rank"):
        measure(subject.captured, subject.chain, sharding, 2, cp=3, cp_comm_type="a2a")
    measure(subject.captured, subject.chain, sharding, 2, cp=3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "phimoe"])
def test_every_family(name, ranks):
    subject = Model.of(name)
    check(subject, Way(1, cp=ranks))
    check(subject, Way(1, stages=3, recompute=True, fused=False, cp=ranks))


def test_a_layer_exchanges_four_times():
    """Queries, keys and values, and what attention makes of them; the loss is a sum."""
    for name in ("llama", "gpt2"):
        assert collectives(program(Model.of(name))) == {"exchange": 2 * 4, "reduce_sum": 1}


def test_rotary_tables_of_parts_are_fused():
    assert fuse(program(Model.of("llama")).graph)["rotary"] == 2 * 2


def test_keys_and_values_are_gathered_where_ranks_outnumber_their_heads():
    subject = Model.of("llama")  # 4 heads, 2 of keys and values
    found = collectives(program(subject, 4))
    assert found == {"exchange": 2 * 2, "all_gather": 2 * 2, "copy_in": 2 * 2, "reduce_sum": 1}
    measured(subject, 4)
    check(subject, Way(1, stages=2, recompute=True, cp=4))


def test_values_that_cross_units_are_parts_and_are_priced_so():
    subject = Model.of("gpt2")
    one = measure(subject.captured, subject.chain, shard(subject.captured, 1), 1)
    parts = measured(subject)
    units = len(subject.chain.units)
    for border in range(1, units):
        (value,) = split(program(subject), range(border, units)).sources
        assert value.shape == (2, 8, 32)
    for before, after in zip(one[1:-1], parts[1:-1], strict=True):
        assert after.parameters == before.parameters
        assert after.flops == before.flops // 2
        assert after.output_bytes == before.output_bytes // 2
        assert after.saved_bytes == before.saved_bytes // 2
    # Four exchanges of a part [2, 8, 32] in fp64, each of which is half of an all-reduce.
    attention = parts[1]
    assert attention.reduces == (2, 2)
    assert attention.reduced_bytes == (4 * 2 * 8 * 32 * 8 // 2,) * 2


def test_a_length_that_the_ranks_do_not_share_is_refused_by_name():
    subject = Model.of("llama", length=15)
    assert refusal(subject) == (
        "--context-parallel-size 2: sequences of 15 positions cannot be shared evenly by 2 ranks. "
        "Pad them to a multiple of 2."
    )
    check(subject, Way(1, cp=2))  # as a later batch of that length is computed


def test_heads_that_the_ranks_do_not_divide_are_refused_by_name():
    subject = Model.of("llama", length=15)
    assert refusal(subject, 3, "a2a") == (
        "--context-parallel-size 3: scaled_dot_product_attention in model.layers.0.self_attn can be "
        "divided neither by positions nor by heads. Use --cp-comm-type all_gather, or a size that "
        "divides the number of heads, or 1."
    )
    check(subject, Way(1, cp=3, kind="a2a"))


def test_what_reads_positions_one_after_the_other_every_rank_computes():
    """Which is counted, and said where a run prints its notes."""
    subject = Model.of("mamba")
    units = measured(subject)
    share = sum(unit.repeated_flops for unit in units) / sum(unit.flops for unit in units)
    assert 0.05 < share < 0.3
    assert [unit.name for unit in units if unit.repeated_flops] == [
        "backbone.layers.0.mixer",
        "backbone.layers.1.mixer",
    ]
    check(subject, Way(1, cp=2))
    text = refusal(subject, kind="a2a")
    assert "backbone.layers.0.mixer" in text and "Use --cp-comm-type all_gather" in text


class Seeing(nn.Module):
    """Classifies images by their patches."""

    def __init__(self, hidden=16):
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, 4, 4)
        self.layer = nn.TransformerEncoderLayer(hidden, 4, 32, 0.0, batch_first=True)
        self.head = nn.Linear(hidden, 5)

    def forward(self, pixel_values, labels):
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        scores = self.head(self.layer(x).mean(dim=1))
        return {"loss": F.cross_entropy(scores, labels)}


def test_images_are_refused_as_what_they_are():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
    batch = {"pixel_values": images, "labels": torch.tensor([1, 4])}
    assert refusal(Model(randomise(Seeing()), batch)) == (
        "--context-parallel-size 2: pixel_values, which is 2 x 3 x 8 x 8, is no sequence that ranks "
        "could share. Use 1."
    )


def test_a_length_is_blamed_only_for_what_has_it():
    """Mamba's scan is repeated for itself, whatever else a batch has."""
    subject = Model.of("mamba")
    batch = {**subject.batch, "scores": torch.zeros(2, 7, dtype=torch.int64)}
    model = subject.model

    class Scored(nn.Module):
        def __init__(self):
            super().__init__()
            self.mamba = model

        def forward(self, scores, **batch):
            output = self.mamba(**batch)
            return {"loss": output.loss + scores.sum()}

    assert any(unit.repeated_flops for unit in measured(Model(Scored(), batch)))


def test_hidden_dropout_has_the_mask_of_one_process():
    subject = Model.of("gpt2", embd_pdrop=0.3)
    _, (wanted,), (grads,) = step(subject, Way(1, fused=False))
    _, losses, found = step(subject, Way(1, fused=False, cp=2))
    _, (undropped,), _ = step(Model.of("gpt2"), Way(1, fused=False))
    assert not torch.equal(wanted, undropped)
    for loss, mine in zip(losses, found, strict=True):
        assert float(loss) == pytest.approx(float(wanted), rel=1e-12)
        for key, grad in grads.items():
            torch.testing.assert_close(mine[key], grad, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("name", ["gpt2", "bert", pytest.param("t5", marks=pytest.mark.slow)])
def test_dropout_is_the_same_in_every_layout_of_stages(name):
    """Hidden dropout and that of attention, of which each rank draws that of its heads."""
    subject = Model.of(name, **DROPS[name])
    drawn = [node for node in program(subject).graph.nodes if is_random(node)]
    assert drawn
    for fused in (False, True):
        _, losses, grads = step(subject, Way(1, fused=fused, cp=2))
        ways = Way(1, stages=2, recompute=True, fused=fused, cp=2)
        _, again, found = step(subject, ways)
        assert all(torch.equal(loss, losses[0]) for loss in (*losses, *again))
        for one, two in zip(grads, found, strict=True):
            for key in one:
                torch.testing.assert_close(one[key], two[key], rtol=1e-10, atol=1e-14)


class Attending(nn.Module):
    """A layer of attention, and what ``read`` does with its result x [b, s, h].

    positional: whether positions are an input.
    embeds:     whether embeddings are given in place of tokens.
    """

    def __init__(self, loss, read=lambda x: x, hidden=16, classes=96):
        super().__init__()
        self.table = nn.Embedding(96, hidden)
        self.places = nn.Embedding(24, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, classes)
        self.loss = loss
        self.read = read

    def forward(self, labels, input_ids=None, position_ids=None, inputs_embeds=None):
        x = self.table(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(x.shape[1])[None]
        x = x + self.places(position_ids)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).unbind(2)
        heads = (value.transpose(1, 2) for value in (q, k, v))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return {"loss": self.loss(self.head(self.read(self.norm(x))), labels)}


def tokens(seed, size=(2, 8), most=96):
    return torch.randint(0, most, size, generator=torch.Generator().manual_seed(seed))


def next_token(logits, labels, **changes):
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), **changes)


def chosen(logits, labels):
    """Cross entropy as many write it."""
    own = logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    return -(own * (labels > 10)).sum() / (labels > 10).sum()


def weighted(logits, labels):
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (each * (labels.flatten() % 3)).mean()


def preference(logits, labels):
    """The log-probability of one half of the rows over that of the other."""
    own = logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1).sum(-1)
    better, worse = own.chunk(2)
    return -F.logsigmoid(0.1 * (better - worse)).mean()


def without_first(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


LOSSES = {
    "mean": lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
    "next token": next_token,
    "sum": lambda logits, labels: next_token(logits, labels, reduction="sum") / 10,
    "label smoothing": lambda logits, labels: next_token(logits, labels, label_smoothing=0.1),
    "each": weighted,
    "gather": chosen,
    "preference": preference,
    "shifted logits": without_first,
    "classes second": lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels),
    "squares": lambda logits, labels: (logits.mean(-1) - labels).square().mean(),
    "entropy": lambda logits, labels: -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean(),
    "z": lambda logits, labels: next_token(logits, labels) + logits.logsumexp(-1).square().mean(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_those_of_whole_sequences(loss):
    subject = Model(
        randomise(Attending(LOSSES[loss])), {"input_ids": tokens(1), "labels": tokens(2)}
    )
    measured(subject)
    check(subject, Way(1, stages=2, recompute=True, cp=2))
    check(subject, Way(1, fused=False, cp=4))


READS = {
    "last position": lambda x: x[:, -1:] + x,
    "first position": lambda x: x - x[:, :1],
    "mean over the sequence": lambda x: x - x.mean(1, keepdim=True),
    "along the sequence": lambda x: x.cumsum(1) + x.flip(1),
    "shifted": lambda x: x + F.pad(x, (0, 0, 1, 0))[:, :-1],
    "convolution": lambda x: x + F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "every row": lambda x: (x.reshape(16, 16) * 2).tanh().view(2, 8, 16),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1) * 1.5,
    "in place": lambda x: (x * 1.0).mul_(0.5).add_(x),
    "part of it written": lambda x: x.clone().index_fill(1, torch.tensor([3]), 0.0),
    "sorted": lambda x: x.sort(1).values + x.sort(-1).values,
    "blocks": lambda x: x.view(2, 4, 2, 16).mean(2, keepdim=True).expand(2, 4, 2, 16).flatten(1, 2),
    "masked": lambda x: x * (torch.arange(8) < 5)[None, :, None],
    "norm": lambda x: x / x.norm(dim=1, keepdim=True),
}


@pytest.mark.parametrize("read", READS)
def test_what_reads_many_positions_is_exact(read):
    model = Attending(LOSSES["mean"], READS[read])
    subject = Model(randomise(model), {"input_ids": tokens(1), "labels": tokens(2)})
    check(subject, Way(1, stages=2, recompute=True, cp=2))
    check(subject, Way(1, cp=4))


def test_sequences_are_scored_from_their_last_position():
    model = Attending(F.cross_entropy, lambda x: x[:, -1], classes=3)
    batch = {"input_ids": tokens(1, (3, 8)), "labels": tokens(2, (3,), 3)}
    check(Model(randomise(model), batch), Way(1, stages=2, recompute=True, cp=2))


def test_sequences_are_scored_from_their_mean():
    model = Attending(lambda y, labels: F.mse_loss(y[:, 0], labels), lambda x: x.mean(1), classes=1)
    batch = {"input_ids": tokens(1, (3, 8)), "labels": torch.randn(3, dtype=torch.float64)}
    check(Model(randomise(model), batch), Way(1, stages=2, recompute=True, cp=2))


def test_tokens_are_classified():
    model = Attending(LOSSES["mean"], classes=5)
    labels = tokens(2, most=5)
    labels[:, 5:] = -100
    subject = Model(randomise(model), {"input_ids": tokens(1), "labels": labels})
    measured(subject)
    check(subject, Way(1, stages=2, recompute=True, cp=2))


def test_no_label_counts():
    """What one process computes, a quotient of nothing by nothing."""
    labels = torch.full((2, 8), -100)
    subject = Model(
        randomise(Attending(LOSSES["mean"])), {"input_ids": tokens(1), "labels": labels}
    )
    _, losses, _ = step(subject, Way(1, cp=2))
    assert all(loss.isnan() for loss in losses)


def test_positions_are_an_input():
    batch = {"input_ids": tokens(1), "labels": tokens(2), "position_ids": tokens(3, most=24)}
    subject = Model(randomise(Attending(next_token)), batch)
    measured(subject)
    check(subject, Way(1, stages=2, recompute=True, cp=2))
    batch["position_ids"] = torch.arange(8).flip(0)[None]
    check(Model(subject.model, batch), Way(1, cp=2))


def test_embeddings_are_given_in_place_of_tokens():
    embeds = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = randomise(Attending(next_token))
    del model.table
    subject = Model(model, {"inputs_embeds": embeds, "labels": tokens(2)})
    measured(subject)
    check(subject, Way(1, stages=2, recompute=True, cp=2))


class Gated(nn.Module):
    """Heads of positions lie one after the other where they are normed and gated."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(96, 16)
        self.project = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))
        self.out = nn.Linear(16, 96)

    def forward(self, input_ids, labels):
        x = self.table(input_ids)
        q, k, v, gate = (linear(x).unflatten(-1, (4, 4)) for linear in self.project)
        heads = (each.transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
        rows = F.rms_norm(y.reshape(-1, 4), (4,)) * F.silu(gate.reshape(-1, 4))
        logits = self.out(rows.view(2, 8, 16))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def test_heads_of_positions_go_back_before_they_meet_what_is_of_positions():
    subject = Model(randomise(Gated()), {"input_ids": tokens(1), "labels": tokens(2)})
    measured(subject)
    assert collectives(program(subject)) == {"exchange": 4, "reduce_sum": 1}
    check(subject, Way(1, stages=2, recompute=True, cp=2))
    check(subject, Way(2, cp=2))


class Crossing(nn.Module):
    """A decoder that attends to an encoder of another length."""

    def __init__(self, hidden=16):
        super().__init__()
        self.table = nn.Embedding(96, hidden)
        self.encoder = nn.TransformerEncoderLayer(hidden, 4, 32, 0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(hidden, 4, 32, 0.0, batch_first=True)
        self.head = nn.Linear(hidden, 96)

    def forward(self, input_ids, decoder_input_ids, labels):
        memory = self.encoder(self.table(input_ids))
        x = self.decoder(self.table(decoder_input_ids), memory)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize("lengths", [(8, 4), (4, 12), (8, 8), (9, 4), (8, 5)])
def test_an_encoder_has_another_length(lengths):
    source, target = lengths
    batch = {
        "input_ids": tokens(1, (2, source)),
        "decoder_input_ids": tokens(2, (2, target)),
        "labels": tokens(3, (2, target)),
    }
    check(Model(randomise(Crossing()), batch), Way(1, stages=2, recompute=True, cp=2))


@pytest.mark.parametrize("samples", [1, 2, 4, 8])
def test_samples_may_be_as_many_as_positions_or_heads(samples):
    batch = {"input_ids": tokens(1, (samples, 4)), "labels": tokens(2, (samples, 4))}
    check(Model(randomise(Attending(next_token)), batch), Way(1, cp=2))
    check(Model(randomise(Attending(next_token)), batch), Way(1, cp=4))
