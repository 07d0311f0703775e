"""Unit costs against the model families they describe, against what the model keeps and its graph
says, and against the published formulas.
"""

from dataclasses import fields, replace

import pytest
import torch
import transformers

from megatron_merak.cluster import (
    CLUSTERS,
    Cluster,
    Device,
    Link,
    find_cluster,
    find_device,
    peak_flops,
)
from megatron_merak.config import ModelConfig
from megatron_merak.errors import PlanError
from megatron_merak.plan import DTYPE_BYTES, Grid, Unit, held_parameters
from megatron_merak.planner.cost import TIED_TABLE, gpt_units, model_flops, unit_costs
from megatron_merak.planner.layout import cut_costs
from megatron_merak.planner.make import gpt_chain
from megatron_merak.planner.overlap import Times
from megatron_merak.stages.gpt_model import traced_gpt
from megatron_merak.training.hf_model import blueprint_of
from tests.planner.kept import SAMPLES, gpt, kept_by

GPT2 = ModelConfig(
    num_layers=3,
    hidden_size=48,
    num_attention_heads=4,
    seq_length=16,
    max_position_embeddings=32,
    vocab_size=101,
    make_vocab_size_divisible_by=1,
)
LLAMA = ModelConfig(
    num_layers=3,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=8,
    group_query_attention=True,
    num_query_groups=2,
    seq_length=16,
    vocab_size=101,
    make_vocab_size_divisible_by=1,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0,
    attention_dropout=0,
)
QWEN2 = replace(LLAMA, add_qkv_bias=True, untie_embeddings_and_output_weights=False)
QWEN3 = replace(LLAMA, qk_layernorm=True, kv_channels=16)
SHAPE = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}


def reference(name: str) -> torch.nn.Module:
    with torch.device("meta"):
        match name:
            case "gpt2":
                config = transformers.GPT2Config(
                    n_layer=3, n_embd=48, n_head=4, n_positions=32, vocab_size=101
                )
                return transformers.GPT2LMHeadModel(config)
            case "llama":
                return transformers.LlamaForCausalLM(
                    transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False)
                )
            case "qwen2":
                return transformers.Qwen2ForCausalLM(
                    transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True)
                )
            case _:
                config = transformers.Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=False)
                return transformers.Qwen3ForCausalLM(config)


MODELS = {"gpt2": GPT2, "llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_equal_the_family(name):
    units = gpt_units(MODELS[name], 2, 4, tp=1)
    model = reference(name)
    assert held_parameters(units) == sum(p.numel() for p in model.parameters())
    layer = model.transformer.h[0] if name == "gpt2" else model.model.layers[0]
    assert units[1].parameters == sum(p.numel() for p in layer.parameters())
    head = model.get_output_embeddings().weight.numel()
    tied = () if MODELS[name].untie_embeddings_and_output_weights else ((TIED_TABLE, head),)
    assert units[-1].tied == units[0].tied == tied


@pytest.mark.parametrize("name", MODELS)
def test_tensor_ranks_divide_the_matrices_and_replicate_the_rest(name):
    whole, half = (gpt_units(MODELS[name], 2, 4, tp=tp) for tp in (1, 2))
    model = MODELS[name]
    kept = [
        p for n, p in reference(name).named_parameters() if p.dim() == 1 and not divided_bias(n)
    ]
    positions = model.max_positions * model.hidden_size if name == "gpt2" else 0
    padding = model.padded_vocab_size(2) - model.vocab_size
    tables = 2 if model.untie_embeddings_and_output_weights else 1
    replicated = sum(p.numel() for p in kept) + positions
    total = held_parameters(whole) + tables * padding * model.hidden_size
    assert 2 * held_parameters(half) == total + replicated
    assert 2 * half[1].flops == whole[1].flops


def divided_bias(name: str) -> bool:
    """Biases of column-parallel layers; those of row-parallel ones and the norms are replicated."""
    return name.endswith(("c_attn.bias", "c_fc.bias", "q_proj.bias", "k_proj.bias", "v_proj.bias"))


@pytest.mark.parametrize("name", MODELS)
def test_flops_equal_the_formula(name):
    """6 T [L (h (Q + 2K) + Q h + mu h f) + h V] + 6 L Q B s^2, with the causal half of the
    scores.
    """
    c, samples = MODELS[name], 5
    h, s, f, layers = c.hidden_size, c.seq_length, c.ffn_size, c.num_layers
    q, k, mu = c.num_attention_heads * c.head_dim, c.query_groups * c.head_dim, 3 if c.swiglu else 2
    products = layers * (h * (q + 2 * k) + q * h + mu * h * f) + h * c.padded_vocab_size(1)
    assert model_flops(c, samples) == 6 * samples * s * products + 6 * layers * q * samples * s**2


def test_units_are_named_in_order_and_every_border_is_one_activation():
    units = gpt_units(GPT2, 2, 2, tp=1)
    assert [unit.name for unit in units] == ["embedding", "layer.0", "layer.1", "layer.2", "head"]
    assert [unit.output_bytes for unit in units[:-1]] == [2 * 16 * 48 * 2] * 4


@pytest.mark.parametrize(
    ("name", "dropout", "multiple", "dtype"),
    [
        (name, *case)
        for name in MODELS
        for case in ((0.1, 1, "float32"), (0.0, 8, "float32"), (0.1, 8, "bfloat16"))
    ],
)
def test_saved_bytes_equal_what_the_model_saves(name, dropout, multiple, dtype):
    model = replace(
        MODELS[name],
        hidden_dropout=dropout,
        attention_dropout=dropout,
        make_vocab_size_divisible_by=multiple,
    )
    planned = gpt_units(model, SAMPLES, DTYPE_BYTES[dtype], tp=1, fused_dropout=False)
    found = kept_by(gpt(model, dtype=dtype))
    assert [unit.saved_bytes for unit in planned] == [unit.saved for unit in found]
    assert [unit.output_bytes for unit in planned] == [unit.leaves for unit in found]


@pytest.mark.parametrize("name", MODELS)
def test_an_fp32_residual_stream_keeps_and_sends_more(name):
    """Beside one of 16 bits: the residual sum inside a layer, the weights of norms, and what leaves
    a unit.
    """
    model = replace(MODELS[name], hidden_dropout=0, attention_dropout=0)
    plans = []
    for residual in (False, True):
        wide = replace(model, fp32_residual_connection=residual)
        plans.append(gpt_units(wide, SAMPLES, 2, tp=1, fused_dropout=False))
        found = kept_by(gpt(wide, dtype="bfloat16"))
        assert [unit.saved_bytes for unit in plans[-1]] == [unit.saved for unit in found]
        assert [unit.output_bytes for unit in plans[-1]] == [unit.leaves for unit in found]
    stream = SAMPLES * model.seq_length * model.hidden_size * 2
    weight = 4 * model.hidden_size
    layers = model.num_layers
    saved = [wide.saved_bytes - half.saved_bytes for half, wide in zip(*plans, strict=True)]
    assert saved == [0] + [stream + 2 * weight] * layers + [weight]
    left = [wide.output_bytes - half.output_bytes for half, wide in zip(*plans, strict=True)]
    assert left == [stream] * (layers + 1) + [0]


# of a unit, what the formulas and the graph say alike
ALIKE = [
    each.name
    for each in fields(Unit)
    if each.name
    not in ("kind", "tied", "transient_bytes", "operations", "products", "running_bytes")
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("tp", "dtype", "shape", "parallel"),
    [
        (1, "float32", {}, {}),
        (1, "bfloat16", {"hidden_dropout": 0.1, "attention_dropout": 0.1}, {}),
        (1, "bfloat16", {"fp32_residual_connection": True}, {}),
        (1, "float32", {"cross_entropy_chunk_size": 5}, {"recompute_granularity": "selective"}),
        (2, "bfloat16", {"hidden_dropout": 0.1, "attention_dropout": 0.1}, {}),
        (2, "float32", {"cross_entropy_chunk_size": 5}, {"sequence_parallel": True}),
        (2, "bfloat16", {"fp32_residual_connection": True}, {"sequence_parallel": True}),
        (4, "float32", {"hidden_dropout": 0.1}, {"sequence_parallel": True}),
    ],
)
def test_formulas_say_what_the_graph_says(name, tp, dtype, shape, parallel):
    """Of ``products`` only what they amount to: the formulas take those of one input as one, and
    the graph does not know the chunks of a loss.
    """
    still = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    model = replace(MODELS[name], **still | shape)
    if model.group_query_attention:
        model = replace(model, num_query_groups=4)
    config = gpt(model, tp, dtype, **parallel)
    cluster = CLUSTERS["cpu"]
    planned = gpt_chain(config, tp, cluster)
    measured = blueprint_of(traced_gpt(config), config, tp, cluster).plan.units
    assert len(measured) == len(planned) == model.num_layers + 2
    for ours, theirs in zip(planned, measured, strict=True):
        for each in ALIKE:
            assert getattr(ours, each) == getattr(theirs, each), (ours.name, each)
        assert [size for _, size in ours.tied] == [size for _, size in theirs.tied]
        for bound, found in zip(ours.running_bytes, theirs.running_bytes, strict=True):
            assert bound >= found, (ours.name, ours.running_bytes, theirs.running_bytes)
        chunked = ours.kind == "head" and model.cross_entropy_chunk_size
        if not chunked:
            assert multiplied(ours) == multiplied(theirs)


def multiplied(unit) -> int:
    """Multiplications of a unit's products."""
    return sum(m * n * k for m, n, k in unit.products)


def test_a_large_vocabulary_makes_the_head_outweigh_layers():
    """GPT-2's shape: measured on one core, the head takes 5.7 times as long as a layer."""
    model = ModelConfig(
        num_layers=2,
        hidden_size=768,
        num_attention_heads=12,
        seq_length=512,
        vocab_size=50257,
        hidden_dropout=0,
    )
    _, layer, _, head = unit_costs(
        gpt_units(model, 1, 4, tp=1), find_cluster("cpu"), "float32", Grid()
    )
    assert 4.5 < (head.forward + head.backward) / (layer.forward + layer.backward) < 7


def test_the_optimizer_makes_the_embedding_cost_time():
    units = gpt_units(replace(GPT2, num_layers=2), 1, 4, tp=1)
    idle = [Times(0.0, 0.0, 0.0)] * 4
    costs, shared = cut_costs(units, idle, microbatches=8, update=0.5)
    layer = 12 * 48**2 + 13 * 48
    assert costs == [0.5 * 32 * 48, 0.5 * layer, 0.5 * layer, 0.5 * 2 * 48]
    assert shared == [(0.5 * 101 * 48, [0, 3])]


def test_tensor_parallel_collectives_cost_time():
    units = gpt_units(LLAMA, 1, 4, tp=2)
    alone = unit_costs(units, find_cluster("cpu"), "float32", Grid())
    together = unit_costs(units, find_cluster("cpu"), "float32", Grid(tp=2))
    assert [cost.reduces for cost in alone] == [(0, 0)] * 5
    more = [(cost.reduces[0] > 0, cost.reduces[1] > 0) for cost in together]
    # the forward of the head sends statistics of its loss
    assert more == [(True, False), *[(True, True)] * 3, (True, True)]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA H200", "H200"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GB300", "GB300"),
        ("AMD Instinct MI300X", "MI300X"),
        ("cpu", "cpu"),
    ],
)
def test_devices_are_found_by_the_names_drivers_give(name, row):
    assert find_device(name).name == row


def test_peaks_are_dense():
    assert peak_flops("A100") == 312e12 and peak_flops("NVIDIA H200") == 989.4e12
    with pytest.raises(PlanError, match="H100"):
        peak_flops("GeForce RTX 4090")


def test_levels_of_context_parallel_ranks_are_priced_with_their_own_links():
    """Two neighbours of a node exchange half of what they have; what goes to the next node, a rank
    sends through its own card.
    """
    device = Device("card", 1e9, 1e9, 1e12, 0, 0.5)
    links = Link("in", 1e-5, 4e7), Link("out", 1e-3, 1e7)
    unit = Unit(
        "layer",
        "layer",
        8,
        1,
        0,
        16,
        cp_inner=2,
        inner_sent=((3, 8000), (3, 8000), (2, 4000)),
        outer_sent=((1, 2000), (2, 4000), (2, 4000)),
        hiding=0.0,
    )

    def priced(ranks_per_node):
        return unit_costs([unit], Cluster(device, ranks_per_node, *links), "float32", Grid(cp=4))[0]

    two = priced(2)
    near = [3e-5 + 4000 / 4e7, 3e-5 + 4000 / 4e7, 2e-5 + 2000 / 4e7]
    far = [1e-3 + 2000 / 1e7, 2e-3 + 4000 / 1e7, 2e-3 + 4000 / 1e7]
    found = (*two.reduces, two.bare)
    assert found == pytest.approx([a + b for a, b in zip(near, far, strict=True)])
    # a node of three ranks has a group of neighbours whose ranks are on two nodes
    assert priced(3).reduces[0] == pytest.approx(3e-3 + 4000 / 1e7 + far[0])
    inside = [1e-5 + 2000 / 4e7, 2e-5 + 4000 / 4e7]
    one = priced(4)
    assert one.reduces == pytest.approx([a + b for a, b in zip(near[:2], inside, strict=True)])
    # in halves as many bytes are sent in twice as many messages
    assert one.half_reduces[0] == pytest.approx(one.reduces[0] + 4e-5)


def test_gradients_of_weights_that_are_made_in_16_bits_move_more_bytes():
    device = Device(
        "card",
        bfloat16_flops=1e9,
        float32_flops=1e9,
        memory_bandwidth=1.0,
        memory=0,
        matmul_efficiency=1.0,
    )
    link = Link("wire", 0.0, 1.0)
    cluster = Cluster(device, 8, inside=link, between=link)
    unit = Unit("layer", "layer", parameters=8, flops=1000, saved_bytes=0, output_bytes=16)
    one, other = unit_costs((unit, replace(unit, added_values=6)), cluster, "bfloat16", Grid())
    assert other.forward == one.forward
    assert other.weight - one.weight == pytest.approx(4 * 6)
    assert other.backward - one.backward == pytest.approx(4 * 6)


def test_rows_are_exchanged_while_a_shared_expert_computes():
    """The shorter one of both counts. Rows of copies, and those of ranks of a layer, cost alike here."""
    device = Device("card", 1e9, 1e9, 1e12, 0, 1.0)
    unit = Unit(
        "layer",
        "layer",
        8,
        1000,
        0,
        16,
        attention_flops=200,
        unneeded_flops=(0, 400),
        routed_bytes=(4000, 4000),
        meanwhile_flops=(300, 300, 100, 0),
        meanwhile_bytes=(2000, 2000),
    )
    alone = replace(unit, routed_bytes=(0, 0), reduced_bytes=(2000, 2000), reduces=(1, 1))
    alone = replace(alone, exchanged_bytes=(2000, 2000))

    def priced(unit, bandwidth, grid, copies):
        link = Link("wire", 0.0, bandwidth)
        return unit_costs([unit], Cluster(device, 8, link, link), "float32", grid, copies)[0]

    for each, grid, copies in ((unit, Grid(dp=2), 2), (alone, Grid(tp=2), 1)):
        slow = priced(each, 1e6, grid, copies)  # half of the rows stay: 1 ms
        assert slow.reduces == pytest.approx((2e-3, 2e-3))
        # a multiply-add of the shared expert takes as long as others
        assert slow.behind == pytest.approx((3e-7, 4e-7)) and slow.behind_weights == pytest.approx(
            1e-7
        )
        fast = priced(each, 1e10, grid, copies)
        assert fast.behind == pytest.approx((1e-7, 1e-7)) and fast.behind_weights == 0.0
        assert fast.beyond == pytest.approx((1e-7, 1e-7))


def test_an_exchange_of_one_rank_of_each_node_uses_no_links_inside():
    device = Device("card", 1e9, 1e9, 1e12, 0, 0.5)
    cluster = Cluster(device, 2, Link("in", 1e-5, 1e6), Link("out", 1e-3, 1e7))
    assert cluster.exchange_link([0, 2]).bandwidth == 1e7
    assert cluster.exchange_link([0, 1, 2, 3]).bandwidth == 1e6


@pytest.mark.parametrize("model, read", [(LLAMA, 2), (GPT2, 1)])
@pytest.mark.parametrize("name", ["dgx-h100", "cpu"])
def test_an_activation_that_is_computed_again_takes_no_less_time(model, read, name):
    """It is written and read in the forward all the same, and once more in the backward."""
    cluster = find_cluster(name)
    keeping, computing = (
        unit_costs(
            gpt_units(model, 2, 2, 1, recompute_activations=again), cluster, "bfloat16", Grid()
        )[1]
        for again in (False, True)
    )
    activation = 2 * model.seq_length * model.ffn_size * 2
    more = cluster.device.passes_time((read + 1) * activation)
    assert more > 0
    assert computing.forward == pytest.approx(keeping.forward, rel=1e-12)
    assert computing.backward == pytest.approx(keeping.backward + more, rel=1e-12)
