"""Tasks of srun: what of Slurm's variables makes a process a rank, where ranks meet, and jobs under
Slurm itself where it runs.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_merak.errors import LaunchError
from megatron_merak.parallel import rendezvous, slurm
from megatron_merak.parallel.position import launcher, local_rank, position, ranks_here
from tests.ranks import run_ranks

# As Slurm 22.05 sets them for `sbatch -n 4 -N 2`: in the script, and in a step of it.
BATCH = {
    "SLURM_JOB_ID": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "3,1",
    "SLURM_JOB_NODELIST": "h[01-02]",
    "SLURM_TASK_PID": "30648",
}
STEP = BATCH | {
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "h[01-02]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
}
OF_OTHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in os.environ:
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "MPI_")) or name in OF_OTHERS:
            monkeypatch.delenv(name)


def given(monkeypatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_task_of_a_step_is_a_rank(monkeypatch):
    given(monkeypatch, STEP)
    assert launcher().name == "srun"
    assert position() == (3, 4)
    assert (ranks_here(), local_rank()) == (1, 0)
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert ranks_here() == 3


def test_a_script_and_a_shell_are_alone(monkeypatch):
    given(monkeypatch, BATCH)
    assert position() == (0, 1)
    # the shell of salloc, where Slurm makes it a step of its own
    given(monkeypatch, STEP | {"SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_STEP_NUM_TASKS": "1"})
    assert position() == (0, 1)


def test_a_terminal_that_is_one_of_several_tasks_is_named(monkeypatch):
    given(monkeypatch, STEP | {"SLURM_PTY_PORT": "40835"})
    told = "SLURM_STEP_NUM_TASKS 4: this terminal of srun --pty is one of that many tasks.*unset SLURM_STEP_ID"
    with pytest.raises(LaunchError, match=told):
        position()
    monkeypatch.setenv("SLURM_TASK_PID", str(os.getpid()))  # srun --pty python
    assert position() == (3, 4)
    monkeypatch.delenv("SLURM_TASK_PID")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert position() == (0, 1)


def test_launchers_that_srun_starts_come_first(monkeypatch):
    given(monkeypatch, STEP | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"})
    assert position() == (1, 8)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert position() == (5, 6)


def test_mpich_by_its_own_launcher_and_by_srun(monkeypatch):
    given(monkeypatch, STEP | {"PMI_RANK": "3", "PMI_SIZE": "4"})  # srun --mpi=pmi2
    assert launcher().name == "srun"
    given(monkeypatch, {"PMI_RANK": "6", "PMI_SIZE": "8", "MPI_LOCALRANKID": "2"})  # hydra's
    assert (launcher().name, position()) == ("mpiexec", (6, 8))


@pytest.mark.parametrize(
    ("text", "counts"),
    [("3,1", [3, 1]), ("8(x4),2", [8, 8, 8, 8, 2]), ("2", [2]), ("", []), ("2(x,1", [])],
)
def test_tasks_of_nodes(text, counts):
    assert slurm.tasks_of_nodes(text) == counts


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("h[01-02]", "h01"),
        ("login,h[1-9]", "login"),
        ("rack[2,4]-n[008-016,3],x", "rack2-n008"),
        ("gpu[7]", "gpu7"),
        ("a.b.c", "a.b.c"),
        ("h[3,5-9]x", "h3x"),
        ("", ""),
    ],
)
def test_the_first_host(nodes, first):
    assert slurm.first_host(nodes) == first


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="there is no scontrol")
@pytest.mark.parametrize("nodes", ["h[01-04,7],x", "rack[02,4]n[8-11],y", "solo"])
def test_the_first_host_is_that_of_scontrol(nodes):
    told = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True)
    if told.returncode:
        pytest.skip(f"scontrol: {told.stderr.strip()}")
    assert slurm.first_host(nodes) == told.stdout.split()[0]


def test_where_the_tasks_of_a_step_meet():
    several = rendezvous.derived(STEP, by_slurm=True, one_host=False)
    assert (several.host, several.job) == ("h01", "Slurm 2.0")
    assert several.port == rendezvous.derived(STEP, True, True).port
    assert rendezvous.derived(STEP, True, True).host == "127.0.0.1"
    other = rendezvous.derived(STEP | {"SLURM_STEP_ID": "1"}, True, True)
    assert 1024 < other.port < 32768
    assert other.port != several.port


def test_where_ranks_of_open_mpi_meet():
    job = {"PMIX_NAMESPACE": "prterun-host-30600@1"}
    here = rendezvous.derived(job, by_slurm=False, one_host=True)
    assert here.host == "127.0.0.1" and 1024 < here.port < 32768
    assert rendezvous.derived(job, by_slurm=False, one_host=False)[:2] == ("", 0)
    assert rendezvous.derived({}, by_slurm=False, one_host=True).port == 0


def by_srun(rank, world_size, job):
    """Meet by what Slurm says alone, and by gloo."""
    import torch
    import torch.distributed as dist

    from megatron_merak.parallel.launch import launch, leave

    dist.destroy_process_group()
    for name in OF_OTHERS:
        os.environ.pop(name, None)
    tasks = str(world_size)
    own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_JOB_ID": job}
    step = {"SLURM_STEP_NUM_TASKS": tasks, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": "0"}
    os.environ.update(STEP | own | step)
    world = launch("gloo")
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    leave(world)
    return world.rank, world.size, world.ranks_here, world.local_rank, total.item()


def test_tasks_join_where_slurm_says():
    results = run_ranks(by_srun, 2, str(os.getpid()))
    assert results == [(rank, 2, 2, rank, 3) for rank in range(2)]


def test_a_derived_port_that_is_taken_is_named(monkeypatch):
    from megatron_merak.parallel.launch import launch

    one_host = {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}
    given(monkeypatch, STEP | one_host)
    with socket.socket() as other:
        other.bind(("127.0.0.1", rendezvous.port_of("Slurm 2.0")))
        other.listen()
        told = r"127\.0\.0\.1:\d+: no store answers.*Name a free port of that host in MASTER_PORT"
        with pytest.raises(LaunchError, match=told):
            launch("gloo")


def test_a_line_is_written_once_for_the_tasks_of_a_host(tmp_path):
    program = (
        "from megatron_merak.parallel.position import position, tell\n"
        "tell(f'rank {position()[0]}: no', alike='no')"
    )
    unset = {name for name in os.environ if name.startswith("OMPI_") or name in OF_OTHERS}
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stderr=subprocess.PIPE,
            text=True,
            env=inherited | STEP | {"SLURM_PROCID": str(rank), "TMPDIR": str(tmp_path)},
        )
        for rank in range(3)
    ]
    told = "".join(rank.communicate(timeout=60)[1] for rank in ranks)
    assert re.fullmatch(r"rank \d: no\n", told), told


def slurm_runs() -> bool:
    if shutil.which("sinfo") is None:
        return False
    told = subprocess.run(["sinfo", "-ho", "%T"], capture_output=True, text=True, timeout=30)
    return "idle" in told.stdout


FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64
    --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 2 --global-batch-size 4
    --train-iters 2 --lr 1e-3 --mock-data --log-interval 1 --eval-iters 0"""


@pytest.mark.long
def test_jobs_of_slurm():
    """In a step, in a batch script without a step, and torchrun in a step: each gives its losses."""
    if not slurm_runs():
        pytest.skip("sinfo names no idle node: there is no Slurm here")
    job = f"{sys.executable} pretrain_gpt.py {FLAGS}".replace("\n", " ")
    torchrun = job.replace(
        "pretrain", "-m torch.distributed.run --standalone --nproc-per-node 2 pretrain"
    )
    commands = (
        ["srun", "-n", "2", *job.split(), "--tensor-model-parallel-size", "2"],
        ["salloc", "-Q", "-n", "2", *job.split()],
        ["srun", "-Q", "-n", "1", *torchrun.split()],
    )
    root = Path(__file__).parents[2]
    losses = []
    for words in commands:
        told = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=root)
        assert told.returncode == 0, told.stderr
        losses.append(re.findall(r"lm loss: (\S+)", told.stdout))
    assert all(len(each) == 2 for each in losses), losses
    assert [float(x) for x in losses[0]] == pytest.approx([float(x) for x in losses[1]], rel=1e-5)
    assert losses[1] == losses[2]
