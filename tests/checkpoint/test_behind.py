"""Saves in a thread: what is written is what was there when the save began, and errors arrive."""

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_merak.checkpoint import behind as behind_module
from megatron_merak.checkpoint.behind import Behind, Staging
from megatron_merak.checkpoint.directory import directory_of, read_manifest, verify
from megatron_merak.checkpoint.save import save, write
from megatron_merak.checkpoint.shard import Shard, StateKind, Turn
from megatron_merak.checkpoint.store import load
from megatron_merak.errors import CheckpointError
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def _kinds(tensor: torch.Tensor) -> dict[str, StateKind]:
    return {"model": StateKind.of([Shard("w", tuple(tensor.shape), None, (), tensor)])}


def _loaded(root: Path, iteration: int) -> torch.Tensor:
    found = torch.zeros(3, 4)
    load(root, _kinds(found), None, "cpu", iteration)
    return found


def test_what_changes_after_the_copy_is_not_saved(tmp_path):
    state = torch.full((3, 4), 1.0)
    staging = Staging(CPU)
    go = threading.Event()
    with Behind() as behind:
        for iteration in (1, 2):
            behind.finish()
            state.fill_(iteration)
            staged = staging.copies(_kinds(state), None, "cpu")

            def when_told(iteration=iteration, staged=staged) -> Path:
                assert go.wait(60)
                return write(tmp_path, iteration, staged, {}, None, "cpu")

            behind.start(when_told)
            state.fill_(-1)  # the next step, while it is written
            go.set()
    for iteration in (1, 2):
        assert (_loaded(tmp_path, iteration) == iteration).all()


def test_copies_lie_in_the_same_memory():
    state = torch.arange(12.0).reshape(3, 4).T  # as a transposed weight lies
    staging = Staging(CPU)
    first = staging.copies(_kinds(state), None, "cpu")["model"].shards[0].tensor
    assert first.equal(state) and first.is_contiguous()
    state.neg_()
    second = staging.copies(_kinds(state), None, "cpu")["model"].shards[0].tensor
    assert second.data_ptr() == first.data_ptr() and second.equal(state)


def test_an_error_is_raised_by_whoever_waits_for_it(tmp_path):
    behind = Behind()

    def fails() -> Path:
        raise CheckpointError("checkpoint", tmp_path, "the disk is gone", "Look")

    behind.start(fails)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        behind.finish()
    behind.finish()  # once
    with pytest.raises(CheckpointError, match="the disk is gone"), behind:
        behind.start(fails)


def test_what_the_thread_says_is_told_to_whoever_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(behind_module, "_LOOK", 0.01)
    told = []
    heard = threading.Event()

    def tell() -> None:
        while not behind.lines.empty():
            told.append(behind.lines.get())
            heard.set()

    behind = Behind(tell=tell)

    def waits() -> Path:
        behind.lines.put("there is no space")
        assert heard.wait(60)  # while `finish` waits
        return tmp_path

    behind.start(waits)
    behind.finish()
    assert told == ["there is no space"]


def test_an_error_of_training_comes_first_and_says_what_became_of_the_save(tmp_path):
    gave_up = []
    behind = Behind(lambda: gave_up.append(True))

    def fails() -> Path:
        raise CheckpointError("checkpoint", tmp_path, "the disk is gone", "Look")

    with pytest.raises(KeyError) as caught, behind:
        behind.start(fails)
        raise KeyError("training")
    assert gave_up == [True]
    assert "was not completed" in caught.value.__notes__[0]
    assert "the disk is gone" in caught.value.__notes__[0]


def test_an_error_of_training_does_not_cut_a_save_short(tmp_path):
    staged = Staging(CPU).copies(_kinds(torch.full((3, 4), 5.0)), None, "cpu")
    with pytest.raises(KeyError), Behind() as behind:
        behind.start(partial(write, tmp_path, 5, staged, {}, None, "cpu"))
        raise KeyError("training")
    assert (_loaded(tmp_path, 5) == 5).all()


def _both(rank: int, world: int, root: Path) -> None:
    """Save a state that is gathered in turns through one buffer, both ways, while the ranks have
    other collectives.
    """
    group = dist.group.WORLD
    shared = torch.empty(2, 6)

    def turn(number: int) -> Turn:
        rows = ((2 * rank, 2 * rank + 2),)
        part = Shard(f"w{number}", (2 * world, 6), 0, rows, shared)
        return Turn([part], fetch=lambda: shared.fill_(10 * number + rank))

    turns = [turn(0), turn(1)]
    if rank == world - 1:
        turns.append(Turn([Shard("of_the_last", (3,), None, (), torch.arange(3.0))]))
    kinds = {"model": StateKind(turns)}
    save(root / "plain", 3, kinds, {"of": "both"}, group, "cpu")
    own = dist.new_group(backend="gloo")
    staged = Staging(CPU).copies(kinds, group, "cpu")
    with Behind() as behind:
        behind.start(partial(write, root / "behind", 3, staged, {"of": "both"}, own, "cpu"))
        for _ in range(50):
            dist.all_reduce(torch.ones(8), group=group)


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_the_checkpoint_that_a_save_writes(tmp_path, ranks):
    run_ranks(_both, ranks, tmp_path)
    plain, behind = (directory_of(tmp_path / name, 3) for name in ("plain", "behind"))
    one, other = (read_manifest(each)[1] for each in (plain, behind))
    verify(behind)
    assert one.tensors == other.tensors and one.meta == other.meta
    assert sorted(one.files) == sorted(other.files)
