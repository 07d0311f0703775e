"""Joining a job: from torchrun's variables to a World, and every way in which they can be wrong."""

import os
import socket

import pytest
import torch
import torch.distributed as dist

from megatron_merak.cluster import all_reduce, find_cluster
from megatron_merak.errors import ConfigError, LaunchError, PlanError
from megatron_merak.parallel import launch as launching
from megatron_merak.parallel.launch import World, launch, leave, own_collectives, position
from tests.ranks import run_ranks

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*VARIABLES, "LOCAL_WORLD_SIZE", *OPEN_MPI, *MPICH):
        monkeypatch.delenv(name, raising=False)


def test_without_torchrun_a_process_is_alone():
    world = launch("gloo")
    assert world == World(0, 1, torch.device("cpu")) and world.is_last and position() == (0, 1)
    assert not dist.is_initialized()
    leave(world)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "one"}, ["environment variable RANK 'one'", "not a number"]),
        ({"WORLD_SIZE": "-2"}, ["environment variable WORLD_SIZE '-2'", "not a number"]),
        ({"RANK": ""}, ["environment variable RANK ''"]),
        ({"RANK": "4", "WORLD_SIZE": "4"}, ["RANK 4", "WORLD_SIZE is 4"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE is 0"]),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            ["environment variable MASTER_ADDR (unset)", "torchrun"],
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
            ["environment variable MASTER_PORT"],
        ),
        (
            {OPEN_MPI[0]: "2", OPEN_MPI[1]: "2"},
            [f"{OPEN_MPI[0]} 2: {OPEN_MPI[1]} is 2. Start ranks with mpirun"],
        ),
        (
            {OPEN_MPI[0]: "0", OPEN_MPI[1]: "2"},
            ["MASTER_ADDR (unset)", "Name the first rank's host and a free port"],
        ),
        ({"PMI_RANK": "x", "PMI_SIZE": "2"}, ["environment variable PMI_RANK 'x'", "not a number"]),
    ],
)
def test_variables_that_do_not_fit(monkeypatch, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError) as error:
        launch("gloo")
    assert all(word in str(error.value) for word in words), str(error.value)
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_nccl_needs_a_cuda_device():
    with pytest.raises(
        LaunchError, match="--distributed-backend nccl: there is no CUDA device. Use .* gloo"
    ):
        launch("nccl")
    for other in ("gloo_cuda", "merak_peer"):
        with pytest.raises(
            LaunchError,
            match=f"--distributed-backend {other}: there is no CUDA device. Use .* gloo",
        ):
            launch(other)
    assert launch("auto").device.type == "cpu"
    with pytest.raises(
        LaunchError, match="backend merak_peer: the job runs on CPUs. Use merak_shm or gloo"
    ):
        own_collectives("merak_peer", torch.device("cpu"), 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_more_local_ranks_than_devices(monkeypatch):
    count = torch.cuda.device_count()
    monkeypatch.setenv("LOCAL_RANK", str(count))
    with pytest.raises(LaunchError, match=f"local rank {count}: this host has {count}"):
        launch("auto")
    assert launch("gloo").device.type == "cpu"


def test_an_emulated_cluster_needs_a_name():
    with pytest.raises(
        LaunchError, match="--emulate \\(missing\\): --distributed-backend emu models a cluster"
    ):
        launch("emu")
    with pytest.raises(
        PlanError, match="cluster abacus: there is no such one. Use one of cpu, laptop"
    ):
        launch("emu", emulate="abacus")
    with pytest.raises(ConfigError, match="cluster file nowhere.json: No such file"):
        launch("emu", emulate="nowhere.json")
    figures = find_cluster("dgx-h100").by_figures
    assert launch("emu", emulate="dgx-h100").cluster == figures != find_cluster("dgx-h100")
    world = launch("emu", emulate="rtx3090")
    assert world.cluster is find_cluster("rtx3090") and world.device.type == "cpu"
    assert world.clock.label == "modelled on rtx3090" and world.clock.now() == 0
    real = launch("gloo", emulate="rtx3090")
    assert real.cluster is None and real.clock.label == ""


@pytest.mark.parametrize("names", [OPEN_MPI, MPICH])
def test_a_launcher_of_mpi_is_asked_where_torchrun_is_not(monkeypatch, names):
    for name, value in zip(names, "5834", strict=True):
        monkeypatch.setenv(name, value)
    assert position() == (5, 8)
    monkeypatch.setenv("RANK", "1")  # a torchrun on each host, started by mpirun
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert position() == (1, 2)


def by_mpirun(rank, world_size, port):
    """Over gloo, as ranks of mpirun that were given the address of the first."""
    dist.destroy_process_group()
    values = (*map(str, (rank, world_size, rank, world_size)), "127.0.0.1", str(port))
    os.environ.update(zip((*OPEN_MPI, *VARIABLES[3:]), values, strict=True))
    for name in (*VARIABLES[:3], "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    world = launch("gloo")
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    leave(world)
    return world.rank, world.size, world.ranks_here, world.local_rank, total.item()


def test_ranks_of_mpirun_join_over_any_backend():
    assert run_ranks(by_mpirun, 2, free_port()) == [(rank, 2, 2, rank, 3) for rank in range(2)]


def emulate(rank, world_size, port):
    """Join an emulated world of two nodes."""
    dist.destroy_process_group()
    values = (rank, world_size, rank, "127.0.0.1", port)
    os.environ.update({name: str(value) for name, value in zip(VARIABLES, values, strict=True)})
    world = launch("emu", emulate="laptop")
    start = world.clock.now()
    dist.all_reduce(torch.ones(1000))
    seconds, backend = world.clock.now() - start, dist.get_backend()
    leave(world)
    return seconds, backend, dist.is_initialized()


def test_ranks_join_an_emulated_cluster():
    link = find_cluster("laptop").between
    expected = all_reduce(2, 4000, link)
    assert run_ranks(emulate, 2, free_port()) == [(pytest.approx(expected), "emu", False)] * 2


def join(rank, world_size, port):
    """Leave the group that the test launcher made and join by torchrun's variables instead."""
    dist.destroy_process_group()
    values = (rank, world_size, rank, "127.0.0.1", port)
    os.environ.update({name: str(value) for name, value in zip(VARIABLES, values, strict=True)})
    world = launch("gloo", timeout_minutes=3, deterministic=True)
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    deterministic = torch.are_deterministic_algorithms_enabled()
    leave(world)
    return (
        world.rank,
        world.size,
        str(world.device),
        world.is_last,
        total.item(),
        deterministic,
        dist.is_initialized(),
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_ranks_join_and_leave():
    results = run_ranks(join, 2, free_port())
    assert results == [(rank, 2, "cpu", rank == 1, 3, True, False) for rank in range(2)]


def test_a_script_that_destroys_its_group_is_waited_for(monkeypatch):
    """Threads of gloo still release tensors then, and the interpreter must not shut down before."""
    waited = []
    monkeypatch.setattr(launching.time, "sleep", waited.append)
    assert not dist.is_initialized()
    launching._end(None)
    assert waited == [launching._LAST_WORKS]
