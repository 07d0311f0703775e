"""Linear layers in fp8: loss and every gradient are those of the model of transformers with the
layers of ``fp8_reference``, on any layout.
"""

import pytest
import torch

from megatron_merak.config.fp8 import Fp8
from megatron_merak.config.parallel import ParallelConfig
from megatron_merak.errors import ConfigError, PlanError
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid, Plan, plan_table
from megatron_merak.stages.traced import Traced
from tests.engines import blueprint_of, engine_of
from tests.fp8_reference import with_fp8
from tests.graph.tiny import gradients, randomise, tiny
from tests.ranks import run_ranks

from .test_captured import micro_batches, parts_of

CPU = torch.device("cpu")
COUNT = 4  # micro-batches


def _gradients(rank, world_size, name, grid, fp8, options, ways):
    torch.set_num_threads(1)
    real, _, batch = tiny(name, **options)
    mesh = build_mesh(grid, rank, CPU)
    parallel = ParallelConfig(
        tensor_model_parallel_size=grid.tp, pipeline_model_parallel_size=grid.pp, **ways
    )
    count = COUNT // grid.dp
    model = engine_of(
        randomise(real()), batch, mesh, microbatches=count, parallel=parallel, fp8=fp8
    )
    loss = model.gradients(micro_batches(name)[mesh.dp_rank :: grid.dp])
    return loss, parts_of(model, model.parameters.gatherer.full(model.buffer.own_gradient()))


def of_ranks(name, grid, fp8, options=None, ways=None):
    """Loss and full gradients."""
    arguments = (name, grid, fp8, options or {}, ways or {})
    if grid.size == 1:
        found = [_gradients(0, 1, *arguments)]
    else:
        found = run_ranks(_gradients, grid.size, *arguments)
    losses = [loss for loss, _ in found if loss is not None]
    full = {}
    for _, shards in found:
        for shard in shards:
            whole = full.setdefault(shard.name, torch.full(shard.shape, torch.nan))
            if shard.dim is None:
                whole.copy_(shard.tensor)
                continue
            start = 0
            for a, b in shard.intervals:
                into = whole.narrow(shard.dim, a, b - a)
                into.copy_(shard.tensor.narrow(shard.dim, start, b - a))
                start += b - a
    return losses[0], full


def apart(one, other):
    """The largest distance of two gradients of a parameter, beside the norm of all."""
    whole = torch.stack([grad.norm() for grad in one.values()]).norm()
    return max(float((one[name] - other[name]).norm() / whole) for name in one)


def _eager(name, fp8, options=None, but=()):
    """Of the model of transformers with layers of the reference."""
    real, _, _ = tiny(name, **(options or {}))
    model = with_fp8(randomise(real()), fp8.format, fp8.recipe, but)
    losses, every = zip(*(gradients(model, batch) for batch in micro_batches(name)), strict=True)
    mean = {key: sum(found[key] for found in every) / COUNT for key in every[0]}
    return float(sum(losses)) / COUNT, mean


@pytest.mark.parametrize("fp8", [Fp8("hybrid"), Fp8("e4m3"), Fp8("e4m3", "blockwise")], ids=str)
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_one_process_computes_what_plain_layers_do(name, fp8):
    loss, grads = of_ranks(name, Grid(), fp8)
    expected, others = _eager(name, fp8)
    wide, unrounded = of_ranks(name, Grid(), None)
    assert loss == pytest.approx(expected, rel=1e-6) != wide
    # a value at the edge of two roundings, of which an order of sums decides, is seen
    assert grads.keys() == others.keys() and apart(others, grads) < 2e-4
    assert apart(unrounded, grads) > 1e-2


def test_routers_and_experts_of_three_dimensions_stay():
    fp8 = Fp8("hybrid")
    real, _, batch = tiny("mixtral")
    with_router = blueprint(real(), batch, fp8)
    (sentence, *others) = with_router.beside_fp8()
    loss, grads = of_ranks("mixtral", Grid(), fp8)
    expected, theirs = _eager("mixtral", fp8, but=("mlp.gate", "block_sparse_moe.gate"))
    assert loss == pytest.approx(expected, rel=1e-6) and apart(theirs, grads) < 1e-6
    said = " ".join((sentence, *others))
    assert "gate.weight is not multiplied in fp8: it is a router." in said
    assert "is not multiplied in fp8: it has 3 dimensions." in said
    assert "lm_head.weight is not multiplied in fp8: it is outside of the layers." in said


def blueprint(model, batch, fp8, **asked):
    return blueprint_of(Traced(model, batch, "float32"), Grid(), fp8=fp8, **asked)


@pytest.mark.parametrize(
    ("grid", "ways"),
    [
        (Grid(pp=2), {}),
        pytest.param(Grid(pp=2), {"pipeline_schedule": "zb-h1"}, marks=pytest.mark.slow),
        (Grid(tp=2), {"sequence_parallel": True}),
        pytest.param(Grid(tp=2), {}, marks=pytest.mark.slow),
        pytest.param(Grid(tp=2, pp=2), {"recompute_granularity": "full"}, marks=pytest.mark.slow),
        pytest.param(
            Grid(dp=2),
            {"data_parallel_sharding_strategy": "optim_grads_params"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_layouts_compute_what_one_process_does(grid, ways):
    """Without other orders of sums to the bit. With these, values that lie at the edge of two
    roundings may differ in one: none of these does.
    """
    fp8 = Fp8("hybrid")
    loss, grads = of_ranks("llama", Grid(), fp8)
    other, others = of_ranks("llama", grid, fp8, ways=ways)
    assert grads.keys() == others.keys()
    if grid.tp == grid.dp == 1:
        assert loss == other and all(torch.equal(grads[name], others[name]) for name in grads)
        return
    assert other == pytest.approx(loss, rel=1e-6) and apart(grads, others) < 1e-6


@pytest.mark.slow
def test_shards_of_blocks_compute_what_one_process_does():
    fp8 = Fp8("e4m3", "blockwise")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    options = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1} | heads
    loss, grads = of_ranks("llama", Grid(), fp8, options)
    ways = {"sequence_parallel": True}
    other, others = of_ranks("llama", Grid(tp=2), fp8, options, ways)
    assert other == pytest.approx(loss, rel=1e-6) and apart(grads, others) < 1e-6


def test_layers_at_both_ends_stay():
    real, _, batch = tiny("llama", num_hidden_layers=3)
    found = blueprint(real(), batch, Fp8("hybrid", bf16_layers=(1, 1)))
    work = [unit.fp8_flops for unit in found.plan.units if unit.flops]
    assert [bool(each) for each in work] == [False, False, True, True, False, False, False]
    said = " ".join(found.beside_fp8())
    assert "it is of a first or last layer that is not to" in said


def test_plans_know_that_inputs_are_kept_in_fp8():
    """Beside the plan in bf16: a layer has three inputs of 32 features and one of 64."""
    real, _, batch = tiny("llama")
    wide, narrow = (
        blueprint_of(Traced(real(), batch, "bfloat16"), Grid(), fp8=fp8).plan
        for fp8 in (None, Fp8("hybrid"))
    )
    tokens = batch["input_ids"].numel()
    saved = [
        sum(unit.saved_bytes for unit in plan.units if "layers.0." in unit.name)
        for plan in (wide, narrow)
    ]
    scales = 4 * sum(2 + weights for weights in (3, 1, 2, 1))  # of an input: it and its inverse
    assert saved[0] - saved[1] == tokens * (3 * 32 + 64) - scales
    assert narrow.units[1].fp8_flops and not wide.units[1].fp8_flops
    assert narrow.fp8 == Fp8("hybrid") and Plan.from_json(narrow.to_json()) == narrow
    assert "linear layers in fp8 (hybrid, tensorwise)" in plan_table(narrow)


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"cp": 2}, ConfigError, "scales are of all tokens of a micro-batch"),
        ({"recompute_granularity": "selective"}, ConfigError, "keep their input in fp8"),
        ({"pipeline_schedule": "pipedream"}, ConfigError, "changes weights between a forward"),
        ({"tp_comm_overlap": "sub-pipeline", "tp": 2}, ConfigError, "scales of fp8 are of whole"),
    ],
    ids=str,
)
def test_what_would_differ_is_refused(asked, error, said):
    real, empty, batch = tiny("llama")
    grid = Grid(tp=asked.get("tp", 1), cp=asked.get("cp", 1))
    ways = {name: value for name, value in asked.items() if name not in ("tp", "cp")}
    with pytest.raises(error, match=said):
        blueprint_of(Traced(empty(), batch, "float32"), grid, fp8=Fp8("hybrid"), **ways)


def test_shards_that_cut_blocks_are_refused():
    _, empty, batch = tiny("llama")
    with pytest.raises(PlanError, match=r"q_proj.weight is cut inside of blocks of 128 x 128"):
        blueprint_of(Traced(empty(), batch, "float32"), Grid(tp=2), fp8=Fp8("e4m3", "blockwise"))


def test_a_model_of_which_nothing_computes_in_fp8_is_refused_for_what_keeps_it():
    with pytest.raises(PlanError, match="computes in fp8: none is in a list of modules. Leave it"):
        blueprint(Plain(), {"x": torch.ones(2, 16)}, Fp8("hybrid"))
    _, empty, batch = tiny("llama")
    reason = "q_proj.weight: it is of a first or last layer that is not to. Leave it out, or leave "
    with pytest.raises(PlanError, match=f"computes in fp8, as not .*{reason}fewer layers in bf16"):
        blueprint_of(
            Traced(empty(), batch, "float32"), Grid(), fp8=Fp8("hybrid", "tensorwise", (2, 9))
        )


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))

    def forward(self, x):
        return {"loss": self.body(x).square().mean()}


@pytest.mark.slow
def test_adapters_and_the_frozen_weights_below_them():
    """Those of rank 16; of rank 8 they would stay."""
    from peft import LoraConfig, get_peft_model

    real, _, batch = tiny("llama")

    def adapted():
        layers = LoraConfig(r=16, target_modules=["q_proj", "down_proj"])
        return randomise(get_peft_model(real(), layers)).train()

    mesh = build_mesh(Grid(), 0, CPU)
    model = engine_of(adapted(), batch, mesh, fp8=Fp8("hybrid"))
    loss = model.gradients([batch])
    grads = {shard.name: shard.tensor for shard in model.shards(model.buffer.main_grad)}
    expected, others = gradients(with_fp8(adapted(), "hybrid", "tensorwise"), batch)
    assert model.blueprint.fused["linear layers in fp8"] == 14 + 8 and len(grads) == 8
    assert loss == pytest.approx(float(expected), rel=1e-6)
    assert apart(grads, {name: others[name] for name in grads}) < 2e-4
