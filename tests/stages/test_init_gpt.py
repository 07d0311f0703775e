"""Initial weights of the GPT that flags describe: a function of (seed, name) alone, the same full
tensors whatever the layout.
"""

import math
from dataclasses import replace

import pytest
import torch

from megatron_merak.config import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.planner import plan as make_plan
from megatron_merak.stages.gpt_model import GPTModel, build_gpt, traced_gpt
from megatron_merak.stages.init_captured import Initialiser
from megatron_merak.tensor_parallel import derive_seed
from megatron_merak.training.gpt_blueprint import by_formulas
from tests.models.families import CONVERTIBLE, FAMILIES, GPT2, LLAMA
from tests.parity.rig import assemble
from tests.ranks import run_ranks

OUTPUTS = ("c_proj.weight", "o_proj.weight", "down_proj.weight", "experts.down_proj")
TABLE = "model.embed_tokens.weight"
SHAPES = CONVERTIBLE | {
    "no positions": replace(GPT2, position_embedding_type="none"),
    "untied": replace(GPT2, untie_embeddings_and_output_weights=True),
    "llama with positions": replace(LLAMA, position_embedding_type="learned_absolute"),
    "wider": replace(LLAMA, init_method_std=0.3, num_layers=3),
}
LARGE = replace(LLAMA, vocab_size=1000, hidden_size=64)


def expected(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Norms are one, biases zero, and matrices drawn from a stream of their own; those whose output
    is added to the residual stream are the smaller the more layers add to it.
    """
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    std = config.init_method_std
    if name.endswith(OUTPUTS):
        std /= math.sqrt(2 * config.num_layers)
    generator = torch.Generator().manual_seed(derive_seed(seed, name))
    return torch.empty(shape).normal_(0, std, generator=generator)


@pytest.mark.parametrize("name", SHAPES)
def test_every_value_is_drawn_from_the_stream_of_its_tensor(name):
    model = build_gpt(SHAPES[name])
    initialiser = Initialiser(model)
    for key, parameter in model.named_parameters():
        drawn = initialiser.draw(key, 7)
        assert drawn.dtype == torch.float32
        assert torch.equal(drawn, expected(SHAPES[name], key, tuple(parameter.shape), 7)), key


def test_values_never_change():
    """A changed value would give every run with this seed other weights."""
    full = Initialiser(build_gpt(LARGE)).draw(TABLE, 1234)
    frozen = torch.tensor(
        [[-0.01386213, -0.00774295, -0.01104093], [0.01566094, -0.05030913, 0.02601373]]
    )
    torch.testing.assert_close(
        torch.stack((full[0, :3], full[999, 61:])), frozen, rtol=1e-6, atol=0
    )


def test_values_depend_on_seed_and_name():
    initialiser = Initialiser(build_gpt(LARGE))
    full = initialiser.draw(TABLE, 1234)
    assert full.std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(full.mean().item()) < 3e-4
    assert not torch.equal(initialiser.draw(TABLE, 1235), full)
    assert not torch.equal(initialiser.draw("lm_head.weight", 1234), full)
    before = torch.get_rng_state()
    assert torch.equal(initialiser.draw(TABLE, 1234), full)
    assert torch.equal(before, torch.get_rng_state())


def test_output_projections_are_scaled_by_depth():
    initialiser = Initialiser(build_gpt(GPT2))
    outer = initialiser.draw("transformer.h.0.attn.c_proj.weight", 7)
    inner = initialiser.draw("transformer.h.0.attn.c_attn.weight", 7)
    ratio = (outer.std() / inner.std()).item()
    assert ratio == pytest.approx((2 * GPT2.num_layers) ** -0.5, rel=0.1)


LAYOUTS = [(2, 1), (1, 2), (2, 2), (1, 1), (1, 4)]  # tensor- and pipeline-parallel ranks
UNEVEN = replace(GPT2, vocab_size=65, make_vocab_size_divisible_by=64)  # 64 rows on each of 4 ranks


def config_of(shape, tp, pp, bf16=False):
    return Config(
        model=shape,
        parallel=ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp),
        train=TrainConfig(micro_batch_size=1, global_batch_size=4, seed=7, bf16=bf16),
    )


def fresh(shape, rank, world_size, tp=1, pp=1, bf16=False, traced=None):
    """This rank's part of the freshly built model."""
    config = config_of(shape, tp, pp, bf16)
    plan = make_plan(config, world_size)
    mesh = build_mesh(plan.grid, rank, torch.device("cpu"))
    blueprint = by_formulas(traced or traced_gpt(config), config, plan)
    return GPTModel(blueprint, config, mesh)


def held(model):
    """This rank's shards."""
    shards = model.shards(model.buffer.data)
    return [replace(shard, tensor=shard.tensor.clone()) for shard in shards]


def layouts(rank, world_size):
    """Every layout of four ranks, data parallelism filling up, in one launch."""
    found = {}
    for name, shape in FAMILIES.items():
        traced = traced_gpt(config_of(shape, 1, 1))
        for tp, pp in LAYOUTS:
            found[name, tp, pp] = held(fresh(shape, rank, world_size, tp, pp, traced=traced))
    model = fresh(UNEVEN, rank, world_size, tp=4)
    found["rows"] = model.buffer.parameter("transformer.wte.weight").clone()
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(layouts, 4, timeout=250)


@pytest.mark.parametrize("name", FAMILIES)
def test_full_weights_do_not_depend_on_the_layout(ranks, name):
    shape = FAMILIES[name]
    whole = assemble([held(fresh(shape, 0, 1))])
    for key, tensor in whole.items():
        assert torch.equal(tensor, expected(shape, key, tuple(tensor.shape), 7)), key
    for tp, pp in LAYOUTS:
        full = assemble([rank[name, tp, pp] for rank in ranks])
        assert full.keys() == whole.keys()
        for key, tensor in full.items():
            assert torch.equal(tensor, whole[key]), (tp, pp, key)


def test_ranks_hold_slices_of_one_table_and_zeros_for_padding(ranks):
    """The last two of four ranks hold padding alone."""
    rows = [rank["rows"] for rank in ranks]
    assert [len(part) for part in rows] == [64] * 4
    table = torch.cat(rows)
    assert torch.equal(table[:65], expected(UNEVEN, "transformer.wte.weight", (65, 32), 7))
    assert table[65:].count_nonzero() == 0


def test_bf16_weights_are_the_rounded_ones():
    full = assemble([held(fresh(LLAMA, 0, 1))])
    rounded = assemble([held(fresh(LLAMA, 0, 1, bf16=True))])
    assert full.keys() == rounded.keys()
    for name, tensor in rounded.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(full[name].bfloat16(), tensor), name
