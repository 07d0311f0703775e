"""A plan says how parameters are sharded: the ranks then compute with exactly that, or it is
refused by name.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from megatron_merak.errors import PlanError
from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.sharding.assumptions import Assumptions
from megatron_merak.graph.sharding.pins import spec_of
from megatron_merak.graph.sharding.propagate import propagated
from megatron_merak.graph.sharding.roles import roles
from megatron_merak.graph.sharding.rules import RULES, STARTERS
from megatron_merak.graph.sharding.shard import TensorRules, shard
from megatron_merak.plan import TensorSharding
from tests.graph import lockstep
from tests.graph.test_shard import captured
from tests.graph.tiny import FAMILIES, gradients, randomise, tiny

# a bias with the rows of a tied table
TIED = {"bert.embeddings.word_embeddings.weight": "cls.predictions.bias"}
LAYERS = "layers.0.", "h.0.", "layer.0.", "block.0."


@cache
def subject(name):
    """(capture, model, batch, loss, gradients) of a family, random weights."""
    torch.manual_seed(0)
    real, _, batch = tiny(name)
    model = randomise(real())
    return capture(model, batch), model, batch, *gradients(model, batch)


def whole(tensor):
    return replace(tensor, dim=None, blocks=1, padded=None)


def ways(tensor):
    """(what is edited, the tensor) for every other way in which a plan may shard a matrix."""
    features = len(tensor.shape) - 2
    if any(part in tensor.name for part in ("embed", "wte", "wpe", "shared", "lm_head")):
        yield "vocabulary to another padding", replace(tensor, padded=104)
        yield "vocabulary to features", replace(tensor, dim=1)
    else:
        yield "to the other dimension", replace(tensor, dim=2 * features + 1 - tensor.dim, blocks=1)
        yield "to more blocks", replace(tensor, blocks=2 if tensor.blocks != 2 else 1)
    yield "to whole", whole(tensor)


def follow(tensors, edited, before):
    """The plan with one tensor edited, and its bias with it: sharded as its output features are."""
    plan = dict(tensors) | {edited.name: edited}
    bias = TIED.get(edited.name, edited.name.removesuffix("weight") + "bias")
    if bias in plan and bias != edited.name:
        was_column = plan[bias].dim == 0
        is_column = edited.dim == before.dim if was_column else edited.dim not in (None, before.dim)
        sharded = replace(plan[bias], dim=0, blocks=edited.blocks, padded=edited.padded)
        plan[bias] = sharded if is_column else whole(plan[bias])
    return plan


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gpt2",
        pytest.param("t5", marks=pytest.mark.long),
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("mixtral", "bert")),
    ],
)
def test_every_edit_of_one_weight_is_obeyed_and_changes_no_gradient(name):
    capturing, model, batch, loss, grads = subject(name)
    tensors = shard(capturing, 2).tensors
    done = []
    for tensor in tensors.values():
        inside = any(part in tensor.name for part in LAYERS) or not any(
            c.isdigit() for c in tensor.name
        )
        if tensor.dim is None or len(tensor.shape) < 2 or not inside:
            continue
        for text, edited in ways(tensor):
            plan = follow(tensors, edited, tensor)
            sharding = shard(capturing, 2, pins=plan, complete=True)
            assert sharding.tensors == plan
            assert "as the plan says" in sharding.reasons[edited.name]
            difference, worst, where, _ = lockstep.compare(
                capturing, sharding, model, batch, loss, grads
            )
            assert difference <= 1e-5 and worst <= 1e-4, (
                tensor.name,
                text,
                difference,
                where,
                worst,
            )
            done.append(text)
    assert done.count("to the other dimension") >= 4 and "vocabulary to another padding" in done


@pytest.mark.parametrize("tp", [2, 4])
def test_a_plan_may_hold_everything_whole(tp):
    capturing, model, batch, loss, grads = subject("llama")
    plan = {name: whole(tensor) for name, tensor in shard(capturing, tp).tensors.items()}
    sharding = shard(capturing, tp, pins=plan, complete=True)
    assert sharding.tensors == plan and sharding.share() == 1
    difference, worst, where, _ = lockstep.compare(capturing, sharding, model, batch, loss, grads)
    assert difference == 0 and worst == 0, where


def test_a_plan_may_divide_what_propagation_does_not():
    capturing, model, batch, loss, grads = subject("llama")
    tensors = shard(capturing, 2).tensors
    plan = tensors | {"model.norm.weight": replace(tensors["model.norm.weight"], dim=0)}
    sharding = shard(capturing, 2, pins=plan, complete=True)
    assert sharding.tensors == plan
    difference, worst, where, _ = lockstep.compare(capturing, sharding, model, batch, loss, grads)
    assert difference <= 1e-5 and worst <= 1e-4, where


def test_one_layer_is_edited_and_reasons_tell_what_the_plan_did():
    name = "model.layers.1.mlp.up_proj.weight"
    found = shard(captured("llama"), 2)
    sharding = shard(
        captured("llama"), 2, pins=found.tensors | {name: replace(found.tensors[name], dim=1)}
    )
    assert sharding.reasons[name] == "row parallel: as the plan says"
    assert {key: text for key, text in sharding.reasons.items() if "plan" in text} == {
        name: sharding.reasons[name]
    }
    same = [key for key in found.reasons if "layers.0." in key or "norm" in key]
    assert all(sharding.reasons[key] == found.reasons[key] for key in same)


def test_what_is_made_whole_for_an_edit_is_told():
    name = "model.layers.0.mlp.down_proj.weight"
    pins = shard(captured("llama"), 2).tensors
    reasons = shard(captured("llama"), 2, pins=pins | {name: replace(pins[name], dim=0)}).reasons
    text = "its output is all-gathered for linear in model.layers.1.self_attn.q_proj"
    assert reasons[name] == f"column parallel: as the plan says; {text}"


def walk(capturing, tp, assumptions):
    return propagated(capturing, tp, RULES, STARTERS, assumptions=assumptions)


SLOW = "swin whisper clip recurrent_gemma deberta-v2 mamba olmo2 bart blip falcon gemma2 phi bloom opt".split()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x
        for x in FAMILIES
        if x != "phimoe"
    ],
)
def test_a_plan_that_nobody_edited_changes_nothing(name):
    """Neither where it is compared with what propagation finds, nor where propagation starts from
    it.
    """
    found = shard(captured(name), 2)
    again = shard(captured(name), 2, pins=found.tensors, complete=True)
    assert again.tensors == found.tensors and again.reasons == found.reasons
    pins = {key: spec_of(tensor) for key, tensor in found.tensors.items()}
    p = walk(captured(name), 2, Assumptions(roles(captured(name)), pins=pins))
    assert set(p.decisions) == set(found.decisions)
    for node, decision in found.decisions.items():
        one, two = decision, p.decisions[node]
        facts = "gathered", "fills", "args", "target", "reduce", "scale", "common"
        assert all(getattr(one, fact) == getattr(two, fact) for fact in facts), (node, one, two)
        assert dict(one.to_shard) == dict(two.to_shard), (node, one, two)


def test_an_evaluation_capture_follows_an_edited_plan():
    tensors = shard(captured("gpt2", vocab_size=97), 2).tensors
    weight, bias = (f"transformer.h.1.attn.c_attn.{end}" for end in ("weight", "bias"))
    plan = tensors | {weight: replace(tensors[weight], dim=0, blocks=1), bias: whole(tensors[bias])}
    plan |= {"transformer.wte.weight": replace(tensors["transformer.wte.weight"], padded=128)}
    first = shard(captured("gpt2", vocab_size=97), 2, pins=plan, complete=True)
    later = shard(captured("gpt2", ("loss", "logits"), False, vocab_size=97), 2, pins=first.tensors)
    assert first.tensors == later.tensors == plan


Q, NORM, TABLE = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.norm.weight",
    "model.embed_tokens.weight",
)


@pytest.mark.parametrize(
    ("name", "change", "reason", "remedy"),
    [
        (
            Q,
            {"shape": (32, 64)},
            r"its shape is (32, 64) in the plan, and (32, 32) in the model",
            "Correct the plan",
        ),
        (
            Q,
            {"blocks": 5},
            "the plan has it in 5 blocks, and dimension 0 is 32 long",
            "Let blocks be 1",
        ),
        (Q, {"blocks": 0}, "the plan has it in 0 blocks", "Let blocks be 1"),
        (
            Q,
            {"blocks": (31, 1)},
            "and 31 is not divisible by 2 tensor-parallel ranks",
            "Let dim be null",
        ),
        (
            TABLE,
            {"padded": 97},
            "padded to 97, and 97 is not divisible by 2",
            "Pad it to a multiple of 2",
        ),
        (
            TABLE,
            {"blocks": 2},
            "embedding in model.embed_tokens looks up rows that are sharded",
            "Let it be sharded",
        ),
        (
            None,
            {"name": "model.layers.9.weight"},
            "the model computes with no such parameter",
            "Leave it out",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_name(name, change, reason, remedy):
    plan = dict(shard(captured("llama", vocab_size=96), 2).tensors)
    changed = replace(plan[name or Q], **change)
    with pytest.raises(PlanError) as caught:
        shard(
            captured("llama", vocab_size=96), 2, pins=plan | {changed.name: changed}, complete=True
        )
    assert (caught.value.what, caught.value.value) == ("sharding of", changed.name)
    assert reason in caught.value.reason and caught.value.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("family", "edits", "fault", "reason"),
    [
        (
            "gpt2",
            {"transformer.ln_f.weight": 0},
            "transformer.ln_f.weight",
            "layer_norm in transformer.ln_f takes",
        ),
        (
            "gpt2",
            {"h.0.attn.c_attn.weight": 0},
            "h.0.attn.c_attn.weight",
            "h.0.attn.c_attn.bias, which is sharded",
        ),
        ("gpt2", {"h.1.mlp.c_fc.weight": None}, "h.1.mlp.c_fc.bias", "needs replicated operands"),
        (
            "gpt2",
            {"h.1.mlp.c_proj.bias": 0},
            "h.1.mlp.c_proj.bias",
            "bias, which is sharded, to a replicated one",
        ),
        (
            "mixtral",
            {"layers.0.mlp.experts.down_proj": 0},
            "layers.0.mlp.experts.down_proj",
            "needs replicated",
        ),
    ],
)
def test_an_edit_that_the_graph_cannot_follow_is_refused_by_name(family, edits, fault, reason):
    tensors = shard(captured(family), 2).tensors
    found = {name: dim for end, dim in edits.items() for name in tensors if name.endswith(end)}
    plan = tensors | {
        name: replace(tensors[name], dim=dim, blocks=1) for name, dim in found.items()
    }
    with pytest.raises(PlanError) as caught:
        shard(captured(family), 2, pins=plan, complete=True)
    assert caught.value.what == "sharding of" and caught.value.value.endswith(fault)
    assert reason in caught.value.reason and "Let it be" in caught.value.remedy


def test_a_plan_says_of_every_parameter_and_by_its_own_name():
    plan = dict(shard(captured("gpt2"), 2).tensors)
    tied = TensorSharding("lm_head.weight", plan["transformer.wte.weight"].shape, 0)
    with pytest.raises(PlanError, match=r"lm_head.weight: it is tied to transformer.wte.weight"):
        shard(captured("gpt2"), 2, pins=plan | {"lm_head.weight": tied}, complete=True)
    del plan["transformer.ln_f.bias"]
    with pytest.raises(
        PlanError, match=r"transformer.ln_f.bias: the model computes with it, and the plan does not"
    ):
        shard(captured("gpt2"), 2, pins=plan, complete=True)
    assert shard(captured("gpt2"), 2, pins=plan).tensors["transformer.ln_f.bias"].dim is None


def test_one_rank_divides_nothing():
    plan = shard(captured("llama"), 2).tensors
    with pytest.raises(
        PlanError, match=f"{TABLE}: the plan has it sharded .* one tensor-parallel rank"
    ):
        shard(captured("llama"), 1, pins=plan)


@pytest.mark.parametrize(
    ("rule", "dim"),
    [(f"{Q}=replicate", 0), (f"{Q}=row", 0), (f"{Q}=column", None), (f"{Q}=column", 1)],
)
def test_a_rule_that_contradicts_the_plan_is_refused(rule, dim):
    plan = shard(captured("llama"), 2).tensors
    plan = plan | {Q: replace(plan[Q], dim=dim)}
    with pytest.raises(PlanError, match=f"the plan says otherwise: {Q} is"):
        shard(captured("llama"), 2, TensorRules.parse(rule), plan)
