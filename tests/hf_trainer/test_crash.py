"""kill -9 before each call that touches the disk, while MerakTrainer saves, saves again, rotates:
nothing is lost.
"""

import os
import tempfile
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_merak.checkpoint.unit_directories import Units
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.run import trainer_state
from megatron_merak.hf_trainer.run.loop import TrainingLoop
from megatron_merak.hf_trainer.run.run_directory import TRAINING_STATE, RunDirectory, verify
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.checkpoint.kills import DISK, NAMES, fork, kill_before_call
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import run_ranks


@pytest.fixture
def root(tmp_path):
    """A directory in memory where there is one: a kill, unlike a power cut, does not care, and
    fsync is slow.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        dir=memory if os.access(memory, os.W_OK) else tmp_path
    ) as directory:
        yield Path(directory)


def _loop(root: Path, behind: bool) -> TrainingLoop:
    """Of a trainer that has done a step with its engine.

    behind: whether a thread writes its checkpoints.
    """
    named = {
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 100,
        "async_save": behind,
    }
    args = MerakArguments(str(root), max_steps=1, save_total_limit=1, learning_rate=0.0, **named)
    trainer = MerakTrainer(tiny_llama(), args, collate, samples(8, ragged=False))
    trainer.train()
    return TrainingLoop(trainer, RunDirectory(str(root), None), None)


def _save(loop: TrainingLoop, step: int, value: float) -> None:
    """A checkpoint in which every number tells ``value``."""
    loop.state.global_step = loop.engine.iteration = step
    loop.state.log_history = [{"value": value}]
    loop.engine.buffer.data.fill_(value)
    loop.engine.optimizer.exp_avg.fill_(value)
    if loop.saves.behind is None:
        loop._save()
    else:
        loop.saves.begin(loop.saves.behind, 0.0)
        loop._finish_saves()


def _look(loop: TrainingLoop, root: Path) -> tuple[int, float]:
    """(step, value) of the newest checkpoint, all of which must be of one save; what looks complete
    must be whole.
    """
    faults = []
    for path in [*Units(root).newest_first(faults)][::-1]:
        verify(path, None)
        state = trainer_state.read(path, None)
        loop.engine.load(path / TRAINING_STATE)
        held = [
            *loop.engine.shards(loop.engine.buffer.data),
            *loop.engine.shards(loop.engine.optimizer.exp_avg),
        ]
        tensors = [*load_file(path / "model.safetensors").values(), *(part.tensor for part in held)]
        values = {
            state.log_history[0]["value"],
            *(value for t in tensors for value in (t.min().item(), t.max().item())),
        }
        assert len(values) == 1 and loop.engine.iteration == state.global_step, (
            f"torn: {path}, {values}"
        )
    assert not faults, faults
    return state.global_step, values.pop()


def _kill_everywhere(
    rank: int,
    world: int,
    root: Path,
    calls: set[str],
    tidy: int,
    stride: int,
    behind: bool = False,
) -> tuple[int, int]:
    """Kill before every ``stride``-th of these calls. Returns (kills, different outcomes).

    Every ``tidy``-th round starts without the leftovers of the one before: only then has each call
    its fixed number.
    """
    loop = _loop(root, behind)
    _save(loop, 1, 1.0)
    loop.directory.release()
    before, seen, number, kills, done = (1, 1.0), set(), 0, 0, False
    while not done:
        step, value = before[0] + 1, before[1] + 3
        (Units(root).locate(before[0]) / "note.txt").write_text("mine")

        def work(report, number=number, step=step, value=value):
            kill_before_call(number, calls)
            _save(loop, step, value)
            report()
            _save(loop, step, value + 1)
            report()
            _save(loop, step + 1, value + 2)
            report()

        done, saves = fork(work)
        after = _look(loop, root)
        outcomes = (before, (step, value), (step, value + 1), (step + 1, value + 2))
        assert after in outcomes[saves : saves + 2], (number, after, outcomes, saves)
        (note,) = root.rglob("note.txt*")
        note.unlink()
        seen.add(outcomes.index(after))
        before, number, kills = after, number + stride, kills + (not done)
        if kills % tidy == 0:
            loop.directory.hold()
            loop.directory.release()
    _save(loop, before[0] + 1, 1.0)
    assert not [*root.glob(".checkpoint*")], "leftovers of crashes stay for ever"
    assert [path.name for path in root.glob("checkpoint-*")] == [f"checkpoint-{before[0] + 1}"]
    return kills, len(seen)


@pytest.mark.long
@pytest.mark.parametrize(("behind", "least"), [(False, 45), (True, 20)])
def test_a_kill_before_any_change_of_names_loses_no_checkpoint(
    root, behind, least, record_property
):
    [(kills, outcomes)] = run_ranks(_kill_everywhere, 1, root, NAMES, 1, 3, behind)
    record_property("kills", kills)
    assert kills >= least and outcomes == 4, (kills, outcomes)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("tidy", "stride", "behind"), [(1, 2, False), (4, 3, False), (1, 2, True), (4, 3, True)]
)
def test_a_kill_before_any_disk_call_loses_no_checkpoint(
    root, tidy, stride, behind, record_property
):
    [(kills, outcomes)] = run_ranks(
        _kill_everywhere, 1, root, DISK, tidy, stride, behind, timeout=1100.0
    )
    record_property("kills", kills)
    assert kills >= 250 and outcomes == 4, (kills, outcomes)
