"""Emulated pipelines: exact where there is a formula, equal to the simulator elsewhere, the same
bits as real ones.
"""

import random
from dataclasses import replace
from statistics import median
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_merak.cluster import DEVICES, Cluster, Link
from megatron_merak.config import Config
from megatron_merak.parallel.agree import gather_json
from megatron_merak.parallel.clock import Account, LogicalClock
from megatron_merak.parallel.emulated import register
from megatron_merak.parallel.mesh import Mesh, build_mesh
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.passes import add_communication
from megatron_merak.pipeline_parallel.simulate import StageCosts, simulate
from megatron_merak.plan import Plan
from megatron_merak.planner import plan as make_plan
from megatron_merak.runtime.weights import Gradient
from megatron_merak.training.trainer import Trainer
from tests.engines import gpt_trainer, gradient_step
from tests.parallel.walk import Line, mesh_of, walk
from tests.parity.batches import replica_batch
from tests.parity.cases import Case
from tests.parity.rig import disturb, parts
from tests.ranks import run_ranks

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
SLOW = Cluster(
    DEVICES["A100"], 2, Link("inside", 1e-3, 1e6), Link("between", 3e-3, 0.25e6), "slow links"
)
FREE = replace(SLOW, inside=Link("free", 0, float("inf")), between=Link("free", 0, float("inf")))


def emulated(rank, world_size, cluster):
    """A clock, and the mesh of a pipeline over all ranks."""
    clock = LogicalClock(cluster)
    register(clock)
    return mesh_of(rank, world_size, dist.new_group(list(range(world_size)), backend="emu"), clock)


def ends_of(rank, world_size, cluster, runs):
    mesh = emulated(rank, world_size, cluster)
    found = []
    for schedule, line in runs:
        dist.barrier(group=mesh.pp)
        start = mesh.clock.now()
        found.append(walk(add_communication(schedule), line, mesh) - start)
    return found


def makespans(world_size, cluster, runs):
    return [max(ends) for ends in zip(*run_ranks(ends_of, world_size, cluster, runs), strict=True)]


def test_a_pipeline_takes_what_the_formula_says():
    """(m + S - 1) (F + B), exactly: in halves and quarters of a second nothing is rounded."""
    line = Line((0.25,) * 4, (0.5,) * 4, (0.25,) * 4, (0.0,) * 4, (1000,) * 3)
    runs = [(build_schedule(name, 4, m), line) for name in ("1f1b", "gpipe") for m in (4, 8, 11)]
    assert makespans(4, FREE, runs) == [(m + 3) * 0.75 for _ in range(2) for m in (4, 8, 11)]


def uneven(schedule, seed):
    """Times and sizes of which many transfers outlast a kernel."""
    draw = random.Random(seed)
    some = [tuple(draw.uniform(0.01, 0.05) for _ in range(schedule.stages)) for _ in range(4)]
    backward = tuple(inputs + weight for inputs, weight in zip(some[1], some[2], strict=True))
    recompute = some[3] if seed % 2 else (0.0,) * schedule.stages
    values = tuple(draw.randint(100, 5000) for _ in range(schedule.stages - 1))
    return Line(some[0], backward, some[2], recompute, values)


def test_slow_uneven_pipelines_take_what_the_simulator_says():
    """Every schedule over links of two speeds: the simulator and the emulation are one model."""
    schedules = [build_schedule(name, 4, 8) for name in BUILDERS for _ in range(3)]
    runs = [(schedule, uneven(schedule, seed)) for seed, schedule in enumerate(schedules)]
    for (schedule, line), found in zip(runs, makespans(4, SLOW, runs), strict=True):
        costs = line.costs(schedule, SLOW)
        assert found == pytest.approx(simulate(schedule, costs).makespan, rel=1e-9), schedule.name
        free = replace(
            costs, transfer=(0.0,) * len(costs.transfer), latency=(0.0,) * len(costs.latency)
        )
        assert found > 1.05 * simulate(schedule, free).makespan, (
            f"{schedule.name}: the links are too fast to matter"
        )


def config_of(case: Case) -> Config:
    config = case.config()
    return replace(config, model=replace(config.model, num_layers=4))


def trainer_of(case: Case, mesh: Mesh) -> Trainer:
    trainer = gpt_trainer(config_of(case), make_plan(config_of(case), case.world), mesh)
    disturb(trainer)
    return trainer


def traced_step(trainer: Trainer, batches) -> list[list[tuple[str, float, float]]]:
    """One step's gradients; each rank's (op, start, end) of its compute, from a start that all
    share. All micro-batches take the same time, as the simulator has it: the first adds to what the
    last step left."""
    dist.barrier()
    trainer.model.executor(len(batches)).trace = []
    with trainer.mesh.clock.kernels(), mock.patch.object(Gradient, "start"):
        gradient_step(trainer, batches)
    return gather_json(trainer.model.executor(len(batches)).trace, trainer.mesh.control, "cpu")


def costs_of(plan: Plan, traces: list, mesh: Mesh) -> StageCosts:
    """Each stage's median times in a traced step, and what its borders take by the cost table."""
    times: dict[str, list[float]] = {}
    for rank in range(mesh.grid.pp):
        for op, start, end in traces[mesh.grid.rank(pp=rank)]:
            times.setdefault(op[:2], []).append(end - start)
    forward, backward = (
        tuple(median(times[f"{s}{kind}"]) for s in range(mesh.grid.pp)) for kind in "FB"
    )
    links = [
        mesh.clock.cluster.link([mesh.grid.rank(pp=b), mesh.grid.rank(pp=b + 1)])
        for b in range(mesh.grid.pp - 1)
    ]
    sizes = [plan.units[stage.last - 1].output_bytes for stage in plan.stages[:-1]]
    transfer = tuple(size / link.bandwidth for size, link in zip(sizes, links, strict=True))
    zero = (0.0,) * mesh.grid.pp
    return StageCosts(
        forward, backward, zero, zero, transfer, tuple(link.latency for link in links)
    )


def join(rank, world_size, store, cluster) -> LogicalClock:
    """Leave the test's world for an emulated one, as a launcher would make it."""
    dist.destroy_process_group()
    clock = LogicalClock(cluster)
    register(clock)
    dist.init_process_group("emu", init_method=f"file://{store}", rank=rank, world_size=world_size)
    return clock


def agreement(rank, world_size, store, case, cluster) -> tuple[float, float, float, Account]:
    """Modelled seconds of a step, what the simulator says of it with and without transfers, and the
    account.
    """
    clock = join(rank, world_size, store, cluster)
    mesh = build_mesh(trainer_grid(case), rank, CPU, clock=clock)
    trainer = trainer_of(case, mesh)
    batches = replica_batch(case, 0, mesh.dp_rank)
    costs = costs_of(trainer.plan, traced_step(trainer, batches), mesh)
    starts, ends = zip(
        *(times for trace in traced_step(trainer, batches) for _, *times in trace), strict=True
    )
    none = replace(
        costs, transfer=(0.0,) * len(costs.transfer), latency=(0.0,) * len(costs.latency)
    )
    simulated = [simulate(trainer.plan.schedule, found).makespan for found in (costs, none)]
    return max(ends) - min(starts), *simulated, clock.account()


def trainer_grid(case: Case):
    return make_plan(config_of(case), case.world).grid


# A device and links at which compute, tensor-parallel all-reduces and transfers of these tiny
# models all matter.
DEVICE = replace(DEVICES["A100"], memory_bandwidth=2e9, float32_flops=0.2e12)
TINY = Cluster(DEVICE, 2, Link("inside", 2e-6, 4e9), Link("between", 1e-4, 20e6), "tiny")
EIGHT = pytest.mark.slow  # processes


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", pp=2),
        Case("gpt2", pp=2, tp=2),
        Case("llama", pp=4),
        pytest.param(Case("gpt2", pp=4, tp=2), marks=EIGHT),
        pytest.param(Case("llama", pp=4, tp=2), marks=EIGHT),
    ],
    ids=lambda case: f"{case.family}-tp{case.tp}-pp{case.pp}",
)
def test_the_simulator_agrees_with_an_emulated_run(case, tmp_path):
    """A real model, the real executor under 1F1B: its modelled step is the simulated one, far
    within 1 %.
    """
    cluster = replace(TINY, ranks_per_node=case.tp)
    ranks = run_ranks(agreement, case.world, str(tmp_path / "store"), case, cluster, timeout=200)
    emulated, simulated, free, _ = ranks[0]
    assert emulated == pytest.approx(simulated, rel=0.001)
    assert simulated > 1.05 * free, (
        "transfers do not matter here, so that agreement says little of them"
    )
    for *_, account in ranks:
        assert account.busy > 0 and account.exposed > 0 and account.idle > 0
        assert account.now == pytest.approx(account.busy + account.exposed + account.idle, rel=1e-9)


def test_equal_runs_have_equal_times(tmp_path):
    first, second = (
        run_ranks(agreement, 2, str(tmp_path / name), Case("llama", pp=2), TINY) for name in "ab"
    )
    assert first == second


def both(rank, world_size, store, case):
    """Gradients of a step over gloo, then over the emulated backend."""
    found = []
    for cluster in (None, TINY):
        clock = None if cluster is None else join(rank, world_size, store, cluster)
        mesh = build_mesh(trainer_grid(case), rank, CPU, clock=clock)
        assert dist.get_backend(mesh.control) == "gloo"
        trainer = trainer_of(case, mesh)
        with mesh.clock.kernels():
            loss = gradient_step(trainer, replica_batch(case, 0, mesh.dp_rank))
            norm = trainer.optimizer.step([(1e-3, 0.1), (1e-3, 0.0)]).grad_norm
        flats = (trainer.model.buffer.main_grad, trainer.model.buffer.data)
        found.append(
            (loss, norm, [shard.tensor for flat in flats for shard in parts(trainer, flat)])
        )
    real, modelled = found
    assert real[:2] == modelled[:2]
    return all(torch.equal(a, b) for a, b in zip(real[2], modelled[2], strict=True))


def test_training_has_gloos_bits(tmp_path):
    case = Case("gpt2", pp=2, tp=2, hidden_dropout=0.1)
    assert run_ranks(both, 4, str(tmp_path / "store"), case, timeout=120) == [True] * 4


def test_gradients_over_replicas_have_gloos_bits(tmp_path):
    assert (
        run_ranks(both, 2, str(tmp_path / "store"), Case("llama", dp=2), timeout=120) == [True] * 2
    )
