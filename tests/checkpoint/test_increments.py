"""Increments on disk: which states a directory gives, what damage costs, and when they go."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_merak.checkpoint.directory import directory_of
from megatron_merak.checkpoint.increments import (
    Increments,
    directory_of_run,
    read_increment,
    verify_increment,
)
from megatron_merak.checkpoint.manifest import NAME
from megatron_merak.checkpoint.recoverable import Recoverable, furthest
from megatron_merak.checkpoint.shard import Shard
from megatron_merak.checkpoint.store import prune
from megatron_merak.errors import CheckpointError, DamagedError
from tests.checkpoint.step_runs import (
    NAMES,
    best,
    check_gradients,
    checkpoint,
    record,
    write_steps,
    writer,
)
from tests.ranks import run_ranks


def _run(root: Path, *groups: range, first: int = 10) -> None:
    steps = writer(root, checkpoint(root, first))
    for group in groups:
        write_steps(steps, group)


def _directory(root: Path, number: int, run: str = NAMES[0]) -> Path:
    return Increments(directory_of_run(root, run)).names(number).plain


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def test_the_steps_behind_a_checkpoint_are_found(tmp_path):
    assert furthest(tmp_path) is None
    _run(tmp_path, range(11, 13), range(13, 15))
    assert best(tmp_path) == (10, 14, [])
    assert best(tmp_path, 13) == (10, 13, [])
    assert best(tmp_path, 10) == (10, 10, [])
    assert furthest(tmp_path) == 14
    checkpoint(tmp_path, 14, NAMES[0])
    assert best(tmp_path) == (14, 14, [])  # fewer steps to repeat
    assert best(tmp_path, 13) == (10, 13, [])


def test_steps_that_say_nothing_of_slabs_are_read(tmp_path):
    """As those say nothing that were written before tensors had slabs."""
    _run(tmp_path, range(11, 13))
    directory = _directory(tmp_path, 11)
    manifest = read_increment(directory).manifest
    for placed in manifest.meta["increment"]["layout"]["0/p"]:
        assert placed.pop("slab") is None
    (directory / NAME).write_bytes(manifest.render())
    assert best(tmp_path) == (10, 12, [])


def test_a_run_goes_on_behind_its_own_checkpoints(tmp_path):
    steps = writer(tmp_path, checkpoint(tmp_path, 10))
    write_steps(steps, [11, 12])
    checkpoint(tmp_path, 12, NAMES[0])
    write_steps(steps, [13, 14], skipped=[14])
    assert best(tmp_path) == (12, 14, [])
    shutil.rmtree(directory_of(tmp_path, 12))
    assert best(tmp_path) == (10, 14, [])


def test_steps_of_another_run_are_not_mixed_in(tmp_path):
    _run(tmp_path, range(11, 13), range(13, 17))
    base = checkpoint(tmp_path, 10)  # saved anew: the steps are of the one that was there
    assert best(tmp_path) == (10, 10, [])
    write_steps(writer(tmp_path, base, NAMES[1]), [11, 12])
    assert best(tmp_path) == (10, 12, [])


def test_of_two_runs_the_one_that_went_further_counts(tmp_path):
    base = checkpoint(tmp_path, 10)
    write_steps(writer(tmp_path, base, NAMES[0]), [11, 12, 13])
    write_steps(writer(tmp_path, base, NAMES[1]), [11, 12])
    assert best(tmp_path) == (10, 13, [])
    shutil.rmtree(directory_of_run(tmp_path, NAMES[0]))
    assert best(tmp_path) == (10, 12, [])


DAMAGE = {
    "flipped gradient": (lambda path: _flip(path / "step_0000014-rank-00000.safetensors"), 13),
    "missing file": (lambda path: (path / "step_0000014-rank-00000.safetensors").unlink(), 13),
    "flipped manifest": (lambda path: _flip(path / "manifest.json"), 12),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), 12),
    "no directory": (shutil.rmtree, 12),
    "another's": (lambda path: path.rename(path.with_name("steps_0000012")), 12),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_costs_the_steps_behind_it_and_is_told(tmp_path, case):
    _run(tmp_path, range(11, 13), range(13, 15), range(15, 17))
    spoil, last = DAMAGE[case]
    spoil(_directory(tmp_path, 13))
    checkpoint_, found, told = best(tmp_path)
    assert (checkpoint_, found) == (10, last)
    if case in ("no directory", "another's"):
        assert f"The steps 13 to 14 are in no increment of {tmp_path}." in " ".join(told)
    else:
        assert len(told) == 1 and "steps_0000013" in told[0]
    assert best(tmp_path, last)[:2] == (10, last)
    with pytest.raises(CheckpointError):
        best(tmp_path, 15)


def test_a_damaged_step_is_an_error_where_it_is_asked_for(tmp_path):
    _run(tmp_path, range(11, 15))
    _flip(_directory(tmp_path, 11) / "step_0000013-rank-00000.safetensors")
    with pytest.raises(DamagedError, match="0/p was changed after it was written"):
        best(tmp_path, 14)
    assert best(tmp_path, 12)[:2] == (10, 12)
    with pytest.raises(DamagedError, match="0/p was changed"):
        verify_increment(_directory(tmp_path, 11))


def test_an_unknown_step_is_an_error_that_names_the_known_ones(tmp_path):
    _run(tmp_path, range(11, 15))
    checkpoint(tmp_path, 20)
    with pytest.raises(CheckpointError, match=r"complete are: 20, 10 to 14\)"):
        best(tmp_path, 15)


def test_a_damaged_checkpoint_is_reached_from_the_one_before(tmp_path):
    _run(tmp_path, range(11, 15))
    checkpoint(tmp_path, 14)
    states = Recoverable(tmp_path, None)
    chain = states.best()
    assert (chain.checkpoint, chain.last) == (14, 14)
    states.drop(chain, DamagedError("checkpoint", "x", "it is damaged", "Restore it"))
    chain = states.best()
    assert (chain.checkpoint, chain.last) == (10, 14) and len(states.messages) == 1


def test_what_a_kill_left_of_a_directory_does_not_count(tmp_path):
    _run(tmp_path, range(11, 13))
    steps = writer(tmp_path, (10, "x"))
    steps.write_step(13, [Shard("0/p", (24,), 0, ((0, 24),), torch.zeros(24))])
    assert best(tmp_path) == (10, 12, [])


def _kept(root: Path) -> list[str]:
    found = root.glob("increments_*/*")
    return sorted(f"{path.parent.name[11]}{path.name[-2:]}" for path in found)


def test_they_go_once_a_newer_checkpoint_is_undamaged(tmp_path):
    steps = writer(tmp_path, checkpoint(tmp_path, 10))
    write_steps(steps, [11, 12])
    write_steps(steps, [13, 14])
    prune(tmp_path, 100, saved=10)
    assert _kept(tmp_path) == ["011", "013"]
    newest = directory_of(tmp_path, checkpoint(tmp_path, 14, NAMES[0])[0])
    write_steps(steps, [15])
    _flip(newest / "model-rank-00000.safetensors")
    prune(tmp_path, 100, saved=14)
    assert _kept(tmp_path) == ["011", "013", "015"] and best(tmp_path)[0] == 14
    checkpoint(tmp_path, 14, NAMES[0])
    prune(tmp_path, 10, saved=14)
    assert _kept(tmp_path) == ["015"] and best(tmp_path) == (14, 15, [])
    assert directory_of(tmp_path, 10).is_dir()


def test_a_run_may_complete_steps_while_its_checkpoint_removes_older_ones(tmp_path, monkeypatch):
    steps = writer(tmp_path, checkpoint(tmp_path, 10))
    write_steps(steps, [11, 12])
    checkpoint(tmp_path, 12, NAMES[0])
    own = Increments(directory_of_run(tmp_path, NAMES[0]))
    with monkeypatch.context() as patched:
        patched.setattr(Increments, "publish", lambda self, number: None)
        write_steps(steps, [13])

    def publish_once_seen(self: Increments, directory: Path, number: int) -> None:
        read_increment(directory)
        if directory == own.names(13).fresh:
            own.publish(13)

    monkeypatch.setattr(Increments, "check", publish_once_seen)
    prune(tmp_path, 100, None, "cpu", saved=12)
    own.locate(13)
    assert own.numbers() == [13] and best(tmp_path) == (12, 13, [])


def test_those_of_another_run_go_with_their_last_step(tmp_path):
    base = checkpoint(tmp_path, 10)
    write_steps(writer(tmp_path, base, NAMES[0]), range(11, 19))
    write_steps(writer(tmp_path, base, NAMES[1]), range(11, 15))
    checkpoint(tmp_path, 15, NAMES[1])
    prune(tmp_path, 100, saved=15)
    assert _kept(tmp_path) == ["011"]  # steps up to 18 that the newer run has not come to
    checkpoint(tmp_path, 18, NAMES[1])
    prune(tmp_path, 100, saved=18)
    assert not directory_of_run(tmp_path, NAMES[0]).exists()


def test_files_of_others_are_kept(tmp_path):
    _run(tmp_path, range(11, 13))
    (_directory(tmp_path, 11) / "notes.txt").write_text("mine")
    checkpoint(tmp_path, 12)
    prune(tmp_path, 100, saved=12)
    [kept] = tmp_path.rglob("notes.txt")
    assert kept.read_text() == "mine" and best(tmp_path) == (12, 12, [])


def _two(rank: int, world: int, root: Path) -> list[str]:
    group = dist.group.WORLD
    steps = writer(root, (10, (root / "id").read_text()), group=group)
    write_steps(steps, [11, 12], rank, world, skipped=[12])
    write_steps(steps, [13], rank, world)
    if rank == 0:
        _flip(_directory(root, 13) / "step_0000013-rank-00001.safetensors")
    dist.barrier()
    states = Recoverable(root, group)
    chain = states.best()
    check_gradients(root, states, chain)
    assert (chain.checkpoint, chain.last) == (10, 12)
    return states.messages


def test_each_rank_writes_its_part_and_all_agree_on_what_is_damaged(tmp_path):
    (tmp_path / "id").write_text(checkpoint(tmp_path, 10)[1])
    told = run_ranks(_two, 2, tmp_path)
    assert told[0] == told[1] and "rank-00001" in told[0][0]
    increment = read_increment(_directory(tmp_path, 11))
    assert len(increment.files(11)) == 2 and not increment.files(12)
    assert [each.square for each in increment.records] == [1.5, None]
    assert increment.records[1].counters() == record(12).counters()


def test_parts_that_leave_something_out_are_refused(tmp_path):
    steps = writer(tmp_path, checkpoint(tmp_path, 10))
    steps.write_step(11, [Shard("0/p", (24,), 0, ((0, 23),), torch.zeros(23))])
    with pytest.raises(CheckpointError, match=r"\[23, 24\) are in no part"):
        steps.seal([record(11)], {})
    assert best(tmp_path) == (10, 10, [])


def test_a_directory_that_is_removed_is_noticed(tmp_path):
    root = tmp_path / "run"
    steps = writer(root, checkpoint(root, 10))
    part = [Shard("0/p", (24,), 0, ((0, 24),), torch.zeros(24))]
    steps.write_step(11, part)
    assert not steps.is_gone()
    shutil.rmtree(root)
    with pytest.raises(CheckpointError, match="was removed"):
        steps.write_step(12, part)
    assert steps.is_gone() and not root.exists()
