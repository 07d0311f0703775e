"""async_save: the checkpoints of a run that waits for them, written while it trains on."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, TrainerCallback

from megatron_merak.checkpoint import full_disk
from megatron_merak.checkpoint.directory import read_manifest
from megatron_merak.checkpoint.manifest import NAME
from megatron_merak.errors import CheckpointError, ConfigError, FullDiskError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.run.checkpoints_behind import CheckpointCopies
from megatron_merak.hf_trainer.run.run_directory import TRAINING_STATE, verify
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.parallel.interruption import Interrupted
from tests.hf_trainer.runs import TIMED
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.hf_trainer.test_adapters import adapted
from tests.hf_trainer.test_run_directory import complete
from tests.ranks import RankFailure, run_ranks
from tests.small_disk import fill, small_disk

RUN = {
    "use_cpu": True,
    "disable_tqdm": True,
    "report_to": "none",
    "logging_steps": 1,
    "max_steps": 6,
    "save_steps": 2,
    "save_total_limit": 2,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 2,
}
SHARDED = {"data_parallel_sharding_strategy": "optim_grads_params"}


class Events(TrainerCallback):
    """What happened, in order; of a save, whether the checkpoint was there, and what it said."""

    def __init__(self, at: int = 0, action: Callable[[], object] = lambda: None):
        self.events: list[Any] = []
        self.at, self.action = at, action

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append(state.global_step)
        if state.global_step == self.at:
            self.action()

    def on_save(self, args, state, control, **kwargs):
        place = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        saved = json.loads((place / "trainer_state.json").read_text())
        alike = saved["log_history"] == state.log_history and (place / NAME).is_file()
        self.events.append(("saved", state.global_step, alike))
        with contextlib.suppress(OSError):  # of a full disk
            (place / f"note-{args.process_index}.txt").write_text("of a callback")

    def on_train_end(self, args, state, control, **kwargs):
        self.events.append("end")


def trainer(directory, callback=None, kind=MerakTrainer, model=None, words=None, **changes):
    args = MerakArguments(str(directory), **{"async_save": True, **RUN, **changes})
    return kind(
        tiny_llama() if model is None else model,
        args,
        collate,
        samples(48, ragged=False),
        samples(4, seed=5, ragged=False),
        processing_class=words,
        callbacks=[Events() if callback is None else callback],
    )


def words() -> PreTrainedTokenizerFast:
    found = Tokenizer(WordLevel({str(number): number for number in range(64)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="0", unk_token="0")


def _both(rank: int, world: int, root: Path, changes: dict, lora: bool) -> None:
    for name, behind in (("plain", False), ("behind", True)):
        model = adapted() if lora else None
        named = {**changes, "async_save": behind}
        trainer(root / name, model=model, words=words(), **named).train()


def _content(path: Path) -> Any:
    """What a file of a checkpoint says but for times, identifiers, and the argument itself."""
    if path.name == "trainer_state.json":
        state = json.loads(path.read_text())
        for entry in state["log_history"]:
            for key in [key for key in entry if any(part in key for part in TIMED)]:
                del entry[key]
        state["best_model_checkpoint"] = Path(state["best_model_checkpoint"] or "").name
        return state
    if path.name == "training_args.json":
        args = json.loads(path.read_text())
        return {k: v for k, v in args.items() if k not in ("async_save", "output_dir")}
    if path.parent.parent.name == TRAINING_STATE:
        manifest = read_manifest(path.parent)[1]
        return manifest.tensors, manifest.meta, sorted(manifest.files)
    return None if path.name == NAME else path.read_bytes()


@pytest.mark.parametrize(
    ("ranks", "changes", "lora"),
    [
        (1, {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}, False),
        pytest.param(2, SHARDED, False, marks=pytest.mark.long),
        pytest.param(1, {"save_only_model": True}, False, marks=pytest.mark.long),
        pytest.param(1, {}, True, marks=pytest.mark.long),
        pytest.param(2, SHARDED, True, marks=pytest.mark.long),
        pytest.param(2, {"pipeline_model_parallel_size": 2, "bf16": True}, False, marks=pytest.mark.long),
        pytest.param(4, {"tensor_model_parallel_size": 2, **SHARDED}, False, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_they_are_the_checkpoints_of_a_run_that_waits(tmp_path, ranks, changes, lora):
    run_ranks(_both, ranks, tmp_path, changes, lora)
    steps = complete(tmp_path / "plain")
    assert len(steps) == 2 and complete(tmp_path / "behind") == steps
    for step in steps:
        places = [tmp_path / name / f"checkpoint-{step}" for name in ("plain", "behind")]
        names = [{p.relative_to(each) for p in each.rglob("*") if p.is_file()} for each in places]
        assert names[0] == names[1] and len(names[0]) > 5, names[0] ^ names[1]
        for name in names[0]:
            one, other = (_content(place / name) for place in places)
            assert one == other, name
        verify(places[1], None)


class _Slow:
    """Lets the thread wait before it writes a checkpoint until it is told to."""

    def __init__(self, monkeypatch, step: int):
        self.go = threading.Event()
        write = CheckpointCopies.write

        def slow(copies, directory, group):
            if directory.name == f".checkpoint-{step}.new":
                assert self.go.wait(60)
            write(copies, directory, group)

        monkeypatch.setattr(CheckpointCopies, "write", slow)


def test_training_goes_on_and_callbacks_are_told_once_it_is_complete(tmp_path, monkeypatch):
    slow = _Slow(monkeypatch, 2)
    heard = Events(3, slow.go.set)
    run = trainer(tmp_path, heard, save_steps=2, max_steps=4)
    run.train()
    told = [
        each for each in heard.events if each != 4
    ]  # told behind step 3, or before the next save
    assert told == [1, 2, 3, ("saved", 2, True), ("saved", 4, True), "end"]
    assert heard.events.index(("saved", 2, True)) < heard.events.index(("saved", 4, True))
    verify(tmp_path / "checkpoint-2", None)  # it has a file of the callback, which is not its own


def test_the_next_one_waits_for_the_one_before(tmp_path, monkeypatch):
    slow = _Slow(monkeypatch, 2)
    timer = threading.Timer(1.0, slow.go.set)
    heard = Events(4, timer.start)
    trainer(tmp_path, heard, max_steps=4).train()
    assert heard.events == [1, 2, 3, 4, ("saved", 2, True), ("saved", 4, True), "end"]


def test_what_is_saved_is_what_was_there(tmp_path, monkeypatch):
    trainer(tmp_path / "plain", max_steps=2, async_save=False).train()
    slow = _Slow(monkeypatch, 2)
    run = trainer(tmp_path / "run", Events(3, slow.go.set), max_steps=3)
    run.train()
    name = "checkpoint-2/model.safetensors"
    assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    resumed = trainer(tmp_path / "run")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    whole = trainer(tmp_path / "whole")
    whole.train()
    losses = [[e["loss"] for e in r.state.log_history if "loss" in e] for r in (resumed, whole)]
    assert losses[0] == losses[1]


class _Failing:
    def __init__(self, monkeypatch, step: int):
        write = CheckpointCopies.write

        def fails(copies, directory, group):
            if directory.name == f".checkpoint-{step}.new":
                raise CheckpointError("checkpoint", directory, "the disk is gone", "Look")
            write(copies, directory, group)

        monkeypatch.setattr(CheckpointCopies, "write", fails)


@pytest.mark.parametrize(("step", "ends"), [(2, 4), (6, 6)])
def test_an_error_is_raised_at_the_next_save_or_at_the_end(tmp_path, monkeypatch, step, ends):
    _Failing(monkeypatch, step)
    heard = Events()
    with pytest.raises(CheckpointError, match="the disk is gone"):
        trainer(tmp_path, heard).train()
    assert [each for each in heard.events if type(each) is int][-1] == ends
    assert complete(tmp_path) == [n for n in (6, 4, 2) if n < step]
    assert not [*tmp_path.glob(".checkpoint*")]


def test_an_error_of_training_comes_first(tmp_path, monkeypatch):
    slow = _Slow(monkeypatch, 2)

    def fails():
        threading.Timer(0.5, slow.go.set).start()
        raise KeyError("of a callback")

    with pytest.raises(KeyError, match="of a callback"):
        trainer(tmp_path, Events(3, fails)).train()
    assert complete(tmp_path) == [2]


@pytest.mark.parametrize("early", [True, False])
def test_a_signal_ends_the_run_with_two_complete_checkpoints(tmp_path, monkeypatch, early):
    slow = _Slow(monkeypatch, 2)

    def stop():
        os.kill(os.getpid(), signal.SIGTERM)
        slow.go.set() if early else threading.Timer(1.0, slow.go.set).start()

    heard = Events(3, stop)
    with pytest.raises(Interrupted) as caught:
        trainer(tmp_path, heard).train()
    step = int(caught.value.text.partition(" after step ")[2].partition(",")[0])
    assert complete(tmp_path) == [step, 2] and step in (3, 4)
    saved = [each for each in heard.events if type(each) is tuple]
    assert saved == [("saved", 2, True), ("saved", step, True)] and heard.events[-1] == "end"


@pytest.fixture
def small(tmp_path):
    with small_disk(tmp_path / "small", 2) as place:
        yield place


def test_a_full_disk_is_waited_for_beside_training(small, monkeypatch, capsys):
    monkeypatch.setattr(full_disk, "FIRST_PAUSE", 0.2)
    output = small / "run"
    seen = []

    def no_space():
        seen.append(fill(small))

    def room():
        end = time.monotonic() + 60
        while "Nothing is lost yet" not in capsys.readouterr().err and time.monotonic() < end:
            time.sleep(0.05)
        seen.pop().unlink()

    class Twice(Events):
        def on_step_end(self, args, state, control, **kwargs):
            super().on_step_end(args, state, control)
            {3: no_space, 5: room}.get(state.global_step, lambda: None)()

    heard = Twice()
    trainer(output, heard, save_steps=4).train()
    assert heard.events[:6] == [1, 2, 3, 4, 5, ("saved", 4, True)] or heard.events[:5] == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert complete(output) == [6, 4] and not seen
    assert "there is space again: saved after a wait of" in capsys.readouterr().err


def test_a_full_disk_ends_a_run_that_does_not_wait(small):
    output = small / "run"

    def no_space():
        end = time.monotonic() + 60
        while complete(output) != [2] and time.monotonic() < end:
            time.sleep(0.01)
        fill(small)

    with pytest.raises(FullDiskError):
        trainer(output, Events(3, no_space), on_full_disk="stop").train()
    os.unlink(small / "ballast")
    assert complete(output) == [2] and not [*output.glob(".checkpoint*")]


def test_a_script_that_saves_itself_is_refused(tmp_path):
    class Own(MerakTrainer):
        def save_model(self, output_dir=None, _internal_call=False):
            super().save_model(output_dir, _internal_call)

    with pytest.raises(ConfigError, match=r"async_save True: Own\.save_model is not that of"):
        trainer(tmp_path, kind=Own)
    run = trainer(tmp_path)
    run.save_model = lambda *_: None
    with pytest.raises(ConfigError, match="async_save"):
        run.train()


def _failing_rank(rank: int, world: int, root: Path) -> None:
    """One rank fails in a callback while the threads of all wait for space."""
    waits = threading.Event()

    def full(copies, directory, group):
        waits.set()
        raise FullDiskError("directory", directory, "no space", "Make some")

    def fails():
        assert waits.wait(60)
        if rank == 1:
            raise KeyError("of one rank")

    CheckpointCopies.write = full
    trainer(root, Events(3, fails)).train()


@pytest.mark.long
def test_a_rank_that_fails_while_threads_wait_for_space_ends_at_once(tmp_path):
    began = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(_failing_rank, 2, tmp_path, timeout=100.0)
    error = caught.value.__cause__
    assert isinstance(error, KeyError) and time.monotonic() - began < 60
    assert "the run ends, and waits for space no longer" in str(caught.value)


def _interrupted(rank: int, world: int, root: Path) -> tuple[int, list]:
    """A signal to the last rank while the threads of all write; steps that ended, what was told."""
    write = CheckpointCopies.write
    sent = threading.Event()

    def slow(copies, directory, group):
        if directory.name == ".checkpoint-2.new":
            assert sent.wait(60) or rank < world - 1
        write(copies, directory, group)

    def stop():
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        sent.set()

    CheckpointCopies.write = slow
    heard = Events(3, stop)
    try:
        trainer(root, heard, **SHARDED).train()
    except Interrupted as ended:
        return ended.status, heard.events
    raise AssertionError("it was not interrupted")


@pytest.mark.long
def test_ranks_stop_together_and_are_told_of_the_same_checkpoints(tmp_path):
    (status, events), other = run_ranks(_interrupted, 2, tmp_path)
    assert status == 143 and (status, events) == other
    assert [each[1] for each in events if type(each) is tuple] == complete(tmp_path)[::-1]


def test_a_backend_without_further_groups_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="async_save True: its thread needs a group of its own"):
        trainer(tmp_path, ddp_backend="mpi")
