"""Who is who in a job with parameter servers, and what they cannot honour."""

import pytest
import torch
import torch.distributed as dist

from megatron_merak import arguments
from megatron_merak.config import Config, of_worker
from megatron_merak.errors import ConfigError
from megatron_merak.parallel.launch import World
from megatron_merak.parallel.mesh import Mesh
from megatron_merak.parallel.team import Team
from megatron_merak.parameter_server.roles import Role, role_of
from megatron_merak.parameter_server.serving import check_snapshots
from megatron_merak.parameter_server.worker import Worker
from megatron_merak.plan import Grid

GIVEN = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 60 --seq-length 16 --micro-batch-size 2
    --global-batch-size 8 --lr 1e-2 --train-iters 4 --mock-data"""
SYNC, ASYNC = "--data-parallel-strategy ps-sync", "--data-parallel-strategy ps-async"


def config(flags: str) -> Config:
    return arguments.read(
        arguments.build_parser(config=Config), [*GIVEN.split(), *flags.split()], Config
    )[0]


def test_ranks_of_workers_come_first_and_servers_last():
    roles = [Role(rank, 10, 4, 2) for rank in range(10)]
    assert [role.only_serves for role in roles] == [False] * 8 + [True] * 2
    assert [(role.worker, role.place) for role in roles[:8]] == [
        (w, p) for w in range(2) for p in range(4)
    ]
    assert all(role.endpoints == (8, 9) and role.clients == () for role in roles[:8])
    assert roles[8].clients == tuple(range(8))
    assert roles[5].team == Team("worker 1", 1, 4, text="2 workers of {}, 2 parameter servers")
    assert roles[9].team == Team("servers", 1, 2, connected=False)


def test_without_servers_every_rank_serves_those_at_its_place():
    roles = [Role(rank, 6, 2, 0) for rank in range(6)]
    assert roles[3].endpoints == roles[3].clients == (1, 3, 5)
    assert not any(role.only_serves for role in roles)


def test_a_worker_is_a_job_of_its_own():
    whole = config(f"{SYNC} --num-parameter-servers 1 --tensor-model-parallel-size 2")
    whole.validate(9)
    assert (whole.data_parallel_size(9), whole.num_microbatches(9)) == (4, 1)
    own = of_worker(whole, 4)
    own.validate(2)
    assert (own.global_batch_size(2), own.data_parallel_size(2)) == (2, 1)


@pytest.mark.parametrize(("strategy", "summed"), [(SYNC, 4), (ASYNC, 1)])
def test_samples_are_divided_over_the_replicas_of_all_workers(strategy, summed):
    whole = config(f"{strategy} --num-parameter-servers 1 --tensor-model-parallel-size 2")
    alone = Mesh(Grid(tp=2), 1, torch.device("cpu"))
    role = role_of(whole.parallel, 5, 9)
    assert role is not None and (alone.replicas, alone.replica, alone.summed) == (1, 0, 1)
    world = World(1, 2, alone.device, collectives="gloo", team=role.team, store=dist.HashStore())
    mesh = Worker(whole, world, role).mesh(alone)
    assert (mesh.replicas, mesh.replica, mesh.summed) == (4, 2, summed)
    assert str(world).startswith("4 workers of 2 CPU ranks, 1 parameter server, tensor-")
    assert role_of(config("").parallel, 0, 2) is None


@pytest.mark.parametrize(
    "flags, ranks, message",
    [
        (
            "--num-parameter-servers 1",
            2,
            "--num-parameter-servers 1: has no effect without --data-parallel-strategy",
        ),
        (
            "--ps-max-staleness 3",
            2,
            "--ps-max-staleness 3: has no effect without --data-parallel-strategy",
        ),
        (f"{SYNC} --ps-max-staleness 3", 2, "--ps-max-staleness 3: has no effect with .* ps-sync"),
        (
            f"{ASYNC} --ps-snapshot-interval 3",
            2,
            "--ps-snapshot-interval 3: has no effect without --save",
        ),
        (
            f"{SYNC} --num-parameter-servers 4",
            4,
            "servers 4: leaves 0 of 4 ranks, .* Use at most 3, or start 5 ranks",
        ),
        (
            f"{SYNC} --num-parameter-servers 5",
            2,
            "servers 5: leaves 0 of 2 ranks, .* Use at most 1, or start 6",
        ),
        (
            f"{SYNC} --num-parameter-servers 1",
            1,
            "servers 1: leaves 0 of 1 ranks, .* Use 0, or start 2 ranks",
        ),
        (
            f"{SYNC} --num-parameter-servers 2 --tensor-model-parallel-size 2",
            7,
            "servers 2: leaves 5 of 7 ranks, not a multiple of the 2 ranks of a worker. Use 1 or 3",
        ),
        (
            f"{SYNC} --num-parameter-servers 6 --tensor-model-parallel-size 2",
            7,
            "servers 6: leaves 1 of 7 ranks, and a worker takes 2 .* Use 3 or 5, or start 8 ranks",
        ),
        (
            f"{SYNC} --num-parameter-servers 1 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
            3,
            "servers 1: leaves 2 of 3 ranks, and a worker takes 4 .* Start 5 ranks",
        ),
        (
            f"{SYNC} --num-parameter-servers 1",
            6,
            "--global-batch-size 8: is not a multiple of .*Use 10",
        ),
        (
            f"{SYNC} --use-distributed-optimizer",
            2,
            "--use-distributed-optimizer True: parameter servers keep",
        ),
        (
            f"{ASYNC} --data-parallel-sharding-strategy optim_grads_params",
            2,
            "--data-parallel-sharding-strategy optim_grads_params: parameter servers keep",
        ),
        (
            f"{SYNC} --calculate-per-token-loss",
            2,
            "--calculate-per-token-loss True: a worker does not know",
        ),
        (
            f"{SYNC} --log-num-zeros-in-grad",
            2,
            "--log-num-zeros-in-grad True: no rank has the gradient",
        ),
        (f"{SYNC} --save c --async-save", 2, "--async-save True: a worker saves what it fetches"),
        (
            f"{SYNC} --save c --save-interval 2 --save-increment-interval 1",
            2,
            "--save-increment-interval 1: the gradient that updates the weights is on servers",
        ),
        (f"{SYNC} --timeline a.html", 2, "--timeline a.html: workers have no common clock"),
        (
            f"{SYNC} --distributed-backend emu --emulate laptop",
            2,
            "--distributed-backend emu: models collectives",
        ),
    ],
)
def test_what_parameter_servers_cannot_honour_is_refused(flags, ranks, message):
    with pytest.raises(ConfigError, match=message):
        config(flags).validate(ranks)


def test_a_place_for_snapshots_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "parameter_servers").touch()
    with pytest.raises(
        ConfigError,
        match=f"--save {tmp_path}: {tmp_path}/parameter_servers, for the snapshots of .*",
    ):
        check_snapshots(config(f"--save {tmp_path} {ASYNC}"))


@pytest.mark.parametrize(
    "flags", ["--train-samples 32", "--train-samples 32 --rampup-batch-size 4 4 8"]
)
def test_batches_that_grow_are_refused(flags):
    text = GIVEN.replace("--train-iters 4", "")
    given = [*text.split(), *flags.split(), *SYNC.split()]
    settings = arguments.read(arguments.build_parser(config=Config), given, Config)[0]
    with pytest.raises(ConfigError, match="workers of parameter servers use one batch size"):
        settings.validate(2)
