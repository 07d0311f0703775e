"""The GPT as a plain module against HuggingFace's models, and against its native units."""

from dataclasses import replace

import pytest
import torch

from megatron_merak.models.names import names_for, tensor_table
from megatron_merak.stages.gpt_model import build_gpt
from megatron_merak.stages.init_captured import Initialiser
from megatron_merak.stages.init_native import draw
from tests.models.families import CONVERTIBLE, batch, huggingface, reference

SHAPES = CONVERTIBLE | {
    "no positions": replace(CONVERTIBLE["gpt2"], position_embedding_type="none"),
    "untied": replace(CONVERTIBLE["gpt2"], untie_embeddings_and_output_weights=True),
}


# starcoder2 calls the matrices of its feed-forward part otherwise
@pytest.mark.parametrize("name", sorted(CONVERTIBLE.keys() - {"starcoder2"}))
def test_computes_as_huggingface_does(name):
    theirs = huggingface(name)
    ours = build_gpt(CONVERTIBLE[name]).eval()
    weights = {key: value.detach().clone() for key, value in theirs.named_parameters()}
    ours.load_state_dict(weights, assign=True)
    data = batch()
    expected, gradients = reference(theirs, data)
    loss = ours(**ours.batch_of(data))
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected)
    assert {key for key, _ in ours.named_parameters()} == gradients.keys()
    for key, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key], msg=key)


@pytest.mark.parametrize("name", SHAPES)
def test_has_the_tensors_and_first_values_of_the_native_units(name):
    config = SHAPES[name]
    model = build_gpt(config)
    table = {tensor.name: tuple(tensor.shape) for tensor in tensor_table(config, 1)}
    assert {key: tuple(each.shape) for key, each in model.named_parameters()} == table
    names = names_for(config, 1)
    layouts = [names.embedding(), names.head(), *names.final_norm().values()]
    layouts += [each for role in names.layer(1).values() for each in role.values()]
    if config.position_embedding_type == "learned_absolute":
        layouts.append(names.positions())
    initialiser = Initialiser(model)
    for piece in (piece for layout in layouts for piece in layout.pieces):
        drawn = initialiser.draw(piece.sharding.name, 7)
        assert torch.equal(drawn, draw(piece, 7)), piece.sharding.name
