"""The GPT that flags describe, as a plain module, against HuggingFace's models."""

from dataclasses import replace

import pytest
import torch

from megatron_merak.models.hf_config import hf_config
from megatron_merak.stages.gpt_model import build_gpt
from tests.models.families import (
    CONVERTIBLE,
    GPT2,
    LENGTH,
    LLAMA,
    batch,
    gpt,
    huggingface,
    named,
    reference,
    weights_of,
)


def shapes_of(model):
    return {name: tuple(each.shape) for name, each in model.named_parameters()}


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_computes_as_huggingface_does(name):
    theirs = huggingface(name)
    expected, found = reference(theirs, batch())
    gradients = named(name, found)
    ours = gpt(name, weights_of(name)).eval()
    loss = ours(**ours.batch_of(batch()))
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected, rtol=2e-6, atol=0)
    assert {key for key, _ in ours.named_parameters()} == gradients.keys()
    for key, parameter in ours.named_parameters():
        difference = (parameter.grad - gradients[key]).abs().max()
        assert difference <= 5e-6 * gradients[key].abs().max(), key


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_has_the_tensors_of_huggingfaces_model(name):
    tensors = dict(huggingface(name).named_parameters())
    wanted = {key: tuple(each.shape) for key, each in named(name, tensors).items()}
    assert shapes_of(build_gpt(CONVERTIBLE[name])) == wanted


def test_has_the_tensors_of_the_nearest_model_where_huggingface_has_none():
    table = {"lm_head.weight": (GPT2.vocab_size, GPT2.hidden_size)}
    untied = build_gpt(replace(GPT2, untie_embeddings_and_output_weights=True))
    assert shapes_of(untied) == shapes_of(build_gpt(GPT2)) | table

    without = build_gpt(replace(GPT2, position_embedding_type="none"))
    rotary = replace(GPT2, position_embedding_type="rope")
    assert hf_config(rotary)["model_type"] == "starcoder2"
    assert shapes_of(without) == shapes_of(build_gpt(rotary))

    positions = {"model.embed_positions.weight": (LENGTH, LLAMA.hidden_size)}
    learned = build_gpt(replace(LLAMA, position_embedding_type="learned_absolute"))
    assert shapes_of(learned) == shapes_of(build_gpt(LLAMA)) | positions


def test_drops_nothing_in_eval_mode():
    model = gpt("gpt2", weights_of("gpt2"), hidden_dropout=0.3, attention_dropout=0.3)
    data = model.batch_of(batch())
    expected, _ = reference(huggingface("gpt2"), batch())
    torch.testing.assert_close(model.eval()(**data).detach(), expected, rtol=2e-6, atol=0)
    losses = [model.train()(**data).item() for _ in range(2)]
    assert losses[0] != losses[1]


def test_no_targets_give_zero_and_no_nan():
    model = gpt("gpt2", weights_of("gpt2"))
    loss = model(**model.batch_of(batch() | {"loss_mask": torch.zeros(2, LENGTH)}))
    loss.backward()
    assert loss.item() == 0
    assert all(each.grad.count_nonzero() == 0 for each in model.parameters())
