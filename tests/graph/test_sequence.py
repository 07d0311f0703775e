"""Captured models on parts of the sequence: loss, gradients, what is sent, dropout masks."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_merak import ops
from megatron_merak.errors import PlanError
from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.ir.nodes import is_random
from megatron_merak.graph.lowering.rewrite import rewrite
from megatron_merak.graph.lowering.split import split
from megatron_merak.graph.lowering.undropped import undropped
from megatron_merak.graph.measure import measure
from megatron_merak.graph.partition.cut import cut
from megatron_merak.graph.sharding.shard import shard
from tests.fuzz.check import Subject, Way, step
from tests.graph import lockstep
from tests.graph.tiny import FAMILIES, gradients, randomise, tiny
from tests.zoo.doubled import doubled

FAST = "llama gpt2 gemma2 qwen3 mixtral bert t5".split()
DROPS = {
    "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "bert": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.1},
    "t5": {"dropout_rate": 0.2},
}


@pytest.fixture(autouse=True)
def in_fp64():
    """Where models ask for fp32, too."""
    with doubled():
        yield


class Model:
    """A family of models with its capture, to run like a random module of the fuzz."""

    made = Subject.made

    def __init__(self, model, batch, dtype=torch.float64):
        self.model = model.to(dtype)
        if hasattr(model, "set_experts_implementation"):  # torch has no grouped product in fp64
            model.set_experts_implementation("eager")
        self.batch = batch
        self.captured = capture(self.model, batch, dtype=dtype)
        self.chain = cut(self.captured)
        self.dtype = dtype

    @classmethod
    def of(cls, name, **overrides):
        real, _, batch = tiny(name, **overrides)
        return cls(randomise(real()), batch)

    def programs(self, tp, sequence=True):
        sharding = shard(self.captured, tp)
        arguments = (self.captured, self.chain, sharding)
        return [rewrite(*arguments, r, tp, sequence_parallel=sequence) for r in range(tp)]


def collectives(program):
    names = (node.target.__name__ for node in program.graph.nodes if node.op == "call_function")
    marks = (
        "copy_in",
        "reduce_sum",
        "stack",
        "reduce_scatter",
        "all_gather",
        "exchange",
        "rotate",
        "turn_back",
    )
    return Counter(name for name in names if name in marks)


def check(subject, way):
    """Compare the loss and every gradient of all ranks with those of one process, in fp64."""
    sharding, losses, found = step(subject, way)
    loss, grads = gradients(subject.model, subject.batch)
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for rank, (own, mine) in enumerate(zip(losses, found, strict=True)):
        assert float(own) == pytest.approx(float(loss), rel=1e-12)
        for name, grad in grads.items():
            expected = lockstep.part(grad, sharding.tensors[name], rank % way.tp, way.tp)
            torch.testing.assert_close(mine[name], expected, rtol=1e-8, atol=1e-10 * largest)


@pytest.mark.parametrize("name", FAST)
def test_loss_and_every_gradient(name):
    subject = Model.of(name)
    check(subject, Way(2, stages=2, recompute=True, sequence=True))


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("phimoe", "gpt_oss")])
def test_every_family(name, tp):
    check(Model.of(name), Way(tp, sequence=True))


def test_an_all_reduce_becomes_two_halves_of_one():
    subject = Model.of("llama")
    before, after = (collectives(subject.programs(2, parts)[0]) for parts in (False, True))
    assert before == {"reduce_sum": 5, "copy_in": 5, "stack": 1}
    assert after == {"reduce_scatter": 5, "all_gather": 5, "copy_in": 5, "stack": 1}


@pytest.mark.parametrize("name", DROPS)
def test_dropout_draws_the_masks_that_it_draws_without(name):
    subject = Model.of(name, **DROPS[name])
    for fused in (False, True):
        _, losses, grads = step(subject, Way(2, fused=fused))
        ways = [Way(2, fused=fused), Way(2, stages=2, recompute=True, fused=fused)]
        for way in ways:
            _, again, found = step(subject, replace(way, sequence=True))
            assert all(map(torch.equal, again, losses))
            for one, two in zip(grads, found, strict=True):
                for key in one:
                    torch.testing.assert_close(one[key], two[key], rtol=1e-10, atol=1e-14)


def test_dropout_can_be_left_out():
    """As trials of two ways to run a batch do."""
    program = Model.of("gpt2", **DROPS["gpt2"]).programs(2)[0]
    dropped = [node.target for node in program.graph.nodes if is_random(node)]
    assert ops.dropout_of_parts in dropped
    undropped(program.graph)
    assert not any(map(is_random, program.graph.nodes))


def test_values_that_cross_units_are_parts_and_are_priced_so():
    subject = Model.of("gpt2")
    sharding = shard(subject.captured, 2)
    arguments = (subject.captured, subject.chain, sharding, 2)
    full, parts = (measure(*arguments, sequence_parallel=parts) for parts in (False, True))
    units = len(subject.chain.units)
    for border in range(1, units):
        (value,) = split(subject.programs(2)[0], range(border, units)).sources
        assert value.shape == (2, 8, 32)
    for before, after in zip(full[1:-1], parts[1:-1], strict=True):
        assert after.output_bytes == before.output_bytes // 2
        assert after.saved_bytes < before.saved_bytes
        assert after.reduced_bytes == (before.reduced_bytes[0], before.reduced_bytes[1] * 3 // 2)


def test_linear_layers_gather_what_they_read_again():
    program = Model.of("gpt2").programs(2)[0]
    parts = split(program, range(0, 3)).parts
    gathered = [entry for part in parts for entry in part.ins if "all_gather" in entry.value]
    assert len(gathered) == 2 and all(entry.regather for entry in gathered)


def test_a_length_that_the_ranks_do_not_share_is_refused_by_name():
    subject = Model.of("llama", length=15)
    sharding = shard(subject.captured, 2)
    with pytest.raises(PlanError) as caught:
        measure(subject.captured, subject.chain, sharding, 2, sequence_parallel=True)
    assert str(caught.value) == (
        "--sequence-parallel True: sequences of 15 positions cannot be shared evenly by 2 tensor-parallel ranks. "
        "Pad them to a multiple of 2, or leave it out."
    )
    check(subject, Way(2, sequence=True))  # as a later batch of that length is computed


class Reading(nn.Module):
    """Between its layers it does what ``read`` does with x [b, s, h]."""

    def __init__(self, read, hidden=16):
        super().__init__()
        self.table = nn.Embedding(96, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.into, self.out = nn.Linear(hidden, 64), nn.Linear(64, hidden)
        self.head = nn.Linear(hidden, 96, bias=False)
        self.places = nn.Parameter(torch.zeros(6, hidden))
        self.read = read

    def forward(self, input_ids, labels):
        x = self.table(input_ids) + self.places
        x = x + self.out(self.into(self.norm(x)).tanh())
        x = self.read(self.norm(x))
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + x.square().mean()}


READS = {
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "along the sequence": lambda x: x.cumsum(1) + x.flip(1),
    "mean over the sequence": lambda x: x - x.mean(1, keepdim=True),
    "first position": lambda x: x + x[:, :1],
    "every row": lambda x: (x.view(12, 16) * 2).tanh().view(2, 6, 16),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1) * 1.5,
    "in place": lambda x: (x * 1.0).mul_(0.5).add_(x),
    "in pieces": lambda x: torch.cat(x.split(8, -1)[::-1], -1),
    "sorted": lambda x: x.sort(-1).values,
    "noise": lambda x: x * (torch.zeros_like(x) + 1),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("tp", [2, 3])
def test_what_cannot_be_computed_on_parts_is_computed_on_all(read, tp):
    torch.manual_seed(3)
    ids = torch.randint(0, 96, (2, 6))
    subject = Model(randomise(Reading(READS[read])), {"input_ids": ids, "labels": ids.flip(0)})
    assert collectives(subject.programs(tp)[0])["reduce_scatter"] == 2
    check(subject, Way(tp, sequence=True))


class Pooled(nn.Module):
    """What follows its sharded layers has no sequence any more."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return {"loss": self.out(self.into(x.mean(1)).tanh()).square().mean()}


def test_a_model_without_anything_to_shard_is_refused_by_name():
    subject = Model(Pooled(), {"x": torch.randn(3, 6, 16, dtype=torch.float64)})
    sharding = shard(subject.captured, 2)
    with pytest.raises(PlanError) as caught:
        measure(subject.captured, subject.chain, sharding, 2, sequence_parallel=True)
    assert "--sequence-parallel True: " in str(caught.value)
