"""What is measured of three layers is what is measured of all that are alike."""

import pytest

from megatron_merak.cluster import CLUSTERS
from megatron_merak.config import ParallelConfig
from megatron_merak.graph.partition.cut import cut
from megatron_merak.graph.partition.shorten import shorten
from megatron_merak.planner.request import Request
from megatron_merak.stages.blueprint import measured
from megatron_merak.stages.traced import Traced

from .tiny import example, tiny

LAYERS = {"num_hidden_layers": 8}
# layers that are alike two by two
TURNS = {**LAYERS, "layer_types": ["sliding_attention", "full_attention"] * 4}
PARTS = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
WAYS = {
    "one rank": {},
    "recomputed": {"recompute_granularity": "selective"},
    "layers": {"tensor_model_parallel_size": 2},
    "parts": PARTS,
    "contexts": {"context_parallel_size": 2},
    "in a ring": {"context_parallel_size": 2, "cp_comm_type": "p2p"},
}
EXPERTS = {
    "experts": {"expert_model_parallel_size": 2},
    "experts of a layer": PARTS | {"expert_model_parallel_size": 2},
}
FAMILIES = {
    "llama": (LAYERS, WAYS),
    "gpt2": ({"n_layer": 7}, {name: WAYS[name] for name in ("one rank", "parts")}),
    "gemma2": (TURNS, {name: WAYS[name] for name in ("one rank", "layers")}),
    "qwen3_moe": (LAYERS, {"one rank": {}, "contexts": WAYS["contexts"], **EXPERTS}),
    "t5": ({"num_layers": 6, "num_decoder_layers": 6}, {"one rank": {}, "layers": WAYS["layers"]}),
}
CASES = [(family, way) for family, (_, ways) in FAMILIES.items() for way in ways]


def units_of(traced, parallel, captured=None):
    request = Request(parallel=ParallelConfig(**parallel), graph_sharding="cut")
    return measured(traced, request, CLUSTERS["cpu"], captured=captured)[2]


def traced_of(family, change=lambda model: None, **sizes):
    model = tiny(family, **sizes)[1]()
    change(model)
    return Traced(model, example(family))


@pytest.fixture(scope="module")
def models():
    made = {}

    def once(family):
        if family not in made:
            traced = traced_of(family, **FAMILIES[family][0])
            made[family] = traced, shorten(traced.captured, cut(traced.captured))
        return made[family]

    return once


@pytest.mark.parametrize(("family", "way"), CASES)
def test_units_are_those_of_the_whole_model(models, family, way):
    traced, short = models(family)
    parallel = FAMILIES[family][1][way]
    few = units_of(traced, parallel, short.captured)
    whole = units_of(traced, parallel)
    assert short.lengthened(few) == whole
    assert len(few) < len(whole)


def test_layers_that_turn_are_kept_three_times_two(models):
    traced, short = models("gemma2")
    layers = {name.split(".")[2] for name in short.captured.shapes if ".layers." in name}
    assert layers == {*"012345"}


@pytest.mark.parametrize("layer", [0, 3, 7])
def test_a_layer_that_is_not_trained_is_not_like_others(layer):
    def freeze(model):
        model.model.layers[layer].mlp.up_proj.weight.requires_grad_(False)

    traced = traced_of("llama", freeze, **LAYERS)
    short = shorten(traced.captured, cut(traced.captured))
    whole = units_of(traced, {})
    assert sum(unit.frozen > 0 for unit in whole) == 1
    assert short.lengthened(units_of(traced, {}, short.captured)) == whole


def test_three_layers_are_all_needed():
    traced = traced_of("llama", num_hidden_layers=3)
    assert shorten(traced.captured, cut(traced.captured)) is None


def test_layers_of_which_all_are_read_behind_them_are_not_alike():
    """The loss of a router reads those of all layers."""
    traced = traced_of("qwen3_moe", **LAYERS, output_router_logits=True)
    assert shorten(traced.captured, cut(traced.captured)) is None


def test_what_the_optimizer_keeps_tells_layers_apart():
    traced = traced_of("llama", **LAYERS)
    captured = traced.captured
    assert shorten(captured, cut(captured), lambda name: name) is None
