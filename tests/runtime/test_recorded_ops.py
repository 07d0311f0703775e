"""Steps whose ops are recorded and replayed have the bits of steps that run op by op."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from megatron_merak.config import Config, OptimizerConfig, ParallelConfig, TrainConfig
from megatron_merak.errors import ConfigError
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.pipeline_parallel.ops import ops_of
from megatron_merak.plan import Grid
from megatron_merak.planner import plan
from megatron_merak.runtime.recordings import CallRecording
from megatron_merak.stages.blueprint import ModelTask
from megatron_merak.stages.graphs import check_graphs
from megatron_merak.stages.traced import OwnLoss
from tests.engines import engine_of, gpt_model
from tests.models.families import FAMILIES, batch
from tests.ranks import run_ranks
from tests.runtime.test_engine import CPU, with_dropout

MICROBATCHES = 4
RATES = [(1e-2, 0.1), (1e-2, 0.0)]
RECOMPUTED = {"recompute_granularity": "full"}
PP2 = {"pipeline_model_parallel_size": 2}


def config_of(name, flags, *, bf16=False, replicas=1, graphs=True):
    recorded = {"cuda_graph_impl": "local", "cuda_graph_warmup_steps": 1} if graphs else {}
    return Config(
        model=replace(FAMILIES[name], num_layers=4),
        parallel=ParallelConfig(**flags, **recorded),
        train=TrainConfig(
            micro_batch_size=2, global_batch_size=2 * MICROBATCHES * replicas, bf16=bf16
        ),
    )


def made(config, rank=0, world_size=1):
    planned = plan(config, world_size)
    return gpt_model(config, planned, build_mesh(planned.grid, rank, CPU))


def steps(model, numbers=range(5)):
    """Losses of training steps, and the weights after each."""
    found = []
    for number in numbers:
        loss = one_step(model, number)
        model.gatherer.finish()
        found.append((loss, model.buffer.data.clone()))
    return found


def one_step(model, number, micro_batches=MICROBATCHES, samples=2):
    replicas = model.plan.grid.dp
    first = (number * replicas + model.mesh.replica) * MICROBATCHES
    batches = [batch(samples, seed=first + k) for k in range(micro_batches)]
    reduced = model.backward(model.from_samples(batches))
    model.update(RATES, reduced)
    return None if reduced is None else model.loss(reduced.tolist())


def recordings(model, micro_batches=MICROBATCHES):
    return model.executor(micro_batches).recordings


def same(recorded, plain):
    assert len(recorded) == len(plain)
    for (loss, weights), (loss_plain, weights_plain) in zip(recorded, plain, strict=True):
        assert loss == loss_plain
        assert torch.equal(weights, weights_plain)
    assert not torch.equal(plain[0][1], plain[-1][1])


def compute_ops(model):
    entries = model.executor(MICROBATCHES).program
    return sum(op.kind.is_compute for entry in entries for op in ops_of(entry))


def with_and_without(rank, world_size, name, flags, *, bf16=False, plain_ops=0):
    replicas = world_size // flags.get("pipeline_model_parallel_size", 1)
    recorded = made(config_of(name, flags, bf16=bf16, replicas=replicas), rank, world_size)
    plain = made(
        config_of(name, flags, bf16=bf16, replicas=replicas, graphs=False), rank, world_size
    )
    same(steps(recorded), steps(plain))
    assert recordings(plain) is None
    # of five steps the first is plain and the second recorded
    assert recordings(recorded).replayed == 3 * (compute_ops(recorded) - plain_ops)


@pytest.mark.parametrize(
    ("name", "flags", "bf16"),
    [("gpt2", {}, False), ("llama", {}, True), ("qwen3", RECOMPUTED, False)],
)
def test_one_rank(name, flags, bf16):
    with_and_without(0, 1, name, flags, bf16=bf16)


@pytest.mark.parametrize(
    ("name", "flags", "plain_ops"),
    [
        ("gpt2", PP2 | {"pipeline_schedule": "zb-h1"}, 0),
        ("llama", PP2 | {"pipeline_schedule": "early-recompute"} | RECOMPUTED, 0),
        ("llama", PP2 | {"pipeline_schedule": "zb-v"}, 0),
        # the last micro-batch sends its gradients while it runs
        ("qwen3", {"use_distributed_optimizer": True}, 2),
        ("llama", {"no_overlap_grad_reduce": True}, 0),
    ],
)
def test_two_ranks(name, flags, plain_ops):
    run_ranks(partial(with_and_without, plain_ops=plain_ops), 2, name, flags)


def test_steps_that_were_not_recorded_run_between_those_that_were():
    """Other numbers of micro-batches, other shapes and evaluations change no bit before or after."""
    found = []
    for graphs in (True, False):
        model = made(config_of("llama", {}, graphs=graphs))
        losses = [one_step(model, 0), one_step(model, 1), one_step(model, 2)]
        losses.append(one_step(model, 3, micro_batches=3))
        losses.append(one_step(model, 4, samples=1))
        batches = model.from_samples([batch(seed=99)])
        losses.append(model.executor(1, training=False).run(batches, 0, training=False).total)
        losses.append(one_step(model, 5))
        found.append((losses, model.buffer.data.clone()))
        if graphs:
            assert recordings(model).replayed == 2 * 2 * MICROBATCHES
    (losses, weights), (losses_plain, weights_plain) = found
    assert losses == losses_plain and torch.equal(weights, weights_plain)


def test_one_micro_batch_of_another_shape_runs_beside_replayed_ones():
    """The first of a step, whose gradients a plain step writes over those of the step before."""
    found = []
    for graphs in (True, False):
        model = made(config_of("gpt2", {}, graphs=graphs))
        for number in range(3):
            one_step(model, number)
        for odd in (0, 2):
            batches = [batch(1 if k == odd else 2, seed=50 + k) for k in range(MICROBATCHES)]
            model.update(RATES, model.backward(model.from_samples(batches)))
        found.append(model.buffer.data.clone())
        if graphs:
            assert recordings(model).replayed == 2 * (MICROBATCHES + 2 * (MICROBATCHES - 1))
    assert torch.equal(*found)


def test_a_step_that_fails_while_it_is_recorded_is_recorded_again(monkeypatch):
    model = made(config_of("llama", {}))
    one_step(model, 0)
    record = CallRecording.record
    calls = []

    def failing(self, work, known=()):
        calls.append(self)
        if len(calls) == 3:
            raise KeyboardInterrupt
        record(self, work, known)

    monkeypatch.setattr(CallRecording, "record", failing)
    with pytest.raises(KeyboardInterrupt):
        one_step(model, 1)
    same(
        steps(model, range(1, 5)),
        steps_after_the_first(made(config_of("llama", {}, graphs=False))),
    )
    assert recordings(model).replayed == 3 * 2 * MICROBATCHES


def steps_after_the_first(model):
    one_step(model, 0)
    return steps(model, range(1, 5))


def test_dropout_is_refused_before_the_first_step():
    config = config_of("gpt2", {})
    with pytest.raises(ConfigError) as error:
        made(replace(config, model=with_dropout("gpt2")))
    assert str(error.value).startswith("--cuda-graph-impl local: unit 0 draws random numbers")


class Normed(nn.Module):
    """Its forward updates running statistics, and returns a part of the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x, y):
        found = self.last(self.norm(self.first(x)).relu())
        return {"loss": (found - y).square().mean(), "x": x, "found": found}


def normed(number, expanded=False):
    generator = torch.Generator().manual_seed(number)
    batches = []
    for _ in range(2):
        y = torch.randn(1 if expanded else 4, 3, generator=generator)
        batches.append({"x": torch.randn(4, 6, generator=generator), "y": y.expand(4, 3)})
    return batches


def normed_engine(graph_warm_up):
    mesh = build_mesh(Grid(), 0, CPU)
    others = {"graph_warm_up": graph_warm_up}
    return engine_of(Normed(), normed(0)[0], mesh, others=others, microbatches=2)


def test_running_statistics_are_those_of_steps_that_run_op_by_op():
    found = []
    for graph_warm_up in (1, None):
        engine = normed_engine(graph_warm_up)
        for number in range(4):
            engine.update(RATES, engine.backward(normed(number)))
        found.append({shard.name: shard.tensor.clone() for shard in engine.running_state()})
        if graph_warm_up:
            assert recordings(engine, 2).replayed == 2 * 2 * 2
    assert found[0].keys() == {f"norm.{name}" for name, _ in nn.BatchNorm1d(8).named_buffers()}
    for name, value in found[1].items():
        assert torch.equal(found[0][name], value), name


def own_loss(model, batch):
    outputs = model(**batch)
    return outputs["loss"], outputs


def test_what_a_model_returns_is_not_overwritten_by_the_next_step():
    task = ModelTask(OwnLoss(own_loss, reports=("x", "found")))
    kept = []
    for graph_warm_up in (1, None):
        engine = normed_engine(graph_warm_up)
        results = []
        for number in range(4):
            batches = normed(number)
            engine.update(RATES, engine.backward(batches, task=task))
            results += engine.reported(batches, task)
        kept.append(results)
        if graph_warm_up:
            assert recordings(engine, 2).replayed == 2 * 2 * 2
    for one, other in zip(*kept, strict=True):
        assert one.keys() == other.keys() == {"loss", "x", "found"}
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_tensors_with_more_memory_than_the_recorded_ones_run_op_by_op():
    found = []
    for graph_warm_up in (1, None):
        engine = normed_engine(graph_warm_up)
        for number in range(4):
            engine.update(RATES, engine.backward(normed(number, expanded=number != 3)))
        found.append(engine.buffer.data.clone())
        if graph_warm_up:
            assert recordings(engine, 2).replayed == 2 * 2
    assert torch.equal(*found)


class Straight(torch.autograd.Function):
    """Its backward, which is not that of its forward, is computed with numpy."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.from_numpy(3 * x.numpy()) * grad


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return {"loss": Straight.apply(x * self.weight).sum()}


def test_python_code_of_a_model_is_refused_before_the_first_step():
    mesh = build_mesh(Grid(), 0, CPU)
    with pytest.raises(ConfigError, match="Straight_apply of the model is Python code"):
        engine_of(Custom(), {"x": torch.ones(2, 4)}, mesh, others={"graph_warm_up": 1})


def straight_loss(model, batch):
    outputs = model(**batch)
    return outputs["loss"] + Straight.apply(outputs["found"]).sum(), {}


def test_python_code_of_a_later_loss_runs_op_by_op():
    task = ModelTask(OwnLoss(straight_loss))
    found = []
    for graph_warm_up in (1, None):
        engine = normed_engine(graph_warm_up)
        for number in range(4):
            engine.update(RATES, engine.backward(normed(number), task=task))
        found.append(engine.buffer.data.clone())
        if graph_warm_up:
            assert recordings(engine, 2).replayed == 0
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"tensor_model_parallel_size": 2}, "tensor-parallel ranks exchange values"),
        ({"data_parallel_sharding_strategy": "optim_grads_params"}, "reduces gradients unit by"),
        ({"offload_model_states": True}, "--offload-model-states copies weights inside an op"),
        (PP2 | {"cpu_offloading_num_layers": 1}, "activations go to host memory"),
        (PP2 | {"pipeline_schedule": "pipedream"}, "updates weights on its way"),
    ],
)
def test_ops_that_are_more_than_kernels_are_refused(flags, reason):
    config = config_of("llama", flags, replicas=2)
    config = replace(config, optimizer=OptimizerConfig(clip_grad=0.0))  # pipedream needs it
    with pytest.raises(ConfigError) as error:
        check_graphs(plan(config, 2))
    assert str(error.value).startswith("--cuda-graph-impl local: ")
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (lambda: torch.ones(3).sum().item(), "gives the host a number of the batch"),
        (lambda: torch.ones(3).nonzero(), "gives the host a number of the batch"),
        (lambda: torch.rand(3), "draws random numbers"),
        (lambda: torch.ones(3).sum().tolist(), "Python reads a tensor by tolist"),
        (lambda: torch.ones(3).square().numpy(), "Python reads a tensor by numpy"),
    ],
)
def test_what_a_graph_cannot_do_is_refused_on_a_cpu_too(work, reason):
    with pytest.raises(ConfigError, match=reason):
        CallRecording().record(work)


def test_what_is_the_same_in_each_replay_may_be_read():
    ends = torch.tensor([2, 3])
    CallRecording().record(lambda: torch.ones(5).split(ends.tolist()), [ends])
