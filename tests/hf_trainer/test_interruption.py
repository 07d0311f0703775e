"""Signals to MerakTrainer: the step is completed, a checkpoint written, one line said; the resumed
run is the straight one."""

import contextlib
import faulthandler
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import TrainerCallback

from megatron_merak.parallel.interruption import Interrupted
from tests.hf_trainer.test_resume import curve, equal_weights, trainer
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]


class Signal(TrainerCallback):
    """Sends this process a signal in a step; keeps the events that follow."""

    def __init__(self, number, step):
        self.number = number
        self.step = step
        self.events = []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), self.number)

    def on_save(self, args, state, control, **kwargs):
        self.events.append(("save", state.global_step))

    def on_evaluate(self, args, state, control, **kwargs):
        self.events.append(("evaluate", state.global_step))

    def on_train_end(self, args, state, control, **kwargs):
        self.events.append(("end", state.global_step))


PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1}
BEST = {
    "save_strategy": "best",
    "eval_strategy": "steps",
    "eval_steps": 2,
    "metric_for_best_model": "loss",
}


@pytest.mark.parametrize(
    ("changes", "number", "step"),
    [
        ({}, signal.SIGTERM, 2),  # between two logs
        ({"save_strategy": "epoch"}, signal.SIGHUP, 4),  # behind the last step of an epoch
        ({"eval_strategy": "epoch", "logging_strategy": "epoch"}, signal.SIGINT, 8),
        (PLATEAU, signal.SIGUSR1, 5),  # the evaluation behind the step moves the rate
        (BEST, signal.SIGUSR2, 6),
        ({"save_strategy": "no", "enable_jit_checkpoint": True}, signal.SIGQUIT, 5),
    ],
)
def test_a_signal_saves_and_the_resumed_run_is_the_straight_one(
    tmp_path, capsys, changes, number, step
):
    whole = trainer(tmp_path / "whole", **changes)
    whole.train()
    heard = Signal(number, step)
    cut = trainer(tmp_path / "cut", [heard], **changes)
    with pytest.raises(Interrupted) as stop:
        cut.train()
    assert stop.value.code == stop.value.status == 128 + number
    saved = tmp_path / "cut" / f"checkpoint-{step}"
    again = "to go on, train(resume_from_checkpoint=True)"
    told = f"interrupted by {number.name} after step {step}, which was saved in {saved}; {again}"
    assert stop.value.text == told and f": {told}\n" in capsys.readouterr().err
    assert (
        heard.events[-2:] == [("save", step), ("end", step)]
        and ("evaluate", step) not in heard.events
    )
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)] == [
        signal.SIG_DFL
    ] * 2
    resumed = trainer(tmp_path / "cut", **changes)
    resumed.train(resume_from_checkpoint=True)
    assert curve(resumed) == curve(whole) and equal_weights(resumed, whole)
    assert resumed.engine.seen == whole.engine.seen[step:]
    assert resumed.state.best_metric == whole.state.best_metric


def test_where_nothing_is_saved_a_signal_does_what_it_did(tmp_path):
    run = trainer(tmp_path, [Signal(signal.SIGINT, 2)], save_strategy="no")
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_model_alone_is_saved_where_the_arguments_say_so(tmp_path):
    run = trainer(tmp_path, [Signal(signal.SIGTERM, 2)], save_only_model=True)
    with pytest.raises(Interrupted, match="whose model was saved"):
        run.train()
    assert not (tmp_path / "checkpoint-2" / "training_state").exists()


def _interrupted(rank, world_size, directory, number):
    """What each rank's run ended with, and its curve after it has resumed."""
    faulthandler.unregister(signal.SIGUSR1)  # the test's own: who has installed a handler keeps it
    changes = {"tensor_model_parallel_size": world_size}
    run = trainer(directory, [Signal(number, 3)] if rank == 1 else None, **changes)
    try:
        run.train()
    except Interrupted as stop:
        ended = stop.code, run.state.global_step, bool(stop.text)
    resumed = trainer(directory, **changes)
    resumed.train(resume_from_checkpoint=True)
    return ended, curve(resumed)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_ranks_stop_after_the_same_step_whichever_gets_the_signal(tmp_path, number):
    whole = trainer(tmp_path / "whole")
    whole.train()
    (first, curve_0), (second, curve_1) = run_ranks(_interrupted, 2, tmp_path / "cut", number)
    assert (first, second) == ((128 + number, 3, True), (128 + number, 3, False))
    assert curve_0 == curve_1 == curve(whole)


SCRIPT = """
import sys
import time

from transformers import TrainerCallback

from megatron_merak import MerakArguments, MerakTrainer
from tests.hf_trainer.stand_in import collate, samples, tiny_llama


class Slow(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.05)


named = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "logging_steps": 1, "save_steps": 100000}
degrees = {"tensor_model_parallel_size": int(sys.argv[2]), "dataloader_num_workers": int(sys.argv[3])}
args = MerakArguments(sys.argv[1], max_steps=100000, **named, **degrees)
MerakTrainer(tiny_llama(), args, collate, samples(22, ragged=False), callbacks=[Slow()]).train()
print("never reached")
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCH = ("-m", "megatron_merak", "launch", "--nproc-per-node", "2")


LIMIT = 100  # seconds of a run


@contextlib.contextmanager
def started(
    tmp_path: Path, launcher: tuple[str, ...], workers: int = 0
) -> Iterator[subprocess.Popen]:
    """A script in which a MerakTrainer trains, once it has taken steps.

    A run that hangs is ended, with all stacks of its processes in its stderr.
    """
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, *launcher, "train.py", "out", "2" if launcher else "1", str(workers)]
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "start_new_session": True,
    }
    limit = threading.Timer(LIMIT, abort, [tmp_path])
    limit.start()
    try:
        with subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes) as run:
            for _ in range(3):
                assert any("'loss'" in line for line in run.stdout), run.stderr.read()
            yield run
    finally:
        limit.cancel()


def abort(directory: Path) -> None:
    """Let all processes that work in a directory write their stacks, and end: the youngest first,
    since a launcher takes its ranks along.
    """
    processes = sorted((int(each.name) for each in Path("/proc").glob("[0-9]*")), reverse=True)
    for number, pause in ((signal.SIGABRT, 0.3), (signal.SIGKILL, 0.0)):
        for process in processes:
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if Path(f"/proc/{process}/cwd").readlink() == directory:
                    os.kill(process, number)
                    time.sleep(pause)


def without_bitsandbytes(error: str) -> str:
    """What it says of kernels that it does not find when peft imports it."""
    lines = error.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("Failed to load CPU gemm_4bit"))


def told(number: signal.Signals) -> str:
    again = re.escape("; to go on, train(resume_from_checkpoint=True)")
    return rf"train\.py: interrupted by {number.name} after step (\d+), which was saved in out/checkpoint-\1{again}\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "workers", "number"),
    [((), 2, signal.SIGINT), ((), 0, signal.SIGHUP), (LAUNCH, 1, signal.SIGUSR1)],
)
def test_a_script_that_is_interrupted_says_one_line(tmp_path, launcher, workers, number):
    """Signals reach all processes of the group, as from a terminal: those that load the data have
    to outlast them.
    """
    with started(tmp_path, launcher, workers) as run:
        os.killpg(run.pid, number)
        out, error = run.communicate()
    error = without_bitsandbytes(error)
    assert re.fullmatch(told(number), error), error
    assert run.returncode == 128 + number and "never" not in out
    assert (
        tmp_path / "out" / f"checkpoint-{re.match(told(number), error)[1]}" / "manifest.json"
    ).is_file()


@pytest.mark.long
@pytest.mark.slow
def test_torchrun_adds_its_own_words_and_all_is_saved(tmp_path):
    """docs/checkpoints.md says how many lines, and that nothing within ranks can prevent them."""
    with started(tmp_path, TORCHRUN, 1) as run:
        os.killpg(run.pid, signal.SIGTERM)
        _, error = run.communicate()
    assert run.returncode == 1 and len(re.findall(told(signal.SIGTERM), error)) == 1
    assert error.count("Traceback") == 1 and "SignalException" in error.splitlines()[-1]
    assert list((tmp_path / "out").glob("checkpoint-*/manifest.json"))


@pytest.mark.long
def test_a_second_signal_ends_at_once(tmp_path):
    """While ranks wait for each other: one is stopped, so no step ends."""
    with started(tmp_path, LAUNCH) as run:
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGSTOP)
        os.killpg(run.pid, signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            run.wait(timeout=2)
        os.killpg(run.pid, signal.SIGINT)
        os.kill(int(children[0]), signal.SIGKILL)  # the stopped one cannot end itself
        _, error = run.communicate(timeout=30)
    assert run.returncode == 130 and not list((tmp_path / "out").glob("checkpoint-*")), error
