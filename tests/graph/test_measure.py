"""The planner's numbers of captured units: the bytes that real segments keep, and those that the
formulas of the GPT give.
"""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from megatron_merak.cluster import CLUSTERS
from megatron_merak.config import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_merak.graph import measure as measuring
from megatron_merak.graph import rehearsal
from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.capture.empty import init_empty_weights
from megatron_merak.graph.fusion.fuse import fuse
from megatron_merak.graph.ir.operators import flops
from megatron_merak.graph.lowering.split import split
from megatron_merak.graph.measure import measure, stored_values
from megatron_merak.graph.partition.cut import cut
from megatron_merak.graph.sharding.shard import shard
from megatron_merak.plan import LAYERS, Grid, TensorSharding, held_parameters
from megatron_merak.planner import plan, plan_chain
from megatron_merak.planner.cost import gpt_units
from megatron_merak.planner.request import request_of
from megatron_merak.segment import Common
from megatron_merak.stages.blueprint import measured
from megatron_merak.stages.gpt_model import traced_gpt
from megatron_merak.training.hf_batches import TokenBatches
from tests.graph.stages import Family, Stages
from tests.requests import request

SAMPLES, LENGTH = 2, 16
SHAPE = {
    "num_layers": 3,
    "hidden_size": 64,
    "seq_length": LENGTH,
    "vocab_size": 128,
    "num_attention_heads": 8,
}
SHAPES = {
    "llama": ModelConfig(
        **SHAPE,
        make_vocab_size_divisible_by=1,
        ffn_hidden_size=96,
        group_query_attention=True,
        num_query_groups=2,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0,
        attention_dropout=0,
    ),
    "gpt2": ModelConfig(
        **SHAPE, make_vocab_size_divisible_by=1, hidden_dropout=0, attention_dropout=0
    ),
}


def captured(name: str, **overrides):
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8}
    with init_empty_weights():
        if name == "llama":
            sizes |= {
                "intermediate_size": 96,
                "num_key_value_heads": 2,
                "max_position_embeddings": LENGTH,
            }
            model = LlamaForCausalLM(LlamaConfig(**sizes))
        else:
            drops = {
                "resid_pdrop": 0,
                "embd_pdrop": 0,
                "attn_pdrop": 0,
                "n_positions": LENGTH,
            } | overrides
            model = GPT2LMHeadModel(GPT2Config(**sizes, **drops))
    return capture(model, TokenBatches("shifted").example(SAMPLES, LENGTH))


def units_of(graph, tp: int = 1, fused_attention: bool = False):
    chain, sharding = cut(graph), shard(graph, tp)
    return measure(graph, chain, sharding, tp, fused_attention)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_the_numbers_are_those_of_the_formulas(name, tp):
    """A layer is two units here, so of what it keeps the border between them is an input."""
    found, formulas = (
        units_of(captured(name), tp),
        gpt_units(SHAPES[name], SAMPLES, 4, tp, fused_dropout=False),
    )
    assert held_parameters(found) == held_parameters(formulas)
    for unit in (*found, *formulas):
        assert sum(2 * m * n * k for m, n, k in unit.products) == unit.flops - unit.attention_flops
    for layer in range(3):
        attention, mlp = found[1 + 2 * layer : 3 + 2 * layer]
        whole = formulas[1 + layer]
        assert attention.parameters + mlp.parameters == whole.parameters
        assert attention.flops + mlp.flops == whole.flops
        border = attention.output_bytes
        assert attention.saved_bytes + border + mlp.saved_bytes == whole.saved_bytes
        assert border == mlp.output_bytes == whole.output_bytes and attention.passed_bytes == 0
        for field in ("reduces", "reduced_bytes"):
            summed = tuple(
                map(sum, zip(getattr(attention, field), getattr(mlp, field), strict=True))
            )
            assert summed == getattr(whole, field)
    head, theirs = found[-1], formulas[-1]
    assert (head.parameters, head.flops) == (theirs.parameters, theirs.flops)
    assert head.saved_bytes == pytest.approx(theirs.saved_bytes, rel=0.01)
    assert [(size,) for _, size in head.tied] == [(size,) for _, size in theirs.tied]


WAYS = {
    "one rank": (1, {}),
    "two ranks": (2, {}),
    "parts of the sequence": (2, {"sequence_parallel": True}),
    "activations again": (1, {"recompute_granularity": "selective"}),
}
# Formulas count launches and scratch memory of a layer alike whatever its shape is, and products as
# they are fused.
ROUGH = ("kind", "operations", "products", "transient_bytes", "tied", "running_bytes")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHAPES)
def test_formulas_price_the_graph_of_the_gpt(name, way):
    tp, ways = WAYS[way]
    config = Config(
        model=SHAPES[name],
        parallel=ParallelConfig(tensor_model_parallel_size=tp, **ways),
        train=TrainConfig(micro_batch_size=SAMPLES, global_batch_size=SAMPLES),
    )
    asked = replace(request_of(config, tp), graph_sharding=LAYERS)
    _, _, found = measured(traced_gpt(config), asked, CLUSTERS["cpu"])
    formulas = plan(config, tp).units
    assert len(found) == len(formulas)
    for unit, priced in zip(found, formulas, strict=True):
        rough = {field: getattr(priced, field) for field in ROUGH}
        assert replace(unit, **rough) == priced
        assert [size for _, size in unit.tied] == [size for _, size in priced.tied]
        assert multiplied(unit) == multiplied(priced)


def multiplied(unit) -> int:
    """Multiplications of a unit's products."""
    return sum(m * n * k for m, n, k in unit.products)


def really_saved(family: Family) -> list[int]:
    """Bytes that autograd keeps of each unit's segments, beside inputs, parameters and what the
    batch gives.
    """
    parts = split(family.rewritten, range(family.units))
    segments = parts.segments(Stages(family).parameters)
    common = Common(parts.prelude(family.batch))
    saved: list[dict[int, torch.UntypedStorage]] = [{} for _ in range(family.units)]
    values: dict[str, torch.Tensor] = {}
    for segment in segments:

        def pack(tensor, kept=saved[segment.unit]):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            ins = [values[i.value].detach().requires_grad_(i.grad) for i in segment.ins]
            values.update(
                zip([o.value for o in segment.outs], segment.fn(common, *ins), strict=True)
            )
    made_by = {out.value: segment.unit for segment in segments for out in segment.outs}
    totals = []
    for unit, kept in enumerate(saved):
        mine = [segment for segment in segments if segment.unit == unit]
        outside = [p for segment in mine for p in segment.parameters] + list(common.values())
        outside += [
            values[i.value] for segment in mine for i in segment.ins if made_by[i.value] != unit
        ]
        known = {tensor.untyped_storage().data_ptr() for tensor in outside}
        totals.append(
            sum(storage.nbytes() for address, storage in kept.items() if address not in known)
        )
    return totals


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral", "t5", "bert", "vit"])
def test_saved_bytes_are_what_real_segments_save(name):
    dropout = {"attn_pdrop": 0.1, "resid_pdrop": 0.1} if name == "gpt2" else {}
    family = Family(name, **dropout)
    fuse(family.rewritten.graph)
    units = measure(family.captured, cut(family.captured), family.sharding, 1)
    assert [unit.saved_bytes for unit in units] == really_saved(family)


def test_what_lives_while_a_unit_runs_by_hand():
    """Of the feed-forward network of a Llama, per token: a forward has the sum that leaves and the
    last product; a backward the gradient of that sum and the one of the merged matrices, by then in
    place of what the last matrix kept.
    """
    unit = units_of(captured("llama"))[2]
    token = SAMPLES * LENGTH * 4
    forward, backward, deferred = unit.running_bytes
    assert forward == 2 * 64 * token
    assert backward == (64 + 2 * 96) * token
    assert deferred == backward + 96 * token  # a W needs what the last matrix kept
    assert unit.working(False) == backward and unit.working(True) == deferred
    unknown = replace(unit, running_bytes=(0, 0, 0), transient_bytes=7)
    assert unknown.working(True) == 7


@pytest.mark.parametrize(("adds", "made"), [(True, 3), (False, 1)])
def test_products_of_groups_make_16_bits_before_they_are_added(adds, made):
    """Those of all groups where a device has one kernel for them, else of one after the other."""
    seen = []
    left = torch.empty(8, 4, dtype=torch.bfloat16)
    right = torch.empty(8, 6, dtype=torch.bfloat16)
    ends = torch.tensor([2, 5, 8])
    weight = torch.empty(3, 4, 6)
    for defers in (False, True):
        sink = rehearsal._HeldOperands(defers=defers, overlaps=True, adds=adds)
        with rehearsal._Allocator() as allocator:
            allocator.known(left)
            allocator.known(right)
            sink.grouped(weight, left, right, ends)
            assert allocator.most == 0, "it waits for the launch of a collective, or for a W"
            sink.launched()
        seen.append(allocator.most)
    assert seen == [made * 4 * 6 * 2, 0]


@pytest.mark.parametrize(("dtype", "added"), [(torch.bfloat16, True), (torch.float32, False)])
def test_gradients_of_experts_are_added_up_after_their_products_in_16_bits(dtype, added):
    family = Family("mixtral", dtype=dtype)
    units = measure(family.captured, cut(family.captured), family.sharding, 1)
    experts = sum(
        parameter.numel()
        for name, parameter in family.model.named_parameters()
        if ".experts." in name
    )
    assert experts and sum(unit.added_values for unit in units) == experts * added


def test_flops_of_all_ranks_are_those_of_the_model():
    graph = captured("gpt2")
    total = sum(map(flops, graph.module.graph.nodes))
    assert sum(unit.flops for unit in units_of(graph, 1)) == total
    assert sum(unit.flops for unit in units_of(graph, 2)) == total // 2


def test_equal_layers_are_measured_once(monkeypatch):
    graph, measured = captured("gpt2"), []
    run = measuring.unit_costs
    monkeypatch.setattr(
        measuring,
        "unit_costs",
        lambda *args, **options: measured.append(1) or run(*args, **options),
    )
    assert len(units_of(graph)) == 8 and len(measured) == 4


def test_attention_with_dropout_keeps_its_probabilities_on_a_cpu_only():
    graph = captured("gpt2", attn_pdrop=0.1)
    on_cpu, on_gpu = (
        units_of(graph, fused_attention=fused)[1].saved_bytes for fused in (False, True)
    )
    normed, query, statistics = 64 * 4 + 2 * 4, 64 * 4, 8 * 4  # of a token
    assert on_gpu == SAMPLES * LENGTH * (normed + 3 * query + statistics + 64 * 4)
    assert any(unit.attention_drops for unit in units_of(graph, fused_attention=True))
    assert not any(
        unit.attention_drops for unit in units_of(captured("gpt2"), fused_attention=True)
    )
    probabilities = 8 * LENGTH * 4  # before and after dropout
    assert on_cpu - on_gpu >= SAMPLES * LENGTH * (2 * probabilities - statistics)


def test_values_that_pass_a_unit_are_told_from_those_it_makes():
    """The encoder's output passes through the decoder; of the units between, none makes it."""
    family = Family("t5")
    chain = cut(family.captured)
    units = measure(family.captured, chain, family.sharding, 1)
    hidden = 2 * 16 * 32 * 4
    assert max(unit.passed_bytes for unit in units) >= hidden
    for unit, nodes, crossing in zip(units, chain.units, chain.crossing, strict=False):
        assert unit.output_bytes - unit.passed_bytes == sum(
            node.meta["val"].nbytes for node in crossing if node in nodes
        )
    made = plan_chain(units, request(Grid(pp=2), microbatches=2, micro_batch_size=2))
    assert made.predicted_time > 0 and len(made.stages) == 2


def test_what_a_rank_stores_includes_padding():
    assert stored_values(TensorSharding("w", (11, 8), 0, padded=12), 2) == 48
    assert stored_values(TensorSharding("w", (12, 8), 1, blocks=2), 2) == 48
    assert (
        stored_values(TensorSharding("w", (12, 8)), 2) == 96
        and stored_values(TensorSharding("s", ()), 2) == 1
    )


def _llama(trained):
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8}
    sizes |= {"intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    return model


def _counted(model) -> int:
    """FLOPs of a step as torch counts them."""
    tokens = torch.randint(128, (SAMPLES, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return counter.get_total_flops()


def test_products_that_a_backward_leaves_out():
    """Frozen weights have no gradient, and neither has the input of the first layer."""
    trained = ("q_proj", "layers.1.mlp.down_proj")
    graph = capture(_llama(trained), TokenBatches("shifted").example(SAMPLES, LENGTH))
    units, whole = units_of(graph), units_of(captured("llama"))
    assert sum(unit.flops for unit in units) == sum(unit.flops for unit in whole)
    assert all(unit.unneeded_flops == (0, 0) for unit in whole)
    left_out = sum(sum(unit.unneeded_flops) for unit in units)
    assert 0 < left_out == _counted(_llama(("",))) - _counted(_llama(trained))
    assert [unit.name for unit in units if unit.unneeded_flops[0]] == ["model.layers.0.self_attn"]
