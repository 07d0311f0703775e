"""The GPT of flags with experts: losses and gradients of transformers' mixtures, and auxiliary losses
of Megatron-LM's.
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_merak.config import ModelConfig
from megatron_merak.errors import ConfigError
from megatron_merak.formats.native import config_of_native
from megatron_merak.models.gpt_experts import MixtureFeedForward
from megatron_merak.models.gpt_module import GPTModule
from megatron_merak.models.hf_config import hf_config, settings_of

EXPERTS = 8
SHAPE = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 16,
    "seq_length": 16,
    "vocab_size": 96,
    "make_vocab_size_divisible_by": 1,
    "swiglu": True,
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "num_experts": EXPERTS,
    "moe_router_topk": 3,
    "moe_ffn_hidden_size": 48,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "untie_embeddings_and_output_weights": True,
}
SHARED = {"moe_shared_expert_intermediate_size": 40}
KINDS = {
    "mixtral": {},
    "qwen3_moe": {"qk_layernorm": True},
    "qwen3_moe, weights among all experts": {"qk_layernorm": True, "moe_router_pre_softmax": True},
    "qwen2_moe": SHARED | {"moe_shared_expert_gate": True},
    "qwen2_moe, with biases": SHARED
    | {"moe_shared_expert_gate": True, "add_qkv_bias": True, "moe_router_pre_softmax": True},
}


def drawn(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data.normal_(0.0, 0.1, generator=generator)
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_model_of_transformers(kind):
    config = ModelConfig(**SHAPE, **KINDS[kind])
    settings = hf_config(config)
    model_type = settings.pop("model_type")
    assert model_type == kind.partition(",")[0]
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    ours = drawn(GPTModule(config))
    theirs.load_state_dict(ours.state_dict(), strict=False)
    parameters = dict(theirs.named_parameters())
    assert parameters.keys() == dict(ours.named_parameters()).keys()
    text = torch.randint(96, (2, 17), generator=torch.Generator().manual_seed(4))
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    loss = ours(tokens, targets)
    loss.backward()
    logits = theirs(input_ids=tokens).logits
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, parameters[name].grad, rtol=1e-4, atol=1e-5, msg=name
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_of_transformers_is_read_back(kind):
    config = ModelConfig(**SHAPE, **KINDS[kind])
    settings = hf_config(config)
    whole = AutoConfig.for_model(**settings).to_dict()
    assert hf_config(ModelConfig(**settings_of(whole))) == settings


@pytest.mark.parametrize("pre_softmax", [False, True])
@pytest.mark.parametrize(("balance", "size"), [(0.5, None), (0.0, 0.3), (0.5, 0.3)])
def test_auxiliary_losses_are_megatrons(balance, size, pre_softmax):
    moe = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    config = ModelConfig(
        **SHAPE,
        moe_aux_loss_coeff=balance,
        moe_z_loss_coeff=size,
        moe_router_pre_softmax=pre_softmax,
    )
    router = drawn(MixtureFeedForward(config)).gate
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(5))
    routing = router(x, samples=1)
    logits = (x @ router.weight.T).detach().requires_grad_()
    probabilities, chosen = moe.topk_routing_with_score_function(
        logits, topk=3, use_pre_softmax=pre_softmax
    )
    weights = probabilities.gather(1, routing.experts)
    torch.testing.assert_close(routing.weights, weights.detach(), rtol=1e-6, atol=1e-7)
    assert chosen.sum() == routing.experts.numel()
    expected = torch.zeros(())
    if balance:
        scores = logits.softmax(-1)
        expected = expected + moe.switch_load_balancing_loss_func(
            probs=scores,
            tokens_per_expert=chosen.sum(0),
            total_num_tokens=len(x),
            topk=3,
            num_experts=EXPERTS,
            moe_aux_loss_coeff=balance,
        )
    if size is not None:
        expected = expected + moe.z_loss_func(logits, size)
    expected.backward()
    routing.auxiliary.backward()
    torch.testing.assert_close(routing.auxiliary, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(router.weight.grad, logits.grad.T @ x, rtol=1e-5, atol=1e-6)


def test_auxiliary_losses_are_in_the_gradient_alone():
    text = torch.randint(96, (2, 17), generator=torch.Generator().manual_seed(4))
    targets = text[:, 1:].masked_fill(torch.arange(16) < 3, -100)
    found = {}
    for balance in (0.0, 0.5):
        model = drawn(GPTModule(ModelConfig(**SHAPE, moe_aux_loss_coeff=balance)))
        loss = model(text[:, :-1].contiguous(), targets)
        loss.backward()
        router = model.get_parameter("model.layers.0.mlp.gate.weight")
        found[balance] = loss.item(), router.grad
    assert found[0.0][0] == found[0.5][0]
    assert not torch.allclose(found[0.0][1], found[0.5][1])


def test_an_evaluation_has_none():
    x = torch.randn(1, 40, 64)
    feed = drawn(MixtureFeedForward(ModelConfig(**SHAPE, moe_aux_loss_coeff=0.5)))
    assert feed(x)[1] is not None
    assert feed.eval()(x)[1] is None


def test_an_expert_that_all_tokens_share_is_added_as_it_is():
    config = ModelConfig(**SHAPE, **SHARED)
    feed = drawn(MixtureFeedForward(config))
    x = torch.randn(2, 5, 64)
    parts = {name: each.T for name, each in feed.shared_expert.named_parameters()}
    gate = torch.nn.functional.silu(x @ parts["gate_proj.weight"])
    shared = gate * (x @ parts["up_proj.weight"]) @ parts["down_proj.weight"]
    output, _ = feed(x)
    feed.shared_expert = None
    torch.testing.assert_close(output, feed(x)[0] + shared, rtol=1e-5, atol=1e-6)


def test_a_conversion_refuses_or_tells_what_the_model_of_transformers_lacks():
    with pytest.raises(ConfigError, match="qwen2_moe, has it behind a gate"):
        hf_config(ModelConfig(**SHAPE, **SHARED))
    told = []
    config = ModelConfig(**SHAPE, moe_expert_capacity_factor=1.25)
    assert config_of_native(config, told.append) == hf_config(ModelConfig(**SHAPE))
    assert told == [
        "--moe-expert-capacity-factor 1.25 has no counterpart in mixtral: its experts compute all "
        "of their tokens."
    ]


def in_time_order(rows, samples):
    """Megatron-LM's order of tokens, [s * b, ...], of rows in ours, [b * s, ...]."""
    return rows.unflatten(0, (samples, -1)).transpose(0, 1).flatten(0, 1)


def megatrons_experts(feed, x, policy, factor, padded):
    """What Megatron-LM computes of tokens [b, s, h]: probabilities of its own functions, and each
    expert's network applied to all tokens. Returns them in our order, and the dropped choices.
    """
    moe = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    samples = x.shape[0]
    rows = in_time_order(x.flatten(0, 1), samples)
    logits = rows @ feed.gate.weight.T
    routed, chosen = moe.topk_routing_with_score_function(logits, topk=3)
    weights, kept = moe.apply_router_token_dropping(
        routed,
        chosen,
        router_topk=3,
        capacity_factor=factor,
        drop_policy=policy,
        pad_to_capacity=padded,
    )
    if policy == "position":
        # Theirs are any of those that are chosen: a top-k of ones. As many of the first are ours.
        capacity = moe.get_capacity(3 * len(rows), EXPERTS, factor)
        first = chosen & (chosen.cumsum(0) <= capacity)
        assert torch.equal(first.sum(0), (chosen & kept).sum(0))
        kept = first
        weights = routed * kept
    total = torch.zeros_like(rows)
    for expert in range(EXPERTS):
        gate, up = (rows @ feed.experts.gate_up_proj[expert].T).chunk(2, -1)
        output = torch.nn.functional.silu(gate) * up @ feed.experts.down_proj[expert].T
        total = total + weights[:, expert, None] * output
    return in_time_order(total, rows.shape[0] // samples).view_as(x), int((chosen & ~kept).sum())


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("policy", "factor"), [("probs", 0.5), ("probs", 1.0), ("position", 0.7)])
def test_what_an_expert_has_no_room_for_is_dropped_as_in_megatron(policy, factor, padded):
    config = ModelConfig(
        **SHAPE,
        moe_expert_capacity_factor=factor,
        moe_token_drop_policy=policy,
    )
    feed = drawn(MixtureFeedForward(config))
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(2, 20, 64, generator=generator, requires_grad=True)
    towards = torch.randn(2, 20, 64, generator=generator)
    found = {}
    for way in ("ours", "theirs"):
        feed.zero_grad()
        x.grad = None
        if way == "ours":
            output, _ = feed(x)
        else:
            output, dropped = megatrons_experts(feed, x, policy, factor, padded)
            assert dropped > 10
        (output * towards).sum().backward()
        found[way] = [output, x.grad, *(each.grad for each in feed.parameters())]
    for own, expected in zip(found["ours"], found["theirs"], strict=True):
        torch.testing.assert_close(
            own, expected, rtol=1e-4, atol=1e-5 * expected.detach().abs().max().item()
        )


def test_rows_in_no_group_of_a_product_may_be_any_numbers(monkeypatch):
    """In bf16, torch's own product leaves them as the memory was."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    feed = drawn(MixtureFeedForward(ModelConfig(**SHAPE, moe_expert_capacity_factor=0.5)))
    feed.bfloat16()
    x = torch.randn(2, 20, 64, dtype=torch.bfloat16, requires_grad=True)
    torch.use_deterministic_algorithms(True)  # memory that nobody wrote is then no number
    try:
        assert torch.empty(1).isnan()
        output, _ = feed(x)
        output.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert output.isfinite().all() and x.grad.isfinite().all()
    assert all(each.grad.isfinite().all() for each in feed.parameters())


def test_of_equal_weights_the_first_stay_and_rows_of_a_sample_are_in_time():
    """Two samples of two tokens that are all alike: their first tokens come before the others."""
    config = ModelConfig(**SHAPE, moe_expert_capacity_factor=EXPERTS / 3 / 2)
    router = drawn(MixtureFeedForward(config)).gate
    x = torch.randn(1, 64).expand(4, 64)
    routing = router(x, samples=2)
    assert routing.kept.tolist() == [[True] * 3, [False] * 3] * 2


def test_capacities_that_hold_all_tokens_drop_none():
    config = ModelConfig(**SHAPE, moe_expert_capacity_factor=EXPERTS / 3)
    assert drawn(MixtureFeedForward(config)).gate(torch.randn(12, 64), samples=2).kept is None
