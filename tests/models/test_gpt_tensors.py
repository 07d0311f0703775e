"""How the tensors of the GPT that flags describe are sharded: as Megatron-LM shards them, and so
that every rank stores what its plan says.
"""

from dataclasses import replace
from math import prod

import pytest

from megatron_merak.plan import TensorSharding, held_parameters
from tests.models.families import CONVERTIBLE, GPT2, blueprint_of, huggingface, named

COLUMN = ("c_attn", "c_fc", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("c_proj", "o_proj", "down_proj")
TABLE = ("wte", "embed_tokens", "lm_head")
CASES = [(name, tp) for name in CONVERTIBLE for tp in (1, 2)] + [("gpt2", 4)]


def expected(name, shape, tp, gpt2, multiple):
    """How Megatron-LM shards a tensor of this name. gpt2: whether matrices are [in, out]."""
    *_, role, kind = name.split(".")
    whole = TensorSharding(name, shape)
    if role in TABLE:
        size = multiple * tp
        padded = -(-shape[0] // size) * size
        return replace(whole, dim=0, padded=padded)
    if tp == 1:
        return whole
    if kind == "gate_up_proj":  # of all experts, [expert, gate and up, in]
        return replace(whole, dim=1, blocks=2)
    if kind == "down_proj":
        return replace(whole, dim=2)
    if role in COLUMN:
        blocks = 3 if role == "c_attn" else 1
        return replace(whole, dim=len(shape) - 1 if gpt2 else 0, blocks=blocks)
    if role in ROW and kind == "weight":
        return replace(whole, dim=0 if gpt2 else 1)
    return whole


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_every_tensor_is_sharded_as_megatron_lm_shards_it(name, tp):
    config = CONVERTIBLE[name]
    theirs = named(name, dict(huggingface(name).named_parameters()))
    wanted = {
        key: expected(
            key, tuple(each.shape), tp, name == "gpt2", config.make_vocab_size_divisible_by
        )
        for key, each in theirs.items()
    }
    blueprint = blueprint_of(config, tp)
    found = blueprint.plan.shardings
    assert found == tuple(blueprint.sharding.tensors.values())
    assert len(found) == len(wanted)
    assert {each.name: each for each in found} == wanted


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_a_rank_stores_what_its_plan_says(name, tp):
    plan = blueprint_of(CONVERTIBLE[name], tp).plan
    stored = sum(prod(tensor.stored_shape(tp)) for tensor in plan.shardings)
    assert stored == held_parameters(plan.units)


def test_one_rank_pads_a_vocabulary_only_where_it_must():
    """Products are fast where its size is a multiple of 128, say."""
    even = replace(GPT2, vocab_size=104)
    assert all(tensor.padded is None for tensor in blueprint_of(even, 1).plan.shardings)
    (table,) = [tensor for tensor in blueprint_of(GPT2, 1).plan.shardings if tensor.padded]
    assert (table.name, table.shape, table.padded) == ("transformer.wte.weight", (101, 32), 104)


@pytest.mark.parametrize("tp", [1, 2])
def test_tables_of_any_size_are_sharded_as_plans_count_them(tp):
    """Positions are whole on each rank, and vocabularies padded and sharded."""
    many = replace(GPT2, max_position_embeddings=64)
    plan = blueprint_of(many, tp).plan
    (table,) = [tensor for tensor in plan.shardings if tensor.name.endswith("wpe.weight")]
    assert table == TensorSharding(table.name, (64, 32))
    few = replace(GPT2, vocab_size=63, make_vocab_size_divisible_by=64)
    padded = blueprint_of(few, tp).plan
    (table,) = [tensor for tensor in padded.shardings if tensor.name.endswith("wte.weight")]
    assert table == TensorSharding(table.name, (63, 32), 0, padded=64 * tp)
    for made in (plan, padded):
        stored = sum(prod(tensor.stored_shape(tp)) for tensor in made.shardings)
        assert held_parameters(made.units) == stored
