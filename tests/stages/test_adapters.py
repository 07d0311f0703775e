"""Adapters over frozen layers: every gradient is that of the eager model of peft, and in bf16 no
farther from the truth than autocast is.
"""

from collections import Counter
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_merak import ops
from megatron_merak.cluster import CLUSTERS
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.parallel.p2p import Pipes
from megatron_merak.pipeline_parallel.ops import Kind
from megatron_merak.plan import Grid
from megatron_merak.planner.cost import unit_costs
from megatron_merak.runtime.engine import Interpreter
from tests.choice import later
from tests.engines import engine_of
from tests.graph.fused import assert_errs_alike
from tests.graph.tiny import gradients, randomise, tiny
from tests.ranks import run_ranks

from .test_captured import trainer_of

CPU = torch.device("cpu")
ATTENTION = ("q_proj", "v_proj")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = "adapters with frozen layers"


def adapted(name, targets, dtype=torch.float32, **more):
    real, _, batch = tiny(name)
    config = LoraConfig(r=4, lora_alpha=12, target_modules=list(targets), **more)
    base = randomise(real()).to(dtype)
    return randomise(get_peft_model(base, config), seed=1).train(), batch


def computed(engine, batch):
    loss = engine.gradients([batch])
    shards = engine.shards(engine.buffer.main_grad)
    return loss, {shard.name: shard.tensor.clone() for shard in shards}


@pytest.mark.parametrize(
    ("name", "targets", "joined", "shared"),
    [
        ("llama", ATTENTION, 2, 0),
        ("llama", ALL, 2, 0),
        ("mistral", ("gate_proj", "k_proj", "o_proj"), 2, 0),
        # queries and keys are normed head by head: three results of one input
        ("qwen3", ALL, 0, 1),
    ],
)
def test_gradients_are_those_of_peft(name, targets, joined, shared):
    model, batch = adapted(name, targets)
    engine = engine_of(model, batch, build_mesh(Grid(), 0, CPU))
    loss, grads = computed(engine, batch)
    wanted_loss, wanted = gradients(model, batch)
    assert loss == pytest.approx(float(wanted_loss), rel=1e-6)
    assert grads.keys() == wanted.keys() and len(wanted) == 2 * 2 * len(targets)
    for key, grad in wanted.items():
        torch.testing.assert_close(grads[key], grad, rtol=1e-5, atol=2e-6 * float(grad.abs().max()))
    fused = engine.blueprint.fused
    assert fused[FUSED] == 2 * len(targets)
    assert bool(fused["query, key and value as one"]) == bool(joined)
    assert bool(fused["linears of one input"]) == bool(shared)


def _sharded(rank, world_size, name, targets, ways):
    model, batch = adapted(name, targets)
    batch = {key: torch.cat([value, value]) for key, value in batch.items()}
    engine = trainer_of(model, batch, Grid(tp=world_size), rank, 1, ways)
    loss = engine.gradients([batch])
    wanted_loss, wanted = gradients(model, batch)
    assert loss == pytest.approx(float(wanted_loss), rel=1e-5)
    shards = list(engine.shards(engine.buffer.main_grad))
    assert len(shards) == len(wanted)
    for shard in shards:
        full = wanted[shard.name]
        if shard.dim is not None:
            pieces = [full.narrow(shard.dim, a, b - a) for a, b in shard.intervals]
            full = torch.cat(pieces, shard.dim)
        atol = 1e-5 * float(wanted[shard.name].abs().max())
        torch.testing.assert_close(shard.tensor, full, rtol=1e-4, atol=atol)
    return engine.blueprint.fused[FUSED]


@pytest.mark.parametrize("ways", [{}, later({"sequence_parallel": True})], ids=["tp", "sequences"])
def test_so_they_are_where_ranks_divide_layers(ways):
    """Of the layers whose output features are divided the sum is in the product."""
    assert run_ranks(_sharded, 2, "llama", ALL, ways) == [2 * 5] * 2


@pytest.mark.parametrize("targets", [ATTENTION, ALL], ids=["q and v", "all"])
def test_in_bf16_they_are_as_near_to_the_truth_as_under_autocast(targets):
    half = torch.bfloat16
    truth, batch = adapted("llama", targets, half)
    assert truth.base_model.model.lm_head.weight.dtype == half
    model, _ = adapted("llama", targets, half)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    engine = engine_of(model, batch, build_mesh(Grid(), 0, CPU), dtype="bfloat16", autocast=True)
    assert {*engine.blueprint.traced.captured.dtypes.values()} == {half}
    loss, grads = computed(engine, batch)
    assert engine.blueprint.fused[FUSED] == 2 * len(targets)
    with torch.autocast("cpu", dtype=half):
        their_loss, theirs = gradients(model, batch)
    exact_loss, exact = gradients(truth.double(), batch)
    assert abs(loss - exact_loss) <= 2 * abs(their_loss - exact_loss) + 1e-3 * exact_loss
    assert_errs_alike(grads, theirs, exact, torch.finfo(half).eps)
    error, their_error = (
        sum((found[name] - value).square().sum() for name, value in exact.items())
        for found in (grads, theirs)
    )
    assert error <= 2 * their_error


def test_without_it_adapters_of_a_bf16_model_stay_fp32():
    model, batch = adapted("llama", ATTENTION, torch.bfloat16)
    engine = engine_of(model, batch, build_mesh(Grid(), 0, CPU), dtype="bfloat16")
    dtypes = engine.blueprint.traced.captured.dtypes
    assert {dtypes[name] == torch.float32 for name in dtypes if "lora_" in name} == {True}


def test_dropout_of_adapters_draws_what_it_would_alone():
    """The same masks, of the same values: with and without the fusion, bit by bit."""
    found = []
    for fuses in (True, False):
        model, batch = adapted("llama", ATTENTION, lora_dropout=0.5)
        engine = engine_of(model, batch, build_mesh(Grid(), 0, CPU)) if fuses else None
        if engine is None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("megatron_merak.graph.fusion.adapters.ROWS", ())
                engine = engine_of(model, batch, build_mesh(Grid(), 0, CPU))
        assert engine.blueprint.fused[FUSED] == 4 * fuses
        found.append(computed(engine, batch))
    (loss, grads), (other_loss, others) = found
    without, _ = gradients(adapted("llama", ATTENTION)[0], batch)
    assert loss == pytest.approx(other_loss, rel=1e-6)
    assert loss != pytest.approx(float(without), rel=1e-6)
    for name, grad in others.items():
        torch.testing.assert_close(
            grads[name], grad, rtol=1e-5, atol=2e-6 * float(grad.abs().max())
        )


def test_joined_layers_are_one_product():
    """Frozen weights, and the A of one input, lie side by side, as those of one layer would."""
    model, batch = adapted("llama", ALL)
    engine = engine_of(model, batch, build_mesh(Grid(), 0, CPU))
    shards = engine.parameter_shards
    for kinds in (("q", "k", "v"), ("gate", "up")):
        for end in ("base_layer.weight", "lora_A.default.weight"):
            names = [
                name
                for kind in kinds
                for name in shards.parameters
                if f"layers.1.{'self_attn' if len(kinds) == 3 else 'mlp'}.{kind}_proj.{end}" in name
            ]
            assert len(names) == len(kinds)
            joined = ops.linears.__globals__["joined"]([shards.parameters[n] for n in names])
            assert joined is not None, names


class Products(TorchDispatchMode):
    """Counts products and attention, by what the engine runs them for."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.at = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if self.at is not None and ("mm" in name or "attention" in name):
            self.counts[self.at] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def noting(self):
        perform = Interpreter.perform

        def noted(engine, state, step, defer=False):
            self.at = (step[0], step[1].unit)
            perform(engine, state, step, defer)
            self.at = None

        with mock.patch.object(Interpreter, "perform", noted), self:
            yield


def _below(rank, world_size, grid, ways):
    """What a rank computes, launches and sends for adapters of the last of four layers."""
    real, _, batch = tiny("llama", num_hidden_layers=4)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=[3])
    model = randomise(get_peft_model(randomise(real()), config)).train()
    engine = trainer_of(model, batch, grid, rank, 2, ways)
    messages = Counter()
    launched = Counter()
    products = Products()
    send = Pipes.send
    launch = Interpreter._launch

    def sending(pipes, op, *others):
        messages[op.kind] += 1
        return send(pipes, op, *others)

    def launching(interpreter, *others):
        launched[products.at] += 1
        return launch(interpreter, *others)

    with products.noting(), mock.patch.object(Pipes, "send", sending):
        with mock.patch.object(Interpreter, "_launch", launching):
            loss = engine.gradients([batch, batch])
    wanted_loss, wanted = gradients(model, batch)
    assert loss == pytest.approx(float(wanted_loss), rel=1e-5)
    for shard in engine.shards(engine.buffer.main_grad):
        full = wanted.pop(shard.name)
        atol = 1e-5 * float(full.abs().max())
        if shard.dim is not None:
            pieces = [full.narrow(shard.dim, a, b - a) for a, b in shard.intervals]
            full = torch.cat(pieces, shard.dim)
        torch.testing.assert_close(shard.tensor, full, rtol=1e-4, atol=atol)
    plan = engine.plan
    of_backward = {unit for (kind, unit) in products.counts if kind is not Kind.F}
    waits = {unit for (kind, unit), _ in launched.items() if kind is not Kind.F}
    return plan.units, plan.stages, of_backward, waits, messages, len(wanted)


@pytest.mark.parametrize(
    ("grid", "ways"),
    [
        (Grid(), {}),
        (Grid(), {"recompute_granularity": "full"}),
        (Grid(tp=2), {}),
        (Grid(pp=2), {}),
        pytest.param(Grid(pp=2), {"pipeline_schedule": "zb-h1"}, marks=pytest.mark.slow),
    ],
    ids=["one", "recomputed", "tp", "pp", "zb-h1"],
)
def test_nothing_is_computed_sent_or_priced_below_the_first_adapter(grid, ways):
    ranks = [_below(0, 1, grid, ways)] if grid.size == 1 else run_ranks(_below, 2, grid, ways)
    units, stages, *_ = ranks[0]
    names = [unit.name for unit in units]
    (first,) = (k for k, name in enumerate(names) if name.endswith("layers.3.self_attn"))
    of_backward = {unit for rank in ranks for unit in rank[2]}
    assert of_backward == {*range(first, len(units))}
    assert all(unit >= first for rank in ranks for unit in rank[3])
    assert [unit.backward for unit in units] == [k >= first for k in range(len(units))]
    costs = unit_costs(units, CLUSTERS["dgx-h100"], "bfloat16", grid)
    assert all((cost.backward > 0) == (k >= first) for k, cost in enumerate(costs))
    if grid.pp > 1:
        assert stages[0].last <= first, names
        sent = [rank[4] for rank in ranks]
        assert sent == [{Kind.SEND_F: 2}, {}]
        assert [rank[5] for rank in ranks] == [4, 0]  # gradients that the rank has not
