"""A residual stream in fp32 around 16-bit layers: HuggingFace's layers with one written around
them, and every sum.
"""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megatron_merak.config import Config, TrainConfig
from megatron_merak.models.gpt_module import GPTLayer
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid, StagePlan
from megatron_merak.planner import plan as make_plan
from megatron_merak.segment import Common
from tests.engines import gpt_model
from tests.graph.stages import Stages, unequal, worst
from tests.models.chains import GPTChain
from tests.models.families import FAMILIES, LENGTH, batch, gpt, huggingface, load, weights_of

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


def module(name, weights, wide=True, dtype=HALF):
    return gpt(name, weights, fp32_residual_connection=wide).to(dtype)


def streams(model, data):
    """Run a module; return its loss, and per layer the stream before, between and after its two
    parts, and what these give.
    """
    layers = []
    for layer in (part for part in model.modules() if isinstance(part, GPTLayer)):
        found = {}
        before, attention, between, feed = (getattr(layer, each) for each in layer.names)
        for key, part in (("source", before), ("residual", between)):
            part.register_forward_pre_hook(partial(_keep_input, found, key))
        for key, part in (("context", attention), ("fed", feed), ("target", layer)):
            part.register_forward_hook(partial(_keep_output, found, key))
        layers.append(found)
    return model(**model.batch_of(data)), layers


def _keep_input(found, key, part, given):
    found[key] = given[0]


def _keep_output(found, key, part, given, made):
    found[key] = made[0] if isinstance(made, tuple) else made  # layers return two values


def as_a_module(name, weights, wide):
    """The gradients, and what the layers add to the stream."""
    model = module(name, weights, wide)
    loss, layers = streams(model, batch())
    loss.backward()
    grads = {key: each.grad.float() for key, each in model.named_parameters()}
    return grads, (layers[-1]["target"].float() - layers[0]["source"].float()).detach()


def as_it_runs(name, weights, wide):
    """The same of the fused program of one rank."""
    config = Config(
        model=replace(FAMILIES[name], fp32_residual_connection=wide),
        train=TrainConfig(micro_batch_size=2, global_batch_size=2, bf16=True),
    )
    # each unit by itself, so that what leaves the first is one value
    with mock.patch.object(StagePlan, "continued", ()):
        model = gpt_model(config, make_plan(config, 1), build_mesh(Grid(), 0, torch.device("cpu")))
        load(model, weights)
        (samples,) = model.from_samples([batch()])
        model.gradients([samples])
        program = model.programs[0](samples, True)
    count = batch()["loss_mask"].sum()
    shards = model.shards(model.buffer.main_grad)
    grads = {shard.name: shard.tensor * count for shard in shards}
    common = Common(program.prelude(samples))
    values = {}
    for segment in program.segments:
        outs = segment.fn(common, *(values[each.value] for each in segment.ins))
        values |= zip((each.value for each in segment.outs), outs, strict=True)
    (first,) = program.segments[0].outs
    (last,) = program.segments[-1].ins
    assert values[first.value].dtype == (torch.float32 if wide else HALF)
    return grads, (values[last.value].float() - values[first.value].float()).detach()


def far(found, truth):
    return ((found - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("ours", [as_a_module, as_it_runs])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_it_is_huggingfaces_model_with_an_fp32_stream(name, ours):
    model = large_stream(name)
    weights = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    grads, added = reference(model, batch())
    found, with_it = ours(name, weights, True)
    _, without = ours(name, weights, False)
    assert far(with_it, added) < 0.01 < 0.1 < far(without, added), (
        "rounded to 16 bits, layers add something else"
    )
    assert found.keys() == grads.keys()
    assert max(far(found[key], grad) for key, grad in grads.items()) < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_no_sum_of_the_stream_is_rounded(name, dtype):
    """What enters and leaves the parts of a layer has 16 bits."""
    model = module(name, weights_of(name), dtype=dtype)
    loss, layers = streams(model, batch())
    loss.backward()
    for number, layer in enumerate(layers):
        for key in ("source", "residual", "target"):
            assert layer[key].dtype == torch.float32
        assert layer["context"].dtype == layer["fed"].dtype == dtype
        assert torch.equal(layer["residual"], layer["source"] + layer["context"].float())
        assert torch.equal(layer["target"], layer["residual"] + layer["fed"].float())
        if number:
            assert torch.equal(layer["source"], layers[number - 1]["target"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_stages_send_the_stream_in_fp32(name, dtype):
    """And compute what the module does, to the bit, but for tables: of these, autograd adds
    up gradients in 16 bits.
    """
    model = module(name, weights_of(name), dtype=dtype)
    loss = model(**model.batch_of(batch()))
    loss.backward()
    grads = {key: each.grad.float() for key, each in model.named_parameters()}
    chain = GPTChain(module(name, weights_of(name), dtype=dtype), batch(), dtype)
    stages = Stages(chain, chain.units)
    sent = [value for part in stages.parts for value in part.targets]
    assert [value.dtype for value in sent] == [torch.float32] * 3
    assert [value.shape for value in sent] == [(2, LENGTH, 32)] * 3
    found_loss, found = stages.step(chain.batch)
    assert torch.equal(found_loss, loss)
    differ = unequal(found, grads)
    assert all(key.endswith(("wte.weight", "wpe.weight", "embed_tokens.weight")) for key in differ)
    assert worst(differ) < torch.finfo(dtype).eps
