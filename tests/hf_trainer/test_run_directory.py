"""What MerakTrainer's checkpoints promise: nothing good is lost, nothing damaged is used, and both
are said.
"""

import datetime
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from megatron_merak.checkpoint import lock
from megatron_merak.checkpoint.sealed import seal
from megatron_merak.checkpoint.unit_directories import Units, step_of
from megatron_merak.errors import CheckpointError, DamagedError, DirectoryLockedError, NumericsError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.run.run_directory import RunDirectory
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.optimizer.base import StepResult
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid
from megatron_merak.training.skips import SkippedSteps
from tests.hf_trainer.stand_in import EagerEngine, EagerTrainer, collate, samples, tiny_llama
from tests.hf_trainer.test_resume import Stop, curve, equal_weights, trainer
from tests.ranks import run_ranks


def complete(root) -> list[int]:
    return [step_of(path) for path in Units(Path(root)).newest_first()]


def damage(path: Path) -> None:
    """Flip one bit in the middle: neither the size nor the header of a tensor file changes."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_a_checkpoint_is_what_transformers_opens(tmp_path):
    run = trainer(tmp_path, [Stop(3)])
    run.train()
    directory = tmp_path / "checkpoint-3"
    reloaded = AutoModelForCausalLM.from_pretrained(directory)
    for name, value in run.model.state_dict().items():
        assert torch.equal(reloaded.state_dict()[name], value), name
    listed = json.loads((directory / "manifest.json").read_text())["files"]
    found = {
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    }
    assert found == {*listed, "manifest.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-3"}, (
        "the lock and the like are gone"
    )


# Retention


def test_the_limit_counts_complete_checkpoints_and_never_takes_the_one_just_saved(tmp_path):
    trainer(tmp_path, [Stop(1)], save_steps=1).train()
    first = tmp_path / "checkpoint-1"
    shutil.copytree(first, tmp_path / "checkpoint-20")
    (tmp_path / "checkpoint-20" / "manifest.json").unlink()
    (tmp_path / "checkpoint-20" / "config.json").unlink()
    trainer(tmp_path, [Stop(3)], save_total_limit=1).train(str(first))
    assert complete(tmp_path) == [3]
    assert (tmp_path / "checkpoint-20").is_dir(), (
        "what this library cannot tell to be its own, it leaves"
    )


def test_the_limit_goes_by_step(tmp_path):
    trainer(tmp_path, [Stop(4)], save_steps=1).train()
    trainer(tmp_path, [Stop(3)], save_steps=1, save_total_limit=2).train(
        str(tmp_path / "checkpoint-2")
    )
    assert complete(tmp_path) == [4, 3], "3 was just saved"


def test_the_best_checkpoint_is_never_taken(tmp_path):
    directory = RunDirectory(str(tmp_path), None)
    trainer(tmp_path, [Stop(4)], save_steps=1).train()
    directory.rotate(2, 4, str(tmp_path / "checkpoint-1"))
    assert complete(tmp_path) == [4, 1]
    directory.rotate(1, 4, str(tmp_path / "checkpoint-1"))
    assert complete(tmp_path) == [4, 1]
    directory.keep_only(tmp_path / "checkpoint-1")
    assert complete(tmp_path) == [1]


def test_nothing_is_removed_for_a_checkpoint_that_is_damaged(tmp_path, caplog):
    trainer(tmp_path, [Stop(3)], save_steps=1).train()
    damage(tmp_path / "checkpoint-3" / "model.safetensors")
    directory = RunDirectory(str(tmp_path), None)
    directory.rotate(1, 3, None)
    directory.keep_only(tmp_path / "checkpoint-3")
    assert complete(tmp_path) == [3, 2, 1]
    assert "No checkpoint is removed" in caplog.text and "model.safetensors" in caplog.text


def test_a_users_file_survives_saving_again_and_retention(tmp_path):
    trainer(tmp_path, [Stop(3)]).train()
    (tmp_path / "checkpoint-3" / "my_notes.txt").write_text("mine")
    trainer(tmp_path, [Stop(3)]).train()
    assert (tmp_path / "checkpoint-3" / "my_notes.txt").read_text() == "mine"
    trainer(tmp_path, [Stop(6)], save_total_limit=1).train(resume_from_checkpoint=True)
    assert complete(tmp_path) == [6]
    assert [path.read_text() for path in tmp_path.rglob("my_notes.txt")] == ["mine"]


# Damage


FILES = (
    "model.safetensors",
    "config.json",
    "trainer_state.json",
    "training_args.json",
    "training_state/model.safetensors",
    "training_state/extra.json",
    "manifest.json",
)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_of_the_newest_checkpoint_falls_back_to_the_one_before_and_says_so(
    tmp_path, name, caplog
):
    whole = trainer(tmp_path, [Stop(6)])
    whole.train()
    damage(tmp_path / "checkpoint-6" / name)
    with pytest.raises(CheckpointError, match=name):
        trainer(tmp_path, [Stop(6)]).train(str(tmp_path / "checkpoint-6"))
    resumed = trainer(tmp_path, [Stop(6)])
    resumed.train(resume_from_checkpoint=True)
    assert curve(resumed) == curve(whole) and equal_weights(resumed, whole)
    assert len(resumed.engine.seen) == 3, "resumed from checkpoint-3"
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 1 and "checkpoint-3" in told[0] and name in told[0]


def test_when_all_are_damaged_each_is_named(tmp_path):
    trainer(tmp_path, [Stop(6)]).train()
    for step in (3, 6):
        damage(tmp_path / f"checkpoint-{step}" / "config.json")
    with pytest.raises(
        CheckpointError, match=r"no complete checkpoint.*checkpoint-6.*checkpoint-3"
    ):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_a_checkpoint_of_another_version_is_an_error_and_not_passed_over(tmp_path):
    trainer(tmp_path, [Stop(6)]).train()
    path = tmp_path / "checkpoint-6" / "manifest.json"
    document = json.loads(path.read_text()) | {"version": 3}
    del document["sha256"]
    path.write_bytes(seal(document))
    with pytest.raises(CheckpointError, match="format version is 3 and this program reads 1"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def _fall_back(rank, world, root):
    mesh = build_mesh(
        Grid(tp=1, dp=world, pp=1), rank, torch.device("cpu"), datetime.timedelta(seconds=60)
    )
    directory = RunDirectory(str(root), mesh.control)
    directory.hold()
    found = directory.find(True)
    with pytest.raises(DamagedError) as caught:
        directory.find(str(root / "checkpoint-6"))
    directory.rotate(1, 6, None)
    kept = [path.name for path in Units(root).newest_first()]
    directory.rotate(1, 3, None)
    dist.barrier(mesh.control)
    directory.release()
    return found.name, str(caught.value), kept, [path.name for path in Units(root).newest_first()]


def test_ranks_that_share_the_verification_agree(tmp_path):
    """Each file is read on one rank; the damaged one lies on the second."""
    trainer(tmp_path, [Stop(6)]).train()
    files = sorted(json.loads((tmp_path / "checkpoint-6" / "manifest.json").read_text())["files"])
    damage(tmp_path / "checkpoint-6" / files[1])
    one, other = run_ranks(_fall_back, 2, tmp_path)
    assert one == other
    found, error, kept, left = one
    assert found == "checkpoint-3" and files[1] in error and "rank 1" in error
    assert kept == ["checkpoint-6", "checkpoint-3"] and left == ["checkpoint-3"]


def test_a_damaged_best_model_is_not_loaded(tmp_path):
    class Damaging(Stop):
        def on_train_end(self, args, state, control, **kwargs):
            raise AssertionError("not reached")

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                damage(Path(state.best_model_checkpoint) / "model.safetensors")
            super().on_step_end(args, state, control, **kwargs)

    best = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "learning_rate": 1e-3,
    }
    with pytest.raises(DamagedError, match=r"model\.safetensors"):
        trainer(tmp_path, [Damaging(4)], **best).train()


# Two jobs


def test_a_directory_that_another_job_writes_to_is_refused(tmp_path):
    trainer(tmp_path, [Stop(3)]).train()
    (tmp_path / ".checkpoint-6.new").mkdir()
    other = {**lock._this_process(), "pid": 1, "started": lock._started(1), "token": "x"}
    (tmp_path / lock.NAME).write_text(json.dumps(other))
    with pytest.raises(DirectoryLockedError, match="process 1"):
        trainer(tmp_path).train()
    with pytest.raises(DirectoryLockedError, match="process 1"):
        trainer(tmp_path, save_strategy="no").train(resume_from_checkpoint=True)
    assert (tmp_path / ".checkpoint-6.new").is_dir(), "it may be what the other job is writing"
    trainer(tmp_path, [Stop(1)], save_strategy="no").train()  # writes nothing
    (tmp_path / lock.NAME).write_text(json.dumps(other | {"pid": 2**22 + 1}))
    trainer(tmp_path, [Stop(4)]).train(resume_from_checkpoint=True)
    assert not (tmp_path / ".checkpoint-6.new").exists() and not (tmp_path / lock.NAME).exists()


# Numbers that are not finite


class Failing(EagerEngine):
    """Its gradient is not finite at the steps in ``bad``, from 0; ``weights``: they are not,
    either.
    """

    bad: tuple = ()
    weights = False

    def backward(self, batches):
        loss = super().backward(batches)
        return loss * math.nan if self.iteration in self.bad else loss

    def update(self, rates, told):
        if self.iteration not in self.bad:
            return super().update(rates, told)
        self.optimizer.zero_grad()
        self.iteration += 1
        if self.weights:
            next(self.model.parameters()).data[0, 0] = math.nan
        return StepResult(math.nan, True, told.item())


class FailingTrainer(EagerTrainer):
    def create_engine(self, example):
        return Failing(self.model, self.args, self.mesh)


def failing(monkeypatch, directory, bad, callbacks=None, weights=False, **changes):
    monkeypatch.setattr(Failing, "bad", bad)
    monkeypatch.setattr(Failing, "weights", weights)
    return trainer(directory, callbacks, kind=FailingTrainer, **{"logging_steps": 2, **changes})


def losses(run) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def without_targets(directory, kind):
    """Train one step on samples without a target, and return what is logged."""
    rows = [{**row, "labels": [-100] * len(row["labels"])} for row in samples(4)]
    of = TrainingArguments if kind is Trainer else MerakArguments
    settings = {
        "max_steps": 1,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    run = kind(tiny_llama(), of(str(directory), save_strategy="no", **settings), collate, rows)
    run.train()
    return [
        {key: entry[key] for key in ("loss", "train_loss") if key in entry}
        for entry in run.state.log_history
    ]


def test_a_step_without_a_target_is_logged_as_transformers_does(tmp_path):
    theirs = without_targets(tmp_path, Trainer)
    assert without_targets(tmp_path, MerakTrainer) == theirs == [{"loss": 0.0}, {"train_loss": 0.0}]


def test_an_interval_without_a_finite_loss_is_logged_as_zero(tmp_path, monkeypatch):
    run = failing(monkeypatch, tmp_path, (2, 3, 5), [Stop(6)])
    output = run.train()
    first, second, third = losses(run)
    assert first > 0 and second == 0 and third > 0 and math.isfinite(output.training_loss)


def test_an_interval_that_a_checkpoint_cuts_is_filtered_as_a_whole_one(tmp_path, monkeypatch):
    run = failing(monkeypatch, tmp_path / "whole", (2, 3, 4, 5), [Stop(8)], logging_steps=4)
    run.train()
    failing(monkeypatch, tmp_path / "cut", (2, 3, 4, 5), [Stop(3)], logging_steps=4).train()
    resumed = failing(monkeypatch, tmp_path / "cut", (2, 3, 4, 5), [Stop(8)], logging_steps=4)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(run) and all(map(math.isfinite, losses(run)))


def test_without_the_filter_one_loss_that_is_not_finite_shows(tmp_path, monkeypatch):
    run = failing(monkeypatch, tmp_path, (1,), [Stop(4)], logging_nan_inf_filter=False)
    output = run.train()
    assert (
        math.isnan(losses(run)[0])
        and math.isfinite(losses(run)[1])
        and math.isnan(output.training_loss)
    )


def test_many_skipped_steps_in_a_row_end_the_run_and_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "megatron_merak.training.skips.bad_gradients", lambda *_: (2, ["lm_head.weight"])
    )
    run = failing(
        monkeypatch, tmp_path, range(3, 99), save_total_limit=1, max_consecutive_skipped_steps=5
    )
    with pytest.raises(NumericsError, match=r"max_consecutive_skipped_steps 5: .*lm_head\.weight"):
        run.train()
    assert run.state.global_step == 8 and complete(tmp_path) == [6]
    broken = failing(
        monkeypatch, tmp_path, range(7, 99), [Stop(9)], weights=True, save_total_limit=1
    )
    with pytest.raises(NumericsError, match="embed_tokens"):
        broken.train(resume_from_checkpoint=True)
    assert complete(tmp_path) == [6] and not [*tmp_path.glob(".checkpoint*")]
    alone = failing(
        monkeypatch, tmp_path / "model", range(2, 99), weights=True, save_only_model=True
    )
    with pytest.raises(NumericsError, match="embed_tokens"):
        alone.train()
    assert complete(tmp_path / "model") == []


def test_the_default_limit_is_20(tmp_path):
    run = trainer(tmp_path)
    assert run.args.max_consecutive_skipped_steps == 20 and SkippedSteps(20, None, None).limit == 20
    with pytest.raises(Exception, match="max_consecutive_skipped_steps"):
        trainer(tmp_path, max_consecutive_skipped_steps=0)
