"""Adapters over frozen weights in 4 bits: every gradient is, to the bit, that of the same values as
matrices, in every layout; and, without fusions, that of peft with bitsandbytes.
"""

from types import SimpleNamespace

import pytest
import torch

from megatron_merak.config import ParallelConfig
from megatron_merak.config.fp8 import Fp8
from megatron_merak.errors import ConfigError, PlanError, TraceError
from megatron_merak.graph.fusion.four_bit import check_cuts
from megatron_merak.ops import FourBit, stored_bytes
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid, TensorSharding
from megatron_merak.planner.memory import stage_memory
from megatron_merak.stages.precision import compute_dtype
from megatron_merak.stages.traced import Traced
from tests.engines import blueprint_of, engine_of
from tests.four_bit import (
    ALL,
    ATTENTION,
    adapted,
    four_bit,
    needs_bitsandbytes,
    save_llama,
    tokens,
    twin_of,
)
from tests.graph.fused import assert_errs_alike
from tests.graph.tiny import gradients
from tests.ranks import run_ranks

from .test_captured import trainer_of

pytestmark = needs_bitsandbytes
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"))


def computed(engine, batches):
    loss = engine.gradients(batches)
    shards = engine.shards(engine.buffer.main_grad)
    return float(loss), {shard.name: shard.tensor.clone() for shard in shards}


def assert_equal(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys() and one[1]
    for name, grad in one[1].items():
        assert torch.equal(grad, other[1][name]), name


def alone(model, batch, **more):
    engine = engine_of(model, batch, build_mesh(Grid(), 0, CPU), **more)
    return engine, computed(engine, [batch])


@pytest.mark.parametrize(
    ("targets", "kind", "double"),
    [
        (ALL, "nf4", True),
        pytest.param(ALL, "fp4", False, marks=pytest.mark.long),
        pytest.param(ATTENTION, "nf4", False, marks=pytest.mark.long),
        (ATTENTION, "fp4", True),
    ],
    ids=["all-nf4-double", "all-fp4-plain", "q and v-nf4-plain", "q and v-fp4-double"],
)
def test_gradients_are_those_of_the_same_values_as_matrices(directory, targets, kind, double):
    batch = tokens()
    engine, found = alone(adapted(four_bit(directory, kind, double), targets), batch)
    twin, wanted = alone(adapted(twin_of(four_bit(directory, kind, double)), targets), batch)
    assert_equal(found, wanted)
    fused = dict(engine.blueprint.fused)
    assert fused.pop("weights in 4 bits") == 2 * 7
    assert fused == twin.blueprint.fused


def without_fusions(monkeypatch):
    monkeypatch.setattr("megatron_merak.graph.fusion.fuse._rules", lambda *options: ())
    monkeypatch.setattr("megatron_merak.graph.fusion.heads.join_heads", lambda *options: 0)
    monkeypatch.setattr("megatron_merak.graph.fusion.linear.share_inputs", lambda *options: 0)


HALF = torch.bfloat16


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "double", "dtypes"),
    [
        ("nf4", True, {}),
        ("fp4", False, {}),
        ("nf4", False, {"dtype": HALF}),
        # rounded from 16 bits, which the backward of bitsandbytes passes through
        ("nf4", True, {"dtype": HALF, "compute": torch.float32}),
        ("nf4", False, {"compute": HALF}),
    ],
    ids=["nf4", "fp4", "bf16", "bf16 in fp32", "fp32 in bf16"],
)
def test_without_fusions_they_are_those_of_peft_and_bitsandbytes(
    directory, kind, dtypes, double, monkeypatch
):
    without_fusions(monkeypatch)
    batch = tokens()
    model = adapted(four_bit(directory, kind, double, **dtypes))
    dtype = "bfloat16" if "dtype" in dtypes else "float32"
    loss, grads = gradients(model, batch)
    _, found = alone(model, batch, dtype=dtype)
    assert_equal(found, (float(loss), grads))


@pytest.mark.parametrize("compute", [torch.float32, HALF], ids=["of fp32", "of bf16"])
def test_under_autocast_products_are_in_16_bits_as_those_of_bitsandbytes(directory, compute):
    model = adapted(four_bit(directory, dtype=HALF, compute=compute), ALL)
    batch = tokens()
    engine, found = alone(model, batch, dtype="bfloat16", autocast=True)
    loss, grads = found
    assert {*engine.blueprint.traced.captured.dtypes.values()} == {HALF}
    assert engine.blueprint.fused["adapters with frozen layers"] == 2 * 7
    twin = adapted(twin_of(four_bit(directory, dtype=HALF)), ALL)
    _, of_matrices = alone(twin, batch, dtype="bfloat16", autocast=True)
    assert_equal(found, of_matrices)
    with torch.autocast("cpu", dtype=HALF):
        their_loss, theirs = gradients(model, batch)
    truth = adapted(twin_of(four_bit(directory, dtype=HALF)), ALL).double()
    exact_loss, exact = gradients(truth, batch)
    assert abs(loss - exact_loss) <= 2 * abs(their_loss - exact_loss) + 1e-3 * exact_loss
    assert_errs_alike(grads, theirs, exact, torch.finfo(HALF).eps)
    error, their_error = (
        sum((found[name] - value).square().sum() for name, value in exact.items())
        for found in (grads, theirs)
    )
    assert error <= 2 * their_error


def _layout(rank, world_size, directory, grid, ways, double):
    batches = [tokens(seed=seed) for seed in range(2)]
    found = []
    for make in (lambda model: model, twin_of):
        model = adapted(make(four_bit(directory, double=double)), ALL)
        engine = trainer_of(model, batches[0], Grid(**grid), rank, len(batches), ways)
        found.append(computed(engine, batches[: len(batches) // Grid(**grid).dp]))
    return found


def _together(results, stages):
    """The loss, and the gradients of all ranks. stages: ranks are stages, which another plan may cut
    elsewhere.
    """
    (loss, *others) = [loss for loss, _ in results]
    assert others == [loss] * len(others)
    grads = {}
    for rank, (_, own) in enumerate(results):
        grads |= {(name, 0 if stages else rank): grad for name, grad in own.items()}
    return loss, grads


@pytest.mark.parametrize(
    ("grid", "ways", "double"),
    [
        ({"pp": 2}, {}, True),
        pytest.param({"pp": 2}, {"recompute_granularity": "full"}, False, marks=pytest.mark.long),
        pytest.param({"dp": 2}, {}, False, marks=pytest.mark.long),
        ({"tp": 2}, {}, False),
        pytest.param({"tp": 2}, {"sequence_parallel": True}, True, marks=pytest.mark.long),
    ],
    ids=["pp", "recomputed", "dp", "tp", "sequences"],
)
def test_so_they_are_where_ranks_divide_the_model(directory, grid, ways, double):
    found = run_ranks(_layout, 2, directory, grid, ways, double, timeout=280)
    stages = grid.get("pp", 1) > 1
    four_bits, twin = (_together(results, stages) for results in zip(*found, strict=True))
    assert_equal(four_bits, twin)
    assert len(four_bits[1]) == 2 * 14 * (1 if stages else 2)


def planned(model, **asked):
    return blueprint_of(Traced(model, tokens()), Grid(), **asked).plan


@pytest.mark.parametrize("double", [False, True], ids=["plain", "double"])
def test_plans_count_what_is_stored_and_what_is_moved(directory, double):
    plan = planned(adapted(four_bit(directory, double=double)))
    twin = planned(adapted(twin_of(four_bit(directory))))
    values = sum(unit.packed for unit in plan.units)
    assert values == 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 256)
    assert [unit.parameters for unit in plan.units] == [unit.parameters for unit in twin.units]
    stored = sum(unit.packed_bytes for unit in plan.units)
    scales = values / 64
    if double:
        # fp32 scales of 256, and for each weight a table of 256 values and an offset; aligned
        least = values / 2 + scales + 4 * scales / 256 + 14 * 4 * 257
        assert least <= stored <= least + 14 * 64
    else:
        assert stored == values / 2 + 4 * scales
    weights, matrices = (stage_memory(each)[0].weights for each in (plan, twin))
    assert matrices - weights == 4 * values - stored
    moved = [sum(unit.unpacked_bytes[way] for unit in plan.units) for way in (0, 1)]
    # of query, key and value of the first layer no backward makes a matrix: the embedding is frozen
    first = 128 * 128 + 2 * 64 * 128
    hows = [FourBit("nf4", 64, rows, 128, "float32", double) for rows in (128, 64, 64)]
    unread = sum(map(stored_bytes, hows)) + 4 * first
    assert moved == [stored + 4 * values, stored + 4 * values - unread]
    assert not any(unit.packed or any(unit.unpacked_bytes) for unit in twin.units)
    # while a unit runs there is one matrix, and a second one where a CPU copies it beside others
    for own, other in zip(plan.units, twin.units, strict=True):
        more = own.running_bytes[1] - other.running_bytes[1]
        assert 0 <= more <= 2 * 4 * own.packed
        assert own.saved_bytes == other.saved_bytes


def test_a_plan_that_is_stored_is_followed(directory):
    model = adapted(four_bit(directory, double=True))
    _, wanted = alone(model, tokens())
    plan = planned(model)
    again = type(plan).from_dict(plan.to_dict())
    assert again == plan
    _, found = alone(adapted(four_bit(directory, double=True)), tokens(), plan=again)
    assert_equal(found, wanted)


def refused(error, match, call):
    with pytest.raises(error, match=match) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_what_is_not_done_is_refused_by_name(directory):
    refused(
        ConfigError,
        "model LlamaForCausalLM: its weights are in 4 bits, and there is no adapter.*get_peft_model",
        lambda: compute_dtype(four_bit(directory), bf16=False),
    )
    for kind, eight, words in (
        ("bitsandbytes", True, "bitsandbytes to 8 bits"),
        ("gptq", False, "gptq"),
        ("awq", False, "awq"),
        ("hqq", False, "hqq"),
    ):
        model = twin_of(four_bit(directory))
        model.is_quantized, model.is_loaded_in_8bit = True, eight
        model.quantization_method = SimpleNamespace(value=kind)
        refused(
            ConfigError,
            rf"model \w+: its weights are quantized by {words}, .*torch.bfloat16",
            lambda model=model: compute_dtype(adapted(model), bf16=False),
        )
    from bitsandbytes.nn import Linear8bitLt

    model = adapted(four_bit(directory))
    model.base_model.model.lm_head = Linear8bitLt(128, 96, bias=False)
    refused(
        ConfigError, "module .*lm_head: it is a Linear8bitLt", lambda: compute_dtype(model, False)
    )
    dora = adapted(four_bit(directory), use_dora=True)
    refused(TraceError, "4-bit weight .*q_proj.*reads its values", lambda: Traced(dora, tokens()))
    plain = adapted(four_bit(directory))
    fp8 = {"fp8": Fp8("e4m3"), "parallel": ParallelConfig()}
    refused(PlanError, "--fp8-format.*are in 4 bits", lambda: planned(plain, **fp8))
    host = {"parallel": ParallelConfig(offload_model_states=True)}
    refused(PlanError, "offload_model_states.*are in 4 bits", lambda: planned(plain, **host))
    state = plain.base_model.model.model.layers[1].mlp.up_proj.weight.quant_state
    state.packing_format_for_cpu = True
    refused(ConfigError, "4-bit weight .*1.mlp.up_proj.*packed", lambda: Traced(plain, tokens()))


def test_an_output_layer_in_4_bits_is_no_part_of_the_loss(directory):
    """Whose gradients are then those of an output layer before it, but for the order of sums."""
    batch = tokens()
    more = {"llm_int8_skip_modules": ["none"]}
    engine, (loss, grads) = alone(adapted(four_bit(directory, **more)), batch)
    assert engine.blueprint.fused["weights in 4 bits"] == 2 * 7 + 1
    twin, (their_loss, theirs) = alone(adapted(twin_of(four_bit(directory, **more))), batch)
    assert twin.blueprint.fused["output layer with loss"] == 1
    assert loss == pytest.approx(their_loss, rel=1e-6) and grads.keys() == theirs.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-4, atol=1e-6)


def test_no_activation_before_a_layer_in_4_bits_is_recomputed(directory):
    selective = {"parallel": ParallelConfig(recompute_granularity="selective")}
    refused(
        PlanError,
        "--recompute-granularity selective.*whose weight is not in 4 bits",
        lambda: planned(adapted(four_bit(directory)), **selective),
    )


def test_rows_that_share_a_block_are_refused(tmp_path):
    """bitsandbytes makes other values of these on a CPU than those that were packed."""
    base = save_llama(tmp_path, hidden_size=96)
    refused(
        ConfigError,
        "4-bit weight .*q_proj.*its 96 inputs are no multiple of 64.*llm_int8_skip_modules",
        lambda: Traced(adapted(four_bit(base)), tokens()),
    )


def test_weights_outside_of_linear_layers_are_refused(directory):
    model = adapted(four_bit(directory))
    model.other = model.base_model.model.model.layers[0].mlp.up_proj.weight
    refused(
        ConfigError, "parameter other: it is in 4 bits outside", lambda: compute_dtype(model, False)
    )


@pytest.mark.parametrize(
    ("rows", "columns", "tensor", "fits"),
    [
        (64, 128, {"dim": 0}, True),
        (64, 128, {"dim": 0, "blocks": (32, 16, 16)}, True),
        (64, 128, {"dim": 1}, True),
        (64, 128, {}, True),
        (64, 192, {"dim": 1}, False),
        (63, 128, {"dim": 0, "padded": 64}, False),
    ],
)
def test_ranks_cut_between_blocks(rows, columns, tensor, fits):
    how = {"w": FourBit("nf4", 64, rows, columns, "float32", False)}
    tensors = {"w": TensorSharding("w", (rows, columns), **tensor)}
    check_cuts(how, tensors, 1)
    if fits:
        check_cuts(how, tensors, 2)
    else:
        refused(PlanError, "w.*in 4 bits", lambda: check_cuts(how, tensors, 2))
