"""--run-dir and interruption in whole jobs: what is written is what was done, and a run goes on as
if it had not stopped."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_merak.parallel.interruption import Interrupted
from megatron_merak.plan import Plan
from megatron_merak.report.facts import facts_of
from megatron_merak.report.page import page
from megatron_merak.training.job import Job
from tests.choice import later
from tests.ranks import run_ranks

from .jobs import job

ROOT = Path(__file__).resolve().parents[2]
SMALL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2
    --global-batch-size 8 --lr 1e-2 --mock-data --vocab-size 60 --log-interval 1 --eval-iters 0"""


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(path: Path) -> dict[int, float]:
    return {row["iteration"]: row["loss"] for row in rows(path) if row["kind"] == "train"}


def test_a_run_keeps_its_facts_and_a_resumed_one_adds_to_them(tmp_path):
    layout = f"--pipeline-model-parallel-size 2 --train-iters 4 --run-dir {tmp_path}/run --metrics {tmp_path}/m.jsonl"
    layout += f" --save {tmp_path}/c --load {tmp_path}/c --eval-iters 1"
    run_ranks(job, 2, f"{layout} --exit-interval 3")
    told = run_ranks(job, 2, f"{layout} --timeline {tmp_path}/t.json")[-1]
    kept = rows(tmp_path / "run" / "metrics.jsonl")
    assert [row for row in kept if row["kind"] != "start"] == rows(tmp_path / "m.jsonl")
    starts = [
        {"kind": "start", "start": n, "iteration": 3 * n, "consumed_samples": 12 * n}
        for n in (0, 1)
    ]
    assert [row for row in kept if row["kind"] == "start"] == starts
    facts = facts_of(tmp_path / "run")
    assert (
        sorted(facts.history.steps) == [1, 2, 3, 4]
        and facts.iterations == 4
        and facts.work["tokens"] == 16
    )
    assert facts.measured.clock == "measured" and facts.measured.ranks == 2
    plan = Plan.from_json((tmp_path / "run" / "plan.json").read_text())
    assert plan.grid.pp == 2 and plan == facts.plan
    assert facts.start["settings"]["--pipeline-model-parallel-size"] == ["2", "1"]
    assert {"torch", "megatron_merak", "Python"} <= set(facts.start["versions"])
    assert f"wrote {tmp_path}/run" in told and "measured" in page(facts)


def _interrupted(rank, world_size, flags, sender, iteration):
    """Run a job in which one rank gets SIGTERM during an iteration; return the error's status and
    text.
    """
    whole = Job.train_step

    def step(self, batches, before):
        if rank == sender and self.trainer.iteration + 1 == iteration:
            os.kill(os.getpid(), signal.SIGTERM)
        whole(self, batches, before)

    Job.train_step = step
    try:
        job(rank, world_size, flags)
    except Interrupted as stop:
        return stop.status, stop.text
    return None


@pytest.mark.parametrize(
    "layout",
    ["--pipeline-model-parallel-size 2", later("--data-parallel-sharding-strategy optim")],
)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path, layout):
    flags = f"--train-iters 6 --hidden-dropout 0.1 {layout}"
    run_ranks(job, 2, f"{flags} --metrics {tmp_path}/whole.jsonl")
    flags += f" --save {tmp_path}/c --load {tmp_path}/c --metrics {tmp_path}/parts.jsonl"
    first, last = run_ranks(_interrupted, 2, flags, 0, 2)
    assert first == (143, "")
    again = "start it again with the same flags"
    assert last == (
        143,
        f"interrupted by SIGTERM after iteration 3, which was saved; to go on, {again}",
    )
    assert sorted(losses(tmp_path / "parts.jsonl")) == [1, 2, 3]
    run_ranks(job, 2, flags)
    assert losses(tmp_path / "parts.jsonl") == losses(tmp_path / "whole.jsonl")


def started(flags: str, *launcher: str, ignored: signal.Signals | None = None) -> subprocess.Popen:
    """ignored: a signal that the launcher and its ranks ignore, as under nohup."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, *launcher, *SMALL.split(), *flags.split()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if ignored is None:
        return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    before = signal.signal(ignored, signal.SIG_IGN)
    try:
        return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    finally:
        signal.signal(ignored, before)


def interrupted(run: subprocess.Popen, *numbers: signal.Signals) -> tuple[int, str, str]:
    """Send signals to the launcher and its group, as a terminal does, each after an iteration."""
    with run:
        for number in numbers:
            for line in run.stdout:
                if "consumed samples" in line:
                    break
            os.killpg(run.pid, number)
        out, error = run.communicate(timeout=100)
    return run.returncode, out, error


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "status", "ignored"),
    [
        (signal.SIGINT, 130, None),
        pytest.param(signal.SIGTERM, 143, signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 138, None, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path, number, status, ignored):
    command = ("-m", "megatron_merak", "pretrain")
    flags = "--nproc-per-node 2 --pipeline-model-parallel-size 2 --train-iters {0} --metrics {1}/{2}.jsonl"
    saved = flags.format(100000, tmp_path, "parts") + f" --save {tmp_path}/c --load {tmp_path}/c"
    saved += " --lr-decay-iters 200"
    numbers = [number] if ignored is None else [ignored, number]
    found, out, error = interrupted(started(saved, *command, ignored=ignored), *numbers)
    assert found == status
    told = r"python -m megatron_merak pretrain: interrupted by (\w+) after iteration ([\d,]+), which was saved; .*\n"
    name, iteration = re.fullmatch(told, error).groups()
    done = int(iteration.replace(",", ""))
    assert name == number.name and f"saved {tmp_path}/c/iter_{done:07d}" in out
    end = f" --exit-interval {done + 3}"
    with started(saved + end, *command) as again:
        assert (again.communicate(timeout=100), again.returncode)[1] == 0
    whole = flags.format(100000, tmp_path, "whole") + " --lr-decay-iters 200" + end
    with started(whole, *command) as run:
        assert (run.communicate(timeout=100), run.returncode)[1] == 0
    assert losses(tmp_path / "parts.jsonl") == losses(tmp_path / "whole.jsonl")


@pytest.mark.long
def test_torchrun_passes_the_signal_on(tmp_path):
    torchrun = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(ROOT / "pretrain_gpt.py"),
    )
    flags = f"--tensor-model-parallel-size 2 --train-iters 100000 --save {tmp_path}/c"
    status, out, error = interrupted(started(flags, *torchrun), signal.SIGINT)
    assert status != 0 and f"to go on, --load {tmp_path}/c" in error and "saved" in out


@pytest.mark.long
def test_a_second_ctrl_c_ends_at_once(tmp_path):
    """While ranks wait for each other: one is stopped, so no step ends."""
    flags = f"--nproc-per-node 2 --pipeline-model-parallel-size 2 --train-iters 100000 --save {tmp_path}/c"
    with started(flags, "-m", "megatron_merak", "pretrain") as run:
        for line in run.stdout:
            if "consumed samples" in line:
                break
        (rank, *_) = children(run.pid)
        os.kill(rank, signal.SIGSTOP)
        try:
            os.killpg(run.pid, signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                run.wait(timeout=2)
            os.killpg(run.pid, signal.SIGINT)
            os.kill(rank, signal.SIGKILL)
            _, error = run.communicate(timeout=30)
        finally:
            run.kill()
    assert run.returncode == 130 and error == "interrupted again: nothing more is saved\n"
    assert not list((tmp_path / "c").glob("iter_*"))


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
