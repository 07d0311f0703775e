"""What propagation decides: for known families, under rules and pins, and when nothing can be
sharded.
"""

import time
from functools import cache

import pytest
import torch

from megatron_merak.errors import PlanError
from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.sharding.roles import roles
from megatron_merak.graph.sharding.shard import TensorRules, shard
from tests.graph.tiny import tiny


@cache
def captured(name, outputs=("loss",), training=True, **overrides):
    _, empty, batch = tiny(name, **overrides)
    model = empty()
    return capture(model if training else model.eval(), batch, training=training, outputs=outputs)


def sharded(sharding, part=""):
    """name -> (dim, blocks, padded) of the sharded parameters whose name contains ``part``."""
    tensors = {
        name: t for name, t in sharding.tensors.items() if part in name and t.dim is not None
    }
    return {name: (t.dim, t.blocks, t.padded) for name, t in tensors.items()}


def test_llama_is_divided_as_in_megatron():
    sharding = shard(captured("llama"), 2)
    assert sharded(sharding, "layers.0.") == {
        "model.layers.0.self_attn.q_proj.weight": (0, 1, None),
        "model.layers.0.self_attn.k_proj.weight": (0, 1, None),
        "model.layers.0.self_attn.v_proj.weight": (0, 1, None),
        "model.layers.0.self_attn.o_proj.weight": (1, 1, None),
        "model.layers.0.mlp.gate_proj.weight": (0, 1, None),
        "model.layers.0.mlp.up_proj.weight": (0, 1, None),
        "model.layers.0.mlp.down_proj.weight": (1, 1, None),
    }
    assert sharded(sharding, "embed") == {"model.embed_tokens.weight": (0, 1, None)}
    assert sharding.share() < 0.51
    assert set(sharding.tensors) == set(sharding.reasons) == set(captured("llama").shapes)


def test_fused_weights_get_blocks():
    gpt2 = sharded(shard(captured("gpt2"), 2), "h.0.")
    assert gpt2["transformer.h.0.attn.c_attn.weight"] == (1, 3, None)
    assert gpt2["transformer.h.0.attn.c_attn.bias"] == (0, 3, None)
    phi3 = sharded(shard(captured("phi3"), 2), "layers.0.")
    assert phi3["model.layers.0.self_attn.qkv_proj.weight"] == (0, (32, 16, 16), None)
    assert phi3["model.layers.0.mlp.gate_up_proj.weight"] == (0, 2, None)


def test_experts_are_divided_inside():
    mixtral = sharded(shard(captured("mixtral"), 2), "layers.0.mlp")
    assert {dim for dim, _, _ in mixtral.values()} == {1, 2} and len(mixtral) == 2


def test_key_value_heads_that_do_not_divide_stay_whole():
    attention = sharded(shard(captured("llama"), 4), "layers.0.self_attn")
    assert {name.split(".")[-2] for name in attention} == {"q_proj", "o_proj"}


@pytest.mark.parametrize(("tp", "multiple", "padded"), [(2, 1, 98), (4, 1, 100), (2, 16, 128)])
def test_a_vocabulary_that_does_not_divide_is_padded(tp, multiple, padded):
    sharding = shard(captured("llama", vocab_size=97), tp, vocabulary_multiple=multiple)
    assert sharded(sharding, "embed") == {"model.embed_tokens.weight": (0, 1, padded)}
    assert sharded(sharding, "lm_head") == {"lm_head.weight": (0, 1, padded)}


def test_one_rank_holds_everything():
    sharding = shard(captured("llama"), 1)
    assert sharding.share() == 1 and not sharding.decisions


def test_every_reason_is_a_sentence_about_the_parameter():
    reasons = shard(captured("llama"), 2).reasons
    assert reasons["model.layers.0.self_attn.q_proj.weight"].startswith("column parallel")
    assert reasons["model.layers.0.mlp.down_proj.weight"].startswith("row parallel")
    assert "gate_proj" in reasons["model.layers.0.mlp.down_proj.weight"]
    assert (
        reasons["model.norm.weight"] == "replicated: mul in model.norm works on replicated values"
    )


def test_rules_are_obeyed():
    rules = TensorRules.parse(
        "*.up_proj.weight = row\n *.q_proj.weight=column; lm_head.weight=replicate"
    )
    sharding = shard(captured("llama"), 2, rules)
    assert sharding.tensors["lm_head.weight"].dim is None
    assert "lm_head.weight=replicate" in sharding.reasons["lm_head.weight"]
    assert sharding.tensors["model.layers.1.mlp.up_proj.weight"].dim == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("*.nothing.weight=row", "matches none of the model's parameters"),
        ("model.norm.weight=column", "it is replicated: mul in model.norm"),
        ("*.down_proj.weight=column", "it is row parallel"),
        ("*.q_proj.weight=diagonal", "a rule is PATTERN=CHOICE"),
        ("*.q_proj.weight", "a rule is PATTERN=CHOICE"),
    ],
)
def test_a_rule_that_cannot_be_met_is_refused(text, words):
    with pytest.raises(PlanError, match=words.replace("*", r"\*")):
        shard(captured("llama"), 2, TensorRules.parse(text))


def test_an_evaluation_capture_follows_the_training_one():
    pins = shard(
        captured("gpt2", vocab_size=97), 2, TensorRules.parse("*.h.1.mlp.c_fc.weight=replicate")
    ).tensors
    sharding = shard(captured("gpt2", ("loss", "logits"), False, vocab_size=97), 2, pins=pins)
    assert sharding.tensors == pins
    assert (
        pins["transformer.h.1.mlp.c_fc.weight"].dim is None
        and pins["transformer.h.0.mlp.c_fc.weight"].dim == 1
    )


def test_a_model_without_anything_to_divide_is_refused():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(5, 7)

        def forward(self, x):
            return self.linear(x).square().mean()

    with pytest.raises(
        PlanError, match=r"no weight .* its 7 output features are not divisible by 2"
    ):
        shard(capture(Odd(), {"x": torch.ones(2, 5)}), 2)


def test_the_captured_graph_stays_as_it_is():
    graph = captured("gpt2").module.graph
    before = str(graph)
    shard(captured("gpt2"), 2)
    assert str(graph) == before


def test_planning_is_quick():
    capturing = captured("llama", num_hidden_layers=24)
    nodes = len(capturing.module.graph.nodes)
    start = time.process_time()
    shard(capturing, 2)
    assert time.process_time() - start < 1e-3 * nodes


class Pairs(torch.nn.Module):
    """Blocks of two pairs of layers: features of the first are sorted, which parts cannot be."""

    def __init__(self, blocks=3):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleList(map(torch.nn.Linear, *SIZES)) for _ in range(blocks)
        )

    def forward(self, x):
        for l0, l1, l2, l3 in self.blocks:
            x = x + l1(l0(x).sort(-1).values)
            x = x + l3(l2(x).tanh())
        return x.square().mean()


SIZES = (8, 16, 8, 16), (16, 8, 16, 8)


def test_what_holds_of_a_weight_holds_in_all_layers_and_of_no_other_weight():
    capturing = capture(Pairs(), {"x": torch.ones(2, 8)})
    found = sharded(shard(capturing, 2), "weight")
    assert set(found) == {f"blocks.{k}.{i}.weight" for k in range(3) for i in (1, 2, 3)}
    named = roles(capturing)
    assert len({named[f"blocks.{k}.{i}.weight"] for k in range(3) for i in range(4)}) == 4
