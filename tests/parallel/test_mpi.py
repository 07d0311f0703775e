"""--distributed-backend mpi, by ranks of the real mpirun: every collective, exact sums, messages, and
training with the losses and weights of other backends.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_merak.errors import LaunchError
from megatron_merak.extras import is_installed
from megatron_merak.parallel.launch import launch

ROOT = Path(__file__).parents[2]
# for root, and more ranks than cores, by Open MPI 4 and 5
ANYWAY = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}
SHAPE = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 64 --mock-data
    --micro-batch-size 2 --global-batch-size 8 --train-iters 2 --lr 1e-3 --log-interval 1 --eval-iters 1
    --save-interval 2""".split()


def mpirun() -> str | None:
    """The mpirun that came with this environment, or another one."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


@functools.cache
def reason() -> str:
    """Why there are no ranks of MPI here; empty: there are."""
    if not is_installed("mpi4py"):
        return "mpi4py is not installed"
    if mpirun() is None:
        return "there is no mpirun"
    told = ranks(2, "-c", "from mpi4py import MPI; print(MPI.COMM_WORLD.Get_size())")
    return "" if told.stdout.split() == ["2", "2"] else f"mpirun: {told.stderr or told.stdout}"


def ranks(number: int, *words: str) -> subprocess.CompletedProcess:
    command = [str(mpirun()), "-n", str(number), sys.executable, *words]
    return subprocess.run(
        command, env=os.environ | ANYWAY, cwd=ROOT, capture_output=True, text=True, timeout=200
    )


def test_a_missing_mpi4py_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    told = r"backend mpi: mpi4py is not installed. Install it: pip install -e '.\[mpi\]' in a clone"
    with pytest.raises(LaunchError, match=told):
        launch("mpi")


def test_ranks_of_torchrun_are_refused(monkeypatch):
    if not is_installed("mpi4py"):
        pytest.skip("mpi4py is not installed")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="numbers the ranks itself, and torchrun started them"):
        launch("mpi")


@pytest.mark.long
def test_collectives_and_messages():
    if reason():
        pytest.skip(reason())
    told = ranks(
        4, "-m", "tests.parallel.mpi_ranks", *"collectives sums messages crossed late".split()
    )
    lines = sorted(line for line in told.stdout.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} of 4 is done by merak_mpi" for rank in range(4)], told.stderr


LAYOUTS = {
    "tp-pp": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    "bf16-sequence": "--bf16 --tensor-model-parallel-size 4 --sequence-parallel",
    "sharded": "--bf16 --data-parallel-sharding-strategy optim_grads_params --grad-reduce-in-bf16",
}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layout", ["tp-pp", pytest.param("bf16-sequence", marks=pytest.mark.slow), "sharded"]
)
def test_training_has_the_bits_of_shared_memory(layout, tmp_path):
    """And in groups of two, whose sums have one order, those of gloo."""
    if reason():
        pytest.skip(reason())
    found = {}
    for backend in ("mpi", "merak_shm", *(["gloo"] if layout == "tp-pp" else [])):
        words = [*SHAPE, *LAYOUTS[layout].split(), "--distributed-backend", backend]
        told = ranks(4, "pretrain_gpt.py", *words, "--save", str(tmp_path / backend))
        assert told.returncode == 0, told.stderr
        losses = re.findall(r"loss (?:value: )?(\d\S+)", told.stdout)
        manifest = json.loads(next((tmp_path / backend).glob("*/manifest.json")).read_text())
        found[backend] = (losses, manifest["tensors"])
    assert len(found["mpi"][0]) >= 3
    assert all(each == found["mpi"] for each in found.values())


@pytest.mark.long
def test_another_mpi_than_that_of_mpirun_is_named():
    """As its ranks are each alone: here Slurm's variables say two, and MPI one."""
    if reason():
        pytest.skip(reason())
    task = {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    program = "from megatron_merak.parallel.launch import launch; launch('mpi')"
    told = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | ANYWAY | task,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert re.search(
        r"backend mpi: srun says rank 0 of 2, and .*, which mpi4py loads, rank 0 of 1\. Start",
        told.stderr,
    )
