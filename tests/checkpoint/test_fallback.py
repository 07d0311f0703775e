"""A damaged newest checkpoint costs the steps since the one before it, not the job; the ranks agree
and it is told.
"""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_merak.checkpoint.store import Shard, latest, load, save
from megatron_merak.errors import CheckpointError, DamagedError
from tests.ranks import run_ranks

FILE, OTHER = "model-rank-00000.safetensors", "exp_avg-rank-00000.safetensors"


def _shards(value: float) -> dict:
    return {
        kind: [Shard("w", (3, 4), None, (), torch.full((3, 4), value))]
        for kind in ("model", "exp_avg")
    }


def _save(root: Path, *iterations: int) -> Path:
    for iteration in iterations:
        path = save(root, iteration, _shards(iteration), {}, None, "cpu")
    return path


def _flip(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


DAMAGE = {
    "flipped tensor": (
        lambda path: _flip(path / OTHER),
        "tensor w was changed after it was written",
    ),
    "truncated": (lambda path: os.truncate(path / FILE, 100), "it has 100 bytes where"),
    "missing file": (lambda path: (path / FILE).unlink(), "it is missing"),
    "not a file": (
        lambda path: ((path / FILE).unlink(), os.mkfifo(path / FILE)),
        "not a regular file",
    ),
    "another save's": (
        lambda path: shutil.copy(path.parent / "iter_0000005" / FILE, path),
        "another save",
    ),
    "flipped manifest": (lambda path: _flip(path / "manifest.json"), "manifest.json"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "it has no manifest.json"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_the_newest_undamaged_checkpoint_is_loaded_and_that_is_told(tmp_path, case, caplog):
    damage, message = DAMAGE[case]
    newest = _save(tmp_path, 5, 10, 15, 20)
    damage(newest)
    damage(tmp_path / "iter_0000015")
    told, shards = [], _shards(-1)
    assert load(tmp_path, shards, None, "cpu", say=told.append)["iteration"] == 10
    assert all((parts[0].tensor == 10).all() for parts in shards.values())
    assert [
        name in text and message in text for name, text in zip(("20", "15"), told, strict=True)
    ] == [True, True]
    assert all(
        text.startswith("A damaged checkpoint was passed over, and iteration 10 was loaded. ")
        and text.endswith(".")
        and "copy" not in text  # there is nothing to be done
        for text in told
    )
    with caplog.at_level(logging.WARNING):
        load(tmp_path, shards, None, "cpu")
    assert message in caplog.text
    with pytest.raises(DamagedError, match=message):
        load(tmp_path, shards, None, "cpu", 20)


@pytest.mark.parametrize("case", DAMAGE)
def test_a_job_does_not_begin_anew_where_every_checkpoint_is_damaged(tmp_path, case):
    damage, message = DAMAGE[case]
    _save(tmp_path, 5, 10)
    for iteration in (10, 5):
        if case != "another save's" or iteration == 10:
            damage(tmp_path / f"iter_{iteration:07}")
    if case == "another save's":
        _flip(tmp_path / "iter_0000005" / FILE)
    with pytest.raises(DamagedError, match=message) as caught:
        load(tmp_path, _shards(-1), None, "cpu")
    assert str(caught.value).endswith(". Restore one from a copy.")
    assert str(caught.value).lower().count("restore") == 1  # one remedy
    if "manifest" in case:
        with pytest.raises(DamagedError, match=message):
            latest(tmp_path)
    else:
        assert latest(tmp_path) == 10


def test_what_does_not_fit_or_cannot_be_read_is_no_damage(tmp_path, monkeypatch):
    newest = _save(tmp_path, 5, 10)
    other = {
        kind: [Shard("w", (4, 3), None, (), torch.zeros(4, 3))] for kind in ("model", "exp_avg")
    }
    with pytest.raises(CheckpointError, match=r"saved with shape \(3, 4\)"):
        load(tmp_path, other, None, "cpu")

    def denied(path, *args, opened=open, **kwargs):
        if Path(path) == newest / FILE:
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", denied)
    with pytest.raises(CheckpointError, match=f"{FILE}: Permission denied") as caught:
        load(tmp_path, _shards(-1), None, "cpu")
    assert not isinstance(caught.value, DamagedError)


def test_a_newer_format_is_refused_not_passed_over(tmp_path):
    from tests.checkpoint.test_damage import sealed

    path = _save(tmp_path, 5, 10) / "manifest.json"
    path.write_bytes(sealed(json.loads(path.read_bytes()) | {"version": 4}))
    with pytest.raises(
        CheckpointError, match="version is 4 and this program reads 1, 2 and 3"
    ) as caught:
        load(tmp_path, _shards(-1), None, "cpu")
    assert not isinstance(caught.value, DamagedError)


def _fall_back(rank: int, world: int, root: Path) -> tuple:
    group, told = dist.group.WORLD, []
    half = ((2 * rank, 2 * rank + 2),)

    def shards(value: float) -> dict:
        return {"model": [Shard("w", (4, 3), 0, half, torch.full((2, 3), value))]}

    for iteration in (5, 10):
        save(root, iteration, shards(iteration), {}, group, "cpu")
    if rank == 0:
        _flip(root / "iter_0000010" / "model-rank-00001.safetensors")
    dist.barrier()
    wanted = shards(-1.0)
    meta = load(root, wanted, group, "cpu", say=told.append)
    return meta["iteration"], wanted["model"][0].tensor.unique().tolist(), told


def test_all_ranks_fall_back_where_one_sees_the_damage(tmp_path):
    one, other = run_ranks(_fall_back, 2, tmp_path)
    assert one == other and one[:2] == (5, [5.0]) and "on rank 1, tensor w was changed" in one[2][0]
