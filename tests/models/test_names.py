"""The table of tensors is what the built units hold, for every tensor-parallel degree."""

import pytest
import torch

from megatron_merak.models.gpt import build_unit
from megatron_merak.models.layers import Placement
from megatron_merak.models.names import names_for, tensor_table
from tests.models.families import FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_lists_what_the_units_hold(name):
    config = FAMILIES[name]
    units = [
        build_unit(index, config, Placement(device="meta"))
        for index in range(config.num_layers + 2)
    ]
    held = {
        piece.sharding
        for unit in units
        for layout in unit.layouts.values()
        for piece in layout.pieces
    }
    table = tensor_table(config, 1)
    assert len(table) == len(set(table)) and set(table) == held
    stored = sum(torch.Size(tensor.shape).numel() for tensor in table)
    padding = (config.padded_vocab_size(1) - config.vocab_size) * config.hidden_size
    parameters = {id(p): p.numel() for unit in units for p in unit.parameters()}
    tied = not config.untie_embeddings_and_output_weights
    copies = config.padded_vocab_size(1) * config.hidden_size if tied else padding
    assert stored == sum(parameters.values()) - padding - copies


def test_a_degree_changes_the_padding_only():
    config = FAMILIES["gpt2"]
    one, two = tensor_table(config, 1), tensor_table(config, 2)
    assert [(t.name, t.shape, t.dim, t.blocks) for t in one] == [
        (t.name, t.shape, t.dim, t.blocks) for t in two
    ]
    assert {t.padded for t in two} == {None, config.padded_vocab_size(2)}
    assert names_for(config, 2).tp == 2
