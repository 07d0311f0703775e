"""A residual stream in fp32 around 16-bit layers: HuggingFace's layers with one written around
them, and every sum.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megatron_merak.models.gpt import GPT, GPTPrelude, build_unit
from megatron_merak.models.layers import Placement
from megatron_merak.segment import Common
from tests.models.families import FAMILIES, batch, huggingface, load, pieces

HALF = torch.bfloat16


def large_stream(name):
    """The family's model in bf16, with a stream so large that 16 bits would lose much of what
    layers add to it.
    """
    model = huggingface(name)
    with torch.no_grad():
        table = model.transformer.wpe if hasattr(model, "transformer") else model.model.embed_tokens
        table.weight.mul_(1000)  # the other table of GPT-2 is tied to its head
    return model.to(HALF)


def norm(module, x):
    """In fp32, of a stream in fp32; its output has 16 bits."""
    if isinstance(module, torch.nn.LayerNorm):
        wide = F.layer_norm(
            x, module.normalized_shape, module.weight.float(), module.bias.float(), module.eps
        )
    else:
        wide = (
            x
            * (x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()
            * module.weight.float()
        )
    return wide.to(HALF)


def forward(model, tokens):
    """HuggingFace's embeddings, attention, feed-forward parts and head, with residuals and norms of
    its own. Returns logits, and what the layers add to the stream."""
    places = torch.arange(tokens.shape[1]).unsqueeze(0)
    if hasattr(model, "transformer"):
        core = model.transformer
        x = first = (core.wte(tokens) + core.wpe(places)).float()
        for block in core.h:
            x = x + block.attn(norm(block.ln_1, x))[0].float()
            x = x + block.mlp(norm(block.ln_2, x)).float()
        return model.lm_head(norm(core.ln_f, x)), x - first
    core = model.model
    x = first = core.embed_tokens(tokens).float()
    given = {"position_embeddings": core.rotary_emb(x.to(HALF), places), "attention_mask": None}
    for layer in core.layers:
        x = x + layer.self_attn(hidden_states=norm(layer.input_layernorm, x), **given)[0].float()
        x = x + layer.mlp(norm(layer.post_attention_layernorm, x)).float()
    return model.lm_head(norm(core.norm, x)), x - first


def reference(model, data):
    logits, added = forward(model, data["tokens"])
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), data["labels"].flatten(), reduction="none"
    )
    (losses * data["loss_mask"].flatten()).sum().backward()
    return {name: p.grad.float() for name, p in model.named_parameters()}, added.detach()


def streams(units, config):
    """Every value of a forward, by name."""
    common, values = Common(GPTPrelude(config, torch.device("cpu"))(batch())), {}
    for segment in (segment for unit in units for segment in unit.segments()):
        outs = segment.fn(common, *(values[each.value] for each in segment.ins))
        values |= zip((each.value for each in segment.outs), outs, strict=True)
    return values


def ours(name, weights, fp32_residual):
    config = FAMILIES[name]
    gpt = GPT(config, Placement(dtype=HALF, fp32_residual=fp32_residual))
    load(gpt.units, weights, 0, 1)
    values = streams(gpt.units, config)
    values["loss"].backward()
    grads = {
        piece.sharding.name: view.float()
        for piece, view in pieces(gpt.units, 0, 1, lambda p: p.grad)
    }
    return grads, (
        values[f"hidden.{config.num_layers}"].float() - values["hidden.0"].float()
    ).detach()


def far(found, truth):
    return ((found - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_it_is_huggingfaces_model_with_an_fp32_stream(name):
    model = large_stream(name)
    weights = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    grads, added = reference(model, batch())
    (found, with_it), (_, without) = (ours(name, weights, each) for each in (True, False))
    assert far(with_it, added) < 0.01 < 0.1 < far(without, added), (
        "rounded to 16 bits, layers add something else"
    )
    assert found.keys() == grads.keys()
    assert max(far(found[key], grad) for key, grad in grads.items()) < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_no_sum_of_the_stream_is_rounded(name, dtype):
    """Nor is the bias that comes to it; what enters a parallel layer has 16 bits."""
    config = replace(FAMILIES[name], hidden_dropout=0.0)
    units = [
        build_unit(index, config, Placement(dtype=dtype, fp32_residual=True)) for index in range(3)
    ]
    for unit in units:
        for parameter in unit.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    values = streams(units, config)
    wide = {key for key, value in values.items() if value.dtype == torch.float32}
    assert wide == {"hidden.0", "hidden.1", "hidden.2", "residual.1", "residual.2"}
    for layer, unit in enumerate(units[1:], 1):
        sums = ("residual", f"hidden.{layer - 1}", "context", unit.attention.proj.bias)
        more = ("hidden", f"residual.{layer}", "fed", unit.mlp.fc2.bias)
        for made, source, added, bias in (sums, more):
            term = values[f"{added}.{layer}"].float() + (0 if bias is None else bias.float())
            assert torch.equal(values[f"{made}.{layer}"], values[source] + term)
