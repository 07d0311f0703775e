"""The GPT of flags with experts: losses and gradients of transformers' mixtures, and auxiliary losses
of Megatron-LM's.
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_merak.config import ModelConfig
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
KINDS = {
    "mixtral": {},
    "qwen3_moe": {"qk_layernorm": True},
    "qwen3_moe, weights among all experts": {"qk_layernorm": True, "moe_router_pre_softmax": True},
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
    routing = router(x)
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
