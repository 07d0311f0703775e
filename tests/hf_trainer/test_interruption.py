"""Signals to MerakTrainer: the step is completed, a checkpoint written, one line said; the resumed run is the straight
one."""

import faulthandler
import os
import signal
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
BEST = {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}


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
def test_a_signal_saves_and_the_resumed_run_is_the_straight_one(tmp_path, capsys, changes, number, step):
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
    assert heard.events[-2:] == [("save", step), ("end", step)] and ("evaluate", step) not in heard.events
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)] == [signal.SIG_DFL] * 2
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
