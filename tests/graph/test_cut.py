"""Chains of units: natural, stable, and exactly the model that was captured."""

import pytest
import torch
from torch import nn

from megatron_merak.errors import PlanError
from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.ir.nodes import op_name
from megatron_merak.graph.partition.cut import ALGORITHMS, align, cut
from megatron_merak.graph.partition.loads import unit_loads
from tests.graph.chains import (
    DTYPES,
    FAMILIES,
    Loss,
    captured_family,
    check_chain,
    crossings,
    imbalance,
    run_stages,
    stages,
)
from tests.graph.tiny import gradients, randomise, tiny


@pytest.mark.parametrize("name", FAMILIES)
def test_chained_units_are_the_model(name):
    real, _, batch = tiny(name)
    captured = captured_family(name)
    model = randomise(real()).to(DTYPES.get(name))
    loss, grads = gradients(model, batch)
    parameters = dict(model.named_parameters())
    for algorithm in ALGORITHMS:
        chain = cut(captured, algorithm)
        check_chain(captured, chain)
        for count in (2, 3, len(chain.units)):
            model.zero_grad(set_to_none=True)
            (found,) = run_stages(captured, chain, stages(chain, count), parameters, batch)
            found.backward()
            assert torch.equal(found, loss)
            for key, grad in grads.items():
                error = (parameters[key].grad - grad).abs().max()
                assert error <= (1e-11 * grad.abs().max() if name == "bloom" else 0), (
                    algorithm,
                    count,
                    key,
                )


def test_two_units_per_decoder_layer():
    captured = captured_family("llama")
    chain = cut(captured)
    layers = [f"model.layers.{i}.{part}" for i in range(2) for part in ("self_attn", "mlp")]
    assert chain.names == ("model.embed_tokens", *layers, "lm_head")
    assert crossings(chain) == [1] * 5
    assert chain.parameters[0] == ("model.embed_tokens.weight",)
    assert chain.parameters[2] == (
        "model.layers.0.post_attention_layernorm.weight",
        *(f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    )
    assert chain.parameters[-1] == ("model.norm.weight", "lm_head.weight")


NAMES = {
    "gpt2": "transformer.wte+wpe transformer.h.0.attn transformer.h.0.mlp transformer.h.1.attn transformer.h.1.mlp "
    "lm_head",
    "gptj": "transformer.wte transformer.h.0 transformer.h.1 lm_head",
    "gpt_neox": "gpt_neox.embed_in gpt_neox.layers.0 gpt_neox.layers.1 lm_head",
    "mixtral": "model.embed_tokens model.layers.0.self_attn model.layers.0.mlp model.layers.1.self_attn "
    "model.layers.1.mlp lm_head",
    "vit": "vit.embeddings.patch_embeddings.projection vit.layers.0.attention vit.layers.0.mlp vit.layers.1.attention "
    "vit.layers.1.mlp classifier",
    "bert": "bert.embeddings bert.encoder.layer.0.attention bert.encoder.layer.0.intermediate+output "
    "bert.encoder.layer.1.attention bert.encoder.layer.1.intermediate+output cls.predictions.transform.dense "
    "cls.predictions.decoder",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_one_value_crosses_between_layers(name):
    captured = captured_family(name)
    chain = cut(captured)
    assert chain.names == tuple(NAMES[name].split())
    assert crossings(chain) == [1] * (len(chain.units) - 1)


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_decoders_of_encoders_send_two_values(name):
    """Each decoder layer sends the encoder's output beside its own, until the last that reads it;
    what T5's position biases share is computed once and crosses too."""
    captured = captured_family(name)
    chain = cut(captured)
    begin = len(chain.units) - 7
    assert crossings(chain) == [1] * begin + [2, 2, 2, 2, 1, 1]
    sides = [sum(chain.kinds[node] == "side" for node in crossing) for crossing in chain.crossing]
    assert sides == ([0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0] if name == "t5" else [0] * len(sides))


@pytest.mark.parametrize(
    ("name", "cuts"), [("llama", (5, 4)), ("mixtral", (5, 2)), ("t5", (11, 4))]
)
def test_both_algorithms(name, cuts):
    """The paper's never cuts more often; with fewer cuts the balance is no better."""
    chains = [cut(captured_family(name), algorithm) for algorithm in ALGORITHMS]
    assert tuple(len(chain.crossing) for chain in chains) == cuts
    assert all(imbalance(chains[0], count) <= imbalance(chains[1], count) for count in (2, 3))


def test_farthest_dependency_merges_what_reaches_back():
    """Pieces of llama end behind the first node after which nothing else is read: the residual
    sums.
    """
    chain = cut(captured_family("llama"), "farthest-dependency")
    assert [op_name(crossing[0]) for crossing in chain.crossing] == ["add"] * 4
    assert crossings(chain) == [1] * 4 and chain.names[-1] == "lm_head"


def test_values_with_many_users_are_handed_on():
    """Of an encoder's output that two decoder layers read the paper's rule makes one piece; four
    layers make it common, so that it crosses from piece to piece."""
    captures = captured_family("bart"), captured_family("bart", decoder_layers=4)
    few, many = (cut(captured, "farthest-dependency") for captured in captures)
    assert max(crossings(few)) == 1 and max(crossings(many)) == 2
    assert len(many.units) - len(few.units) > 2


def test_the_limit_of_crossing_values():
    captured = captured_family("t5")
    assert max(crossings(cut(captured, max_crossing=1))) == 1
    assert cut(captured, max_crossing=0).units == (sum(cut(captured).units, ()),)


@pytest.mark.parametrize("name", ["llama", "t5", "clip"])
def test_chains_of_one_model_correspond(name):
    """Captures of other batches, and of evaluation, have the same units, cut the same way by
    themselves or aligned.
    """
    captured = captured_family(name)
    references = [cut(captured, algorithm) for algorithm in ALGORITHMS]
    others = [captured_family(name, batch=3, length=24), captured_family(name, training=False)]
    for other in others:
        chain = cut(other)
        assert chain.names == references[0].names and chain.parameters == references[0].parameters
        for reference in references:
            aligned = align(chain, reference)
            check_chain(other, aligned)
            assert aligned.names == reference.names and aligned.parameters == reference.parameters


def test_dropout_moves_no_border():
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    training, evaluation = (cut(captured_family("bert", mode, **dropout)) for mode in (True, False))
    assert align(evaluation, training).parameters == training.parameters == evaluation.parameters


def test_a_loop_over_the_batch_moves_no_border():
    class Model(Loss):
        def body(self, x):
            x = self.parts[0](x).relu()
            x = torch.cat([self.parts[2](self.parts[1](row).relu()) for row in x.split(1)]).relu()
            return self.parts[3](x)

    model = Model(*(nn.Linear(8, 8) for _ in range(4)))
    one, other = (capture(model, {"x": torch.randn(n, 8), "y": torch.randn(n, 8)}) for n in (6, 4))
    chain, aligned = cut(one), align(cut(other), cut(one))
    check_chain(other, aligned)
    assert (
        len(chain.units) == 3
        and chain.names == aligned.names
        and chain.parameters == aligned.parameters
    )


def test_evaluation_hands_out_logits():
    _, empty, batch = tiny("t5")
    captured = capture(empty(), batch, training=False, outputs=("loss", "logits"))
    for algorithm in ALGORITHMS:
        aligned = align(cut(captured), cut(captured_family("t5"), algorithm))
        check_chain(captured, aligned)
        assert all(
            node in aligned.units[-1]
            for node in captured.module.graph.output_node().all_input_nodes
        )


def test_repeated_layers_are_told_apart_by_their_order():
    class Model(Loss):
        def body(self, x):
            for _ in range(4):
                x = self.parts[0](x).relu()
            return self.parts[1](x)

    model = Model(nn.Linear(8, 8), nn.Linear(8, 8))
    one, other = (
        cut(capture(model, {"x": torch.randn(n, 8), "y": torch.randn(n, 8)})) for n in (6, 4)
    )
    assert align(other, one).names == (
        "parts.0#1",
        "parts.0#2",
        "parts.0#3",
        "parts.0#4",
        "parts.1",
    )
    assert [op_name(unit[0]) for unit in align(other, one).units] == ["linear"] * 5


def test_evaluation_may_do_without_a_parameter_but_not_add_one():
    class Model(Loss):
        def body(self, x):
            x = self.parts[1](self.parts[0](x).relu())
            return self.parts[2](x + self.parts[3].bias if self.training else x)

    model, batch = (
        Model(*(nn.Linear(8, 8) for _ in range(4))),
        {"x": torch.randn(6, 8), "y": torch.randn(6, 8)},
    )
    training, evaluation = (cut(capture(model, batch, training=mode)) for mode in (True, False))
    assert align(evaluation, training).names == training.names == ("parts.0", "parts.1", "parts.2")
    with pytest.raises(PlanError, match="parts.3.bias"):
        align(training, evaluation)


def test_a_capture_may_do_without_units_but_not_have_others():
    """As one of evaluation without a teacher that only training asks."""
    two, three = (cut(captured_family("gpt2", num_hidden_layers=count)) for count in (2, 3))
    aligned = align(two, three)
    empty = [name for name, unit in zip(aligned.names, aligned.units, strict=True) if not unit]
    assert aligned.names == three.names and empty == [name for name in three.names if ".2." in name]
    with pytest.raises(PlanError, match="does not fit it"):
        align(three, two)


def test_unknown_algorithm():
    with pytest.raises(
        PlanError, match="graph sharding farthest: the algorithms are cut and farthest-dependency"
    ):
        cut(captured_family("gpt2"), "farthest")


def test_loads():
    captured = captured_family("gpt2")
    loads = unit_loads(cut(captured))
    tokens, hidden, vocabulary, heads = 2 * 16, 32, 96, 1
    # causal: half of the scores
    attention = 2 * tokens * hidden * 4 * hidden + 2 * tokens * 16 * hidden * heads
    mlp = 2 * tokens * hidden * 2 * 4 * hidden
    assert [load.flops for load in loads] == [
        0,
        attention,
        mlp,
        attention,
        mlp,
        2 * tokens * hidden * vocabulary,
    ]
    assert [load.output_bytes for load in loads] == [4 * tokens * hidden] * 5 + [4]
    assert loads[0].parameters == ("transformer.wte.weight", "transformer.wpe.weight")
    assert loads[-1].shared == ("transformer.wte.weight",)
    names = [name for load in loads for name in load.parameters]
    assert sorted(names) == sorted(captured.shapes)
