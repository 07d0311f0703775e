"""A search of captured models divides their sequences and their experts where prices say so."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from megatron_merak.arguments import build_parser, read
from megatron_merak.cluster import Cluster, find_cluster
from megatron_merak.config import HFConfig
from megatron_merak.planner.search import Search
from megatron_merak.training.searched import search_of
from tests.planner.search.tried import everything

LLAMA = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=2,
    num_attention_heads=16,
    num_key_value_heads=8,
    vocab_size=32000,
    max_position_embeddings=131072,
    use_cache=False,
)
MIXTURE = Qwen3MoeConfig(
    hidden_size=1024,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=128,
    num_experts=64,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    vocab_size=8000,
    max_position_embeddings=4096,
    use_cache=False,
)


def searched(path: Path, config: PretrainedConfig, length: int, cluster: Cluster) -> Search:
    file = path / "model.json"
    names = {"architectures": [type(config).__name__.replace("Config", "ForCausalLM")]}
    file.write_text(json.dumps(config.to_dict() | names))
    words = f"--model {file} --seq-length {length} --global-batch-size 8 --bf16".split()
    job, _ = read(build_parser(config=HFConfig), [*words, "--micro-batch-size", "1"], HFConfig)
    return search_of(job, cluster, {})


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> Search:
    path = tmp_path_factory.mktemp("long")
    return searched(path, LLAMA, length=131072, cluster=find_cluster("dgx-h100"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Search:
    path = tmp_path_factory.mktemp("mixture")
    return searched(path, MIXTURE, length=4096, cluster=find_cluster("dgx-a100"))


@pytest.mark.long
def test_long_sequences_are_divided_where_a_batch_has_fewer_samples_than_ranks(long):
    found = long.run(8, [4], {"mb": 1, "pp": 1})
    assert found.best.choice.cp > 1 and found.best.plan.grid.cp == found.best.choice.cp
    whole = long.run(8, [4], {"mb": 1, "pp": 1, "cp": 1})
    assert whole.fastest.seconds > found.fastest.seconds
    # ranks of half of the positions compute half, and need half as much for activations
    one, two = (long.run(2, [2], {"mb": 1, "pp": 1, "tp": 1, "cp": cp}).best for cp in (1, 2))
    assert two.seconds == pytest.approx(one.seconds, rel=0.03)


def test_bounds_hold_where_sequences_are_divided(long):
    choices = [choice for choice, _ in everything(long, 8, 8, {"mb": 1, "tp": 1})]
    assert {choice.cp for choice in choices} == {1, 2, 4, 8}


@pytest.mark.long
def test_bounds_hold_where_experts_are_divided(mixture):
    choices = [choice for choice, _ in everything(mixture, 8, 16, {"mb": 2, "tp": 4, "sp": True})]
    divided = {(choice.ep, choice.etp) for choice in choices}
    assert divided == {(1, 1), (4, 1), (8, 1), (2, 4)}


def test_bounds_hold_where_replicas_divide_experts(mixture):
    choices = [choice for choice, _ in everything(mixture, 8, 16, {"mb": 1, "tp": 1, "cp": 1})]
    assert {choice.ep for choice in choices} == {1, 8}


def test_experts_are_divided_rather_than_sharded(mixture):
    found = mixture.run(8, [16], {"tp": 8})
    assert found.best.choice.ep == 8 and found.best.plan.expert_parallel == 8
    assert mixture.run(8, [16], {"tp": 8, "ep": 1}).fastest.seconds > found.fastest.seconds


def test_a_model_without_experts_divides_none(long):
    assert not long.model.has_experts
    assert {layer.ep for layer in long.space(8, [8], {}).layers()} == {1}
    refused = long.run(8, [8], {"ep": 2, "tp": 2}).refusal
    assert "no grouped product of experts" in str(refused)


def test_weights_and_sequences_are_shared_together_where_it_is_asked_for(long):
    """Four ranks of a layer with half of the weights and half of the positions each."""
    pins = {"mb": 1, "pp": 1, "sharding": "optim", "recompute": "none"}
    both = long.run(8, [4], {"cp": 2, "tp": 2, **pins}).best.plan
    shared = long.run(8, [4], {"cp": 2, "tp": 1, **pins}).best.plan
    assert (both.grid.tp, both.grid.cp, both.grid.dp) == (2, 2, 2)
    for half, whole in zip(both.units[1:-1], shared.units[1:-1], strict=True):
        assert half.flops == whole.flops // 2
        assert half.exchanged_bytes[0] == whole.exchanged_bytes[0] // 2


def test_a_ring_is_tried_beside_the_other_kinds_and_hidden_by_attention(long):
    """Of long sequences attention takes longer than keys and values to the next rank."""
    pins = {"mb": 1, "pp": 1, "tp": 1, "cp": 8}
    assert {layer.kind for layer in long.space(8, [1], pins).layers()} == {"", "p2p"}
    found = long.run(8, [1], pins).best.choice
    kinds = {
        kind: long.run(8, [1], {**pins, "kind": kind}).fastest
        for kind in ("a2a", "all_gather", "p2p")
    }
    best = min(kinds.values(), key=lambda each: each.seconds)
    assert found.kind == ("p2p" if best is kinds["p2p"] else "")
    assert kinds["p2p"].plan.cp_comm_type == "p2p"
    assert {unit.cp_comm_type for unit in kinds["p2p"].plan.units} == {"", "p2p"}
    assert kinds["p2p"].seconds < kinds["all_gather"].seconds
