"""MerakTrainer on a full disk, and in a directory that somebody removes: no step is lost."""

import os
import shutil
import threading

import pytest
from transformers import AutoModelForCausalLM, TrainerCallback

from megatron_merak.checkpoint import full_disk
from megatron_merak.errors import ConfigError, FullDiskError
from tests.hf_trainer.test_resume import Stop, curve, equal_weights, trainer
from tests.hf_trainer.test_run_directory import complete
from tests.small_disk import fill, small_disk


@pytest.fixture
def small(tmp_path):
    with small_disk(tmp_path / "small", 2) as place:
        yield place


class At(TrainerCallback):
    """Does something after a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


def test_a_run_waits_for_space_and_goes_on_as_if_nothing_had_happened(
    small, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(full_disk, "FIRST_PAUSE", 0.2)
    whole = trainer(tmp_path / "whole", [Stop(6)])
    whole.train()
    output = small / "run"

    def no_space():
        threading.Timer(1.5, fill(small).unlink).start()

    run = trainer(output, [Stop(6), At(6, no_space)])
    run.train()
    assert complete(output) == [6, 3]
    assert curve(run) == curve(whole) and equal_weights(run, whole)
    told = [line for line in capsys.readouterr().err.splitlines() if "space" in line]
    assert (
        len(told) == 2 and "(on_full_disk wait)" in told[0] and "saved after a wait of" in told[1]
    )

    threading.Timer(1.5, fill(small).unlink).start()
    run.save_model(str(small / "model"))
    AutoModelForCausalLM.from_pretrained(small / "model")


def test_a_run_that_does_not_wait_ends_and_keeps_the_checkpoint_before(small):
    output = small / "run"
    run = trainer(output, [At(6, lambda: fill(small))], on_full_disk="stop")
    with pytest.raises(FullDiskError, match="bytes are needed and 0 are free"):
        run.train()
    os.unlink(small / "ballast")
    assert complete(output) == [3]
    resumed = trainer(output, [Stop(6)])
    resumed.train(resume_from_checkpoint=True)
    assert complete(output) == [6, 3]


def test_no_other_policy(tmp_path):
    with pytest.raises(ConfigError, match="on_full_disk 'skip': it is not one of the choices"):
        trainer(tmp_path, on_full_disk="skip")


def test_a_removed_directory_is_made_anew(tmp_path, caplog, capsys):
    output = tmp_path / "run"
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3}
    run = trainer(output, [Stop(9), At(5, lambda: shutil.rmtree(output))], **best)
    run.train()
    assert complete(output) == [9, 6]
    assert (
        f"{output} was removed under the run, with all checkpoints in it: it is made anew"
        in caplog.text
    )
    assert "was removed, so the weights of the last step stay" in capsys.readouterr().err
