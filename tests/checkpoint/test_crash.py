"""kill -9 before every call that touches the disk: the newest checkpoint always loads, and is never
an older one.
"""

import os
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_merak.checkpoint.behind import Behind, Staging
from megatron_merak.checkpoint.directory import (
    Iterations,
    iteration_of,
    read_manifest,
)
from megatron_merak.checkpoint.lock import DirectoryLock
from megatron_merak.checkpoint.save import save, write
from megatron_merak.checkpoint.shard import Shard, StateKind
from megatron_merak.checkpoint.store import load, prune
from megatron_merak.errors import CheckpointError
from tests.checkpoint import step_runs
from tests.checkpoint.kills import DISK, NAMES, fork, kill_before_call
from tests.ranks import RankFailure, run_ranks

LOCK = {"ftruncate", "pwrite", "pread", "flock"}  # calls that take and read a lock file


@pytest.fixture
def root(tmp_path):
    """A directory in memory where there is one: a kill, unlike a power cut, does not care, and
    fsync is slow.
    """
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)


def _shards(value: int) -> dict:
    kinds = ("model", "exp_avg")
    return {
        kind: [Shard("w", (300, 40), None, (), torch.full((300, 40), value * 1.0))]
        for kind in kinds
    }


def _load(root: Path, iteration: int) -> tuple[int, int]:
    shards = _shards(-1)
    meta = load(root, shards, None, "cpu", iteration)
    for parts in shards.values():
        assert (parts[0].tensor == meta["value"]).all(), "torn"
    return meta["iteration"], meta["value"]


def _look(root: Path) -> tuple[int, int]:
    """(iteration, value) of the newest checkpoint; whatever counts as complete must load."""
    return [_load(root, iteration_of(path)) for path in Iterations(root).newest_first()][0]


def _save_behind(root: Path, iteration: int, shards: dict, meta: dict) -> None:
    """What --async-save does."""
    kinds = {name: StateKind.of(parts) for name, parts in shards.items()}
    staged = Staging(torch.device("cpu")).copies(kinds, None, "cpu")
    with Behind() as behind:
        behind.start(partial(write, root, iteration, staged, meta, None, "cpu"))


def _save(root: Path, iteration: int, shards: dict, meta: dict) -> None:
    save(root, iteration, shards, meta, None, "cpu")


def _kill_everywhere(
    rank: int, world: int, root: Path, calls: set[str], tidy: int, behind: bool = False
) -> tuple[int, int]:
    """Kill before the first of these calls, the second... until none is left. Returns (kills,
    different outcomes).

    Every ``tidy``-th round starts without the leftovers of the one before: only then has each call
    its fixed number.
    """
    save_one = _save_behind if behind else _save
    save_one(root, 1, _shards(0), {"value": 0})
    before = (1, 0)
    seen = set()
    number = 0
    done = False
    while not done:
        iteration, value = before[0] + 1, before[1] + 2

        def work(report, number=number, iteration=iteration, value=value):
            kill_before_call(number, calls)
            with DirectoryLock(root):
                save_one(root, iteration, _shards(value), {"value": value})
                report()
                save_one(root, iteration, _shards(value + 1), {"value": value + 1})
                report()
                prune(root, 1 << 20)

        done, saves = fork(work)
        after = _look(root)
        allowed = (before, (iteration, value), (iteration, value + 1))[saves : saves + 2]
        assert after in allowed, (number, after, allowed)
        seen.add("before" if after == before else after[1] - value)
        before, number = after, number + 1
        if number % tidy == 0:
            prune(root, 1 << 20)
    save(root, before[0] + 1, _shards(0), {"value": 0}, None, "cpu")
    assert not list(root.glob("*.new")) and not list(root.glob("*.old")), (
        "leftovers of crashes stay for ever"
    )
    return number - 1, len(seen)


@pytest.mark.parametrize("behind", [False, True])
def test_a_kill_before_any_change_of_names_leaves_all_checkpoints_loadable(
    root, behind, record_property
):
    calls = NAMES | LOCK | {"open", "flush"}
    [(kills, outcomes)] = run_ranks(_kill_everywhere, 1, root, calls, 1, behind)
    record_property("kills", kills)
    assert kills >= 65 and outcomes == 3, (kills, outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("tidy", [1, 4])
def test_a_kill_before_any_disk_call_leaves_all_checkpoints_loadable(
    root, tidy, behind, record_property
):
    calls = DISK | LOCK | {"stat", "lstat", "listdir"}
    [(kills, outcomes)] = run_ranks(_kill_everywhere, 1, root, calls, tidy, behind, timeout=1000.0)
    record_property("kills", kills)
    assert kills >= 170 and outcomes == 3, (kills, outcomes)


def _kill_among_steps(
    rank: int, world: int, root: Path, calls: set[str], tidy: int
) -> tuple[int, int]:
    """Kill before the first of these calls, the second... of a run that writes steps, a checkpoint
    behind them, and removes what that makes superfluous. Returns (kills, different outcomes).
    """
    base = step_runs.checkpoint(root, 1)
    seen = set()
    number = 0
    done = False
    while not done:
        name = f"{number:016x}"

        def work(report, number=number, base=base, name=name):
            kill_before_call(number, calls)
            with DirectoryLock(root):
                steps = step_runs.writer(root, base, name)
                step_runs.write_steps(steps, range(base[0] + 1, base[0] + 3))
                report()
                step_runs.write_steps(steps, [base[0] + 3], skipped=[base[0] + 3])
                report()
                step_runs.checkpoint(root, base[0] + 3, name)
                report()
                prune(root, 1 << 20)

        done, reports = fork(work)
        from_, last, told = step_runs.best(root)
        reached = last - base[0]
        allowed = ((0, 2), (2, 3), (3,), (3,))[reports]
        assert reached in allowed and not told, (number, reports, reached, told)
        shards = _whole(-1.0)
        load(root, shards, None, "cpu", from_)
        assert all((parts[0].tensor == from_).all() for parts in shards.values()), "torn"
        seen.add((reached, from_ == last))
        if from_ < last or done or number % tidy == 0:  # a run begins with a checkpoint
            base = step_runs.checkpoint(root, last)
            prune(root, 1 << 20)
        else:
            base = (last, read_manifest(Iterations(root).locate(last))[1].save_id)
        number += 1
    step_runs.checkpoint(root, base[0] + 1)
    prune(root, 1 << 20)
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == [
        f"iter_{base[0] + 1:07d}"
    ], "leftovers of crashes stay for ever"
    return number - 1, len(seen)


def _whole(value: float) -> dict:
    full = torch.full(step_runs.SHAPE, value)
    return {
        kind: [Shard("w", step_runs.SHAPE, None, (), full.clone())] for kind in ("model", "exp_avg")
    }


def test_a_kill_before_any_change_of_names_loses_no_step_that_was_written(root, record_property):
    calls = NAMES | {"open", "flush"}
    [(kills, outcomes)] = run_ranks(_kill_among_steps, 1, root, calls, 1)
    record_property("kills", kills)
    assert kills >= 60 and outcomes == 4, (kills, outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("tidy", [1, 4])
def test_a_kill_before_any_disk_call_loses_no_step_that_was_written(root, tidy, record_property):
    calls = DISK | LOCK | {"stat", "lstat", "listdir"}
    [(kills, outcomes)] = run_ranks(_kill_among_steps, 1, root, calls, tidy, timeout=1000.0)
    record_property("kills", kills)
    assert kills >= 170 and outcomes == 4, (kills, outcomes)


def _kill_at_times(rank: int, world: int, root: Path, kills: int) -> None:
    save(root, 0, _shards(0), {"value": 0}, None, "cpu")
    before = (0, 0)
    for kill in range(kills):
        child = os.fork()
        if child == 0:
            for step in range(1, 10_000):
                save(
                    root,
                    before[0] + step,
                    _shards(before[1] + step),
                    {"value": before[1] + step},
                    None,
                    "cpu",
                )
            os._exit(0)
        time.sleep(0.005 + 0.0011 * kill)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        after = _look(root)
        assert after >= before and after[0] == after[1]
        before = after
        prune(root, 1 << 20)
    assert before > (0, 0)


def test_kills_at_arbitrary_times_in_a_loop_of_saves(root, record_property):
    record_property("kills", 24)
    run_ranks(_kill_at_times, 1, root, 24)


def _one_rank_dies(rank: int, world: int, root: Path, number: int) -> None:
    shards = [
        Shard("w", (300, 40), 0, ((150 * rank, 150 * rank + 150),), torch.full((150, 40), 2.0))
    ]
    if rank == world - 1:
        kill_before_call(number, DISK)
    save(root, 2, {"model": shards, "exp_avg": shards}, {"value": 2}, dist.group.WORLD, "cpu")
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("number", [0, 4, 9])
def test_a_rank_that_dies_in_a_save_leaves_the_checkpoint_before(tmp_path, number):
    save(tmp_path, 1, _shards(1), {"value": 1}, None, "cpu")
    with pytest.raises(RankFailure):
        run_ranks(_one_rank_dies, 2, tmp_path, number)
    assert _look(tmp_path) == (1, 1)
    with pytest.raises(CheckpointError, match="no complete checkpoint of iteration 2"):
        load(tmp_path, _shards(0), None, "cpu", 2)
    save(tmp_path, 2, _shards(3), {"value": 3}, None, "cpu")
    assert _look(tmp_path) == (2, 3)
