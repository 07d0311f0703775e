"""A process alone: what is saved comes back, what does not fit is refused, and what is complete is
never lost.
"""

import errno
import json
import logging
import math
import os
import pickle
import stat

import pytest
import torch
from safetensors import safe_open

from megatron_merak.checkpoint.directory import verify
from megatron_merak.checkpoint.store import Shard, latest, load, prune, save
from megatron_merak.errors import CheckpointError, NumericsError
from tests.checkpoint.states import same, state


def _save(root, iteration, salt=0, **meta):
    return save(root, iteration, state(0, 1, salt), meta, None, "cpu")


def _load(root, shards=None, **options):
    shards = state(0, 1, None) if shards is None else shards
    return load(root, shards, None, "cpu", **options), shards


def test_values_and_meta_come_back(tmp_path):
    meta = {"config": {"lr": 1e-4, "name": "é"}, "consumed_samples": 640, "rng": [1, 2**63]}
    path = _save(tmp_path, 10, **meta)
    assert path == tmp_path / "iter_0000010"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"
    loaded, shards = _load(tmp_path)
    assert loaded == {**meta, "iteration": 10}
    assert same(shards, state(0, 1, 0))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool], ids=str
)
def test_every_dtype_survives_and_the_safetensors_library_reads_the_files(tmp_path, dtype):
    values = {
        "b.odd": torch.arange(15).reshape(3, 5).to(dtype).t(),
        "a.scalar": torch.tensor(1).to(dtype),
    }
    values["none"] = torch.zeros(0, 4, dtype=dtype)
    values["z.wide"] = torch.arange(3, dtype=torch.float64)
    shards = [Shard(name, tuple(value.shape), None, (), value) for name, value in values.items()]
    path = save(tmp_path, 1, {"model": shards}, {}, None, "cpu")
    with safe_open(path / "model-rank-00000.safetensors", framework="pt") as file:
        assert file.metadata()["iteration"] == "1" and file.metadata()["kind"] == "model"
        for name, value in values.items():
            assert (
                torch.equal(file.get_tensor(name), value)
                and file.get_tensor(name).dtype == value.dtype
            )
    empty = [
        Shard(part.name, part.shape, None, (), torch.zeros_like(part.tensor)) for part in shards
    ]
    load(tmp_path, {"model": empty}, None, "cpu")
    assert same({"model": shards}, {"model": empty})


def test_the_newest_complete_directory_counts_and_the_tracker_does_not(tmp_path):
    assert latest(tmp_path / "absent") is None and latest(tmp_path) is None
    for iteration in (5, 10, 10_000_000):
        _save(tmp_path, iteration, iteration % 7)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("99")
    (tmp_path / "iter_0000010" / "manifest.json").rename(tmp_path / "iter_0000010" / "kept")
    assert latest(tmp_path) == 10_000_000
    assert _load(tmp_path, iteration=5)[0]["iteration"] == 5
    with pytest.raises(CheckpointError, match="no manifest.json, so it is not complete"):
        _load(tmp_path, iteration=10)
    with pytest.raises(CheckpointError, match=r"of iteration 7 \(complete are: 10000000, 5\)"):
        _load(tmp_path, iteration=7)
    with pytest.raises(CheckpointError, match="no complete checkpoint. Check --load"):
        _load(tmp_path / "absent")


def test_an_incomplete_directory_is_passed_over_and_replaced(tmp_path):
    _save(tmp_path, 5)
    for leftover in ("iter_0000010", "iter_0000010.new", "iter_0000015.new", "iter_0000005.old"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "model-rank-00000.safetensors.tmp").write_bytes(b"half")
    assert latest(tmp_path) == 5
    _save(tmp_path, 10, 3)
    assert same(_load(tmp_path)[1], state(0, 1, 3))
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000005", "iter_0000010"]


def test_a_directory_of_another_program_is_never_removed(tmp_path):
    theirs = tmp_path / "iter_0000010" / ".metadata"
    theirs.parent.mkdir()
    theirs.write_bytes(b"theirs")
    with pytest.raises(
        CheckpointError, match="contains .metadata, which megatron_merak did not write"
    ):
        _save(tmp_path, 10)
    _save(tmp_path, 20)
    prune(tmp_path, 100)
    assert theirs.read_bytes() == b"theirs" and latest(tmp_path) == 20


def test_a_complete_iteration_is_replaced_by_a_complete_one_only(tmp_path):
    _save(tmp_path, 10, 1)
    with pytest.raises(CheckpointError, match="JSON"):
        save(tmp_path, 10, state(0, 1, 2), {"bad": {1}}, None, "cpu")
    with pytest.raises(CheckpointError, match="changed after"):
        save(tmp_path, 10, state(0, 1, 2), {"alike": {1: "a", "1": "b"}}, None, "cpu")
    assert same(_load(tmp_path)[1], state(0, 1, 1))
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000010"]
    _save(tmp_path, 10, 2)
    assert same(_load(tmp_path)[1], state(0, 1, 2))


def test_what_does_not_fit_is_refused_before_a_tensor_changes(tmp_path):
    _save(tmp_path, 10)

    def refused(match, change):
        shards = state(0, 1, None)
        change(shards)
        with pytest.raises(CheckpointError, match=match):
            _load(tmp_path, shards)
        assert all((part.tensor == -1).all() for parts in shards.values() for part in parts)

    def swap(kind, name, shape, dtype=torch.float32):
        tensor = torch.full(shape, -1, dtype=dtype)
        return lambda shards: shards[kind].append(Shard(name, shape, None, (), tensor))

    refused("model/lm_head.weight: it is missing", swap("model", "lm_head.weight", (2,)))
    refused(
        r"model/h.0.scale: .*shape \(\), and the model has \(2,\)", swap("model", "h.0.scale", (2,))
    )
    refused(
        "exp_avg/h.0.scale: .*float32, and torch.float64",
        swap("exp_avg", "h.0.scale", (), torch.float64),
    )
    refused("no master state, only model, exp_avg", lambda shards: shards.update(master=[]))
    refused(
        "exp_avg tensors that the model does not have: h.0.scale",
        lambda shards: shards["exp_avg"].pop(),
    )


def test_kinds_that_are_not_wanted_stay_unread(tmp_path):
    path = _save(tmp_path, 10)
    (path / "exp_avg-rank-00000.safetensors").unlink()
    shards = state(0, 1, None, kinds=("model",))
    _load(tmp_path, shards)
    assert same(shards, state(0, 1, 0, kinds=("model",)))


def test_a_model_may_change_dtype_and_that_is_logged(tmp_path, caplog):
    _save(tmp_path, 10)
    shards = state(0, 1, None, kinds=("model",), dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        _load(tmp_path, shards)
    assert "5 tensors changed dtype" in caplog.text
    assert same(shards, state(0, 1, 0, kinds=("model",), dtype=torch.bfloat16))


def test_parameters_that_require_gradients_load(tmp_path):
    _save(tmp_path, 10)
    parameter = torch.nn.Parameter(torch.zeros(45, 8))
    others = state(0, 1, None, kinds=("model",))["model"][1:]
    _load(tmp_path, {"model": [Shard("wte.weight", (45, 8), None, (), parameter), *others]})
    assert (
        torch.equal(parameter.detach(), state(0, 1, 0)["model"][0].tensor)
        and parameter.grad is None
    )


def test_parts_without_an_owner_are_named(tmp_path):
    part = Shard("w", (4, 2), 0, ((0, 3),), torch.zeros(3, 2))
    with pytest.raises(
        CheckpointError, match=r"model/w of shape \(4, 2\), along dim 0: indices \[3, 4\) are in no"
    ):
        save(tmp_path, 1, {"model": [part]}, {}, None, "cpu")
    assert latest(tmp_path) is None and list(tmp_path.glob("iter_*")) == []


def test_a_path_that_cannot_be_written_is_a_typed_error(tmp_path):
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("long" * 100)):
        with pytest.raises(CheckpointError, match="Check --save"):
            _save(root, 1)
    with pytest.raises(CheckpointError, match="Not a directory"):
        _load(tmp_path / "file")


def test_retention_keeps_multiples_and_the_newest(tmp_path):
    for iteration in (5, 10, 15, 20, 25):
        _save(tmp_path, iteration)
    assert prune(tmp_path, 10) == [15, 5]
    assert sorted(path.name[-2:] for path in tmp_path.glob("iter_*")) == ["10", "20", "25"]
    assert prune(tmp_path, 10) == []
    with pytest.raises(CheckpointError, match="save-retain-interval 0"):
        prune(tmp_path, 0)


def test_retention_keeps_what_was_just_saved_beside_later_ones_of_an_earlier_run(tmp_path):
    for iteration in (2, 4, 8):
        _save(tmp_path, iteration)
    assert prune(tmp_path, 100, saved=4) == [2]
    assert latest(tmp_path) == 8 and _load(tmp_path, iteration=4)[0]["iteration"] == 4


def test_retention_counts_only_what_is_undamaged_as_the_newest(tmp_path, caplog):
    for iteration in (5, 10, 15):
        path = _save(tmp_path, iteration)
    file = path / "model-rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert prune(tmp_path, 100) == [5]
    assert "iter_0000015" in caplog.text and "was changed after it was written" in caplog.text
    assert [path.name[-2:] for path in sorted(tmp_path.glob("iter_*"))] == ["10", "15"]
    assert prune(tmp_path, 100) == [] and _load(tmp_path, iteration=10)[0]["iteration"] == 10


def test_files_that_are_not_ours_survive_retention_replacement_and_crashes(tmp_path, caplog):
    for iteration in (5, 10, 15):
        (_save(tmp_path, iteration) / "my_notes.txt").write_text(f"notes of {iteration}")
    (tmp_path / "iter_0000005").rename(tmp_path / "iter_0000005.old")
    # as after a kill while it was removed
    (tmp_path / "iter_0000005.old" / "manifest.json").unlink()
    assert prune(tmp_path, 100) == [10]
    _save(tmp_path, 15, 1)
    _save(tmp_path, 15, 2)
    assert same(_load(tmp_path)[1], state(0, 1, 2))
    kept = {path.name: (path / "my_notes.txt").read_text() for path in tmp_path.glob("*.kept*")}
    assert kept == {f"iter_{n:07}.kept": f"notes of {n}" for n in (5, 10, 15)}
    assert (
        all(os.listdir(tmp_path / name) == ["my_notes.txt"] for name in kept)
        and "my_notes.txt" in caplog.text
    )


def test_numbers_that_are_not_finite_are_not_saved(tmp_path):
    _save(tmp_path, 5)
    for kind, value in (("model", math.nan), ("exp_avg", math.inf)):
        shards = state(0, 1, 0)
        shards[kind][2].tensor[-1, -1] = value
        with pytest.raises(
            NumericsError, match=f"{kind}/h.0.attn.c_attn.weight: it has values that are not finite"
        ):
            save(tmp_path, 10, shards, {}, None, "cpu")
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000005"]
    # frozen: it has no moments
    mask = Shard("mask", (2, 2), None, (), torch.full((2, 2), -math.inf))
    save(
        tmp_path,
        10,
        {"model": [*shards["model"], mask], "exp_avg": state(0, 1, 0)["exp_avg"]},
        {},
        None,
        "cpu",
    )
    assert prune(tmp_path, 100) == [5]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_cannot_sync_directories_can_save(tmp_path, monkeypatch, number):
    def fsync(descriptor, sync=os.fsync):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    if number == errno.EIO:
        with pytest.raises(CheckpointError, match="Input/output error"):
            _save(tmp_path, 1)
    else:
        _save(tmp_path, 1)
        assert same(_load(tmp_path)[1], state(0, 1, 0))


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    for owner, name in (
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "Unpickler"),
        (torch, "load"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    _save(tmp_path, 1)
    assert same(_load(tmp_path)[1], state(0, 1, 0))
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {
        ".safetensors",
        ".json",
        ".txt",
    }


def test_the_manifest_is_plain_json(tmp_path):
    manifest = json.loads((_save(tmp_path, 3, seed=1) / "manifest.json").read_bytes())
    assert manifest["version"] == 2 and manifest["meta"] == {"seed": 1, "iteration": 3}
    entry = manifest["tensors"]["model"]["h.0.attn.c_attn.weight"]
    assert (entry["shape"], entry["dtype"], entry["dim"]) == ([8, 24], "float32", 1)
    assert os.listdir(tmp_path / "iter_0000003").count(entry["parts"][0]["file"]) == 1


@pytest.mark.parametrize("moments", [True, False])
def test_buffers_may_have_any_numbers_and_weights_may_not(tmp_path, moments):
    """A buffer is no reason to pass over a weight, nor to refuse a state."""
    weights = torch.ones(3)
    mask = torch.full((2,), float("-inf"))

    def shard(name, tensor):
        return [Shard(name, tuple(tensor.shape), None, (), tensor)]

    kinds = {"model": shard("w", weights), "buffer": shard("mask", mask)}
    if moments:
        kinds["exp_avg"] = shard("w", torch.zeros(3))
    path = save(tmp_path, 1, kinds, {}, None, "cpu")
    verify(path)
    weights[1] = float("nan")
    with pytest.raises(NumericsError, match="model/w"):
        save(tmp_path, 2, kinds, {}, None, "cpu")
