"""Ranks that are killed while a checkpoint is written: what counts as complete is sound, and the
job goes on.
"""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_merak.checkpoint.directory import Iterations, iteration_of, verify

from .launched import ROOT, SMALL, Launched, environment


def sound(root: Path) -> list[int]:
    """The complete checkpoints, newest first, whose every byte is what was written, and all of it
    of one moment: bf16 weights, which a worker has, are those that the servers have in fp32."""
    found = list(Iterations(root).newest_first())
    for directory in found:
        verify(directory)
        weights, exact = ({}, {})
        for kind, into in (("model", weights), ("master", exact)):
            for path in directory.glob(f"{kind}-*.safetensors"):
                into |= {
                    (path.name.partition("-")[2], name): value
                    for name, value in load_file(path).items()
                }
        assert weights.keys() == exact.keys() and weights
        for name, value in weights.items():
            assert torch.equal(value, exact[name].bfloat16()), (directory, name)
    return [iteration_of(directory) for directory in found]


def kill_in_a_save(job: Launched, root: Path, rank: int, draw: random.Random) -> None:
    """Wait for a save that has begun; kill a rank at some moment of it, or soon behind it."""
    job.wait_for(lambda: not list(root.glob("iter_*.new")))
    job.wait_for(lambda: list(root.glob("iter_*.new")))
    time.sleep(draw.uniform(0, 0.06))
    job.kill(rank)


def resumes(root: Path, newest: int) -> None:
    """From the newest checkpoint, in one process, without servers."""
    flags = f"allreduce {ALIKE} --load {root} --train-iters {newest + 2}"
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *SMALL.split(), *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 0, done.stderr
    assert f"loaded the checkpoint of iteration {newest} from" in done.stdout
    assert f"iteration {newest + 2:8d}/" in done.stdout


ALIKE = "--bf16 --lr-decay-style constant --global-batch-size 24"  # for two, three and four workers
FLAGS = f"{ALIKE} --num-parameter-servers 1 --ps-snapshot-interval 1"


def run_with_kills(
    strategy: str, layout: str, workers: int, victims: list[int], directory: Path, seed: int
) -> None:
    """Ranks of workers, of which one worker is left at the end, and a server behind them."""
    root, draw = directory / "run", random.Random(seed)
    flags = f"{strategy} {layout} {FLAGS} --train-iters 100000 --save {root}"
    job = Launched(workers + 1, f"{flags} --save-interval 2", directory)
    try:
        job.after(4)
        for victim in victims:
            kill_in_a_save(job, root, victim, draw)
            job.after(job.iteration + 6)
    finally:
        job.process.terminate()
        status = job.end()
    assert status > 0, job.told
    newest = sound(root)[0]
    assert newest >= job.iteration - 4
    resumes(root, newest)


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "strategy, layout, workers, victims",
    [
        ("ps-sync", "", 3, [3, 0, 3, 2]),
        ("ps-async", "", 3, [3, 0, 3, 2]),
        ("ps-sync", "--tensor-model-parallel-size 2", 4, [4, 1]),
    ],
)
def test_kills_while_checkpoints_are_written(tmp_path, strategy, layout, workers, victims):
    """The server, who comes back, the worker that leads, and another one."""
    run_with_kills(strategy, layout, workers, victims, tmp_path, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(250)
@pytest.mark.parametrize("strategy", ["ps-sync", "ps-async"])
def test_a_leader_that_is_killed_in_the_last_save_leaves_it_to_the_next_worker(tmp_path, strategy):
    root = tmp_path / "run"
    flags = f"{strategy} {FLAGS} --train-iters 8 --save {root}"
    job = Launched(3, flags, tmp_path)
    job.wait_for(lambda: list(root.glob("iter_*.new")))
    job.kill(0)
    assert job.end() == 0, job.told
    assert (
        "worker 1 leads: those before it are gone" in job.told
        and "test loss at iteration 8" in job.told
    )
    assert sound(root) == [8]
    resumes(root, 8)
