"""Directories that are one unit: no change of any byte goes unnoticed, and no file of somebody
else's is lost.
"""

import json
import os
import random

import pytest
import torch

from megatron_merak.checkpoint import store, unit
from megatron_merak.checkpoint.sealed import seal
from megatron_merak.checkpoint.unit_directories import REMOVED, Units, step_of
from megatron_merak.errors import CheckpointError, DamagedError


def _write(directory, value: int) -> None:
    (directory / "sub").mkdir(parents=True)
    (directory / "config.json").write_text(f'{{"value": {value}}}')
    (directory / "sub" / "weights").write_bytes(bytes([value]) * 40)
    tensors = [store.Shard("w", (3, 4), None, (), torch.full((3, 4), value * 1.0))]
    store.save(directory / "state", 7, {"model": tensors}, {"value": value}, None, "cpu")


def _save(root, step: int, value: int = 1):
    _write(Units(root).names(step).fresh, value)
    unit.complete(Units(root).names(step).fresh, step, {})
    return Units(root).publish(step)


def _value(directory) -> int:
    unit.verify(directory, unit.read(directory, step_of(directory)))
    value = json.loads((directory / "config.json").read_text())["value"]
    assert (directory / "sub" / "weights").read_bytes() == bytes([value]) * 40
    return value


def test_every_flipped_byte_of_every_file_is_found_and_named(tmp_path):
    directory, draw = _save(tmp_path, 5), random.Random(0)
    manifest = directory / "manifest.json"
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != REMOVED]
    assert len(files) == 6, (
        "config, weights, tensors and their manifest, tracker, and the manifest of all"
    )
    for path in files:
        good = path.read_bytes()
        for position in range(0, len(good), 1 if len(good) < 200 else 7):
            bad = bytearray(good)
            bad[position] ^= 1 << draw.randrange(8)
            path.write_bytes(bad)
            with pytest.raises(
                DamagedError, match=path.name if path != manifest else "manifest"
            ) as caught:
                _value(directory)
            assert path == manifest or str(path) in str(caught.value)
        for bad in (b"", good[:-1], good + b"\0"):
            path.write_bytes(bad)
            with pytest.raises(CheckpointError):
                _value(directory)
        path.write_bytes(good)
    assert _value(directory) == 1


def test_tensors_that_have_digests_are_not_hashed_again(tmp_path):
    files = json.loads((_save(tmp_path, 5) / "manifest.json").read_text())["files"]
    tensors = files["state/iter_0000007/model-rank-00000.safetensors"]
    assert tensors.keys() == {"bytes", unit.SEALED_BY}
    assert files[tensors[unit.SEALED_BY]].keys() == {"bytes", "digest"}


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["files"].update({"../outside": d["files"].pop("config.json")}),
        lambda d: d["files"].update({"/etc/passwd": d["files"].pop("config.json")}),
        lambda d: d["files"].update({"a//b": d["files"].pop("config.json")}),
        lambda d: d["files"].update({"": d["files"].pop("config.json")}),
        lambda d: d["files"].update({"a\0": d["files"].pop("config.json")}),
        lambda d: d["files"]["config.json"].update(bytes=-1),
        lambda d: d["files"]["config.json"].update(digest=3),
        lambda d: d["files"]["config.json"].update(digest="crc32:0"),
        lambda d: d["files"].update({"config.json": 5}),
        lambda d: d["files"].update(
            {"config.json": {"bytes": 3, unit.SEALED_BY: "../manifest.json"}}
        ),
        lambda d: d.update(step="5"),
        lambda d: d.update(step=6),
        lambda d: d.update(files=[]),
        lambda d: d.pop("files"),
        lambda d: d.update(version=3),
    ],
)
def test_a_hostile_manifest_with_a_right_digest_is_refused(tmp_path, change):
    path = _save(tmp_path, 5) / "manifest.json"
    document = json.loads(path.read_text())
    del document["sha256"]
    change(document)
    path.write_bytes(seal(document))
    with pytest.raises(CheckpointError, match=r"manifest|checkpoint file"):
        unit.read(path.parent, 5)


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "absent"])
def test_only_regular_files_count(tmp_path, kind):
    file = _save(tmp_path, 5) / "config.json"
    file.rename(tmp_path / "outside")
    {
        "link": lambda: file.symlink_to(tmp_path / "outside"),
        "fifo": lambda: os.mkfifo(file),
        "directory": file.mkdir,
        "absent": lambda: None,
    }[kind]()
    assert [*Units(tmp_path).newest_first()] == []
    with pytest.raises(DamagedError, match="config.json"):
        unit.read(file.parent)


def test_what_is_not_a_plain_file_is_not_saved(tmp_path):
    fresh = Units(tmp_path).names(5).fresh
    _write(fresh, 1)
    (fresh / "link").symlink_to("config.json")
    with pytest.raises(CheckpointError, match="link"):
        unit.complete(fresh, 5, {})


def test_names_are_those_of_transformers_and_leftovers_are_not(tmp_path):
    from transformers.trainer_utils import get_last_checkpoint, sort_checkpoints

    for step in (2, 10, 9):
        _save(tmp_path, step)
    _write(Units(tmp_path).names(11).fresh, 1)
    assert [path.name for path in Units(tmp_path).newest_first()] == [
        "checkpoint-10",
        "checkpoint-9",
        "checkpoint-2",
    ]
    assert len(sort_checkpoints(str(tmp_path))) == 3 and get_last_checkpoint(
        str(tmp_path)
    ).endswith("checkpoint-10")
    assert step_of(tmp_path / "checkpoint-010") is step_of(tmp_path / ".checkpoint-1") is None


def test_files_of_others_move_with_a_checkpoint_that_is_saved_again(tmp_path, caplog):
    directory = _save(tmp_path, 5)
    (directory / "sub" / "notes.txt").write_text("mine")
    (directory / "extra").mkdir()
    (directory / "extra" / "more").write_text("mine too")
    _save(tmp_path, 5, 2)
    assert _value(directory) == 2
    assert (directory / "sub" / "notes.txt").read_text() + (
        directory / "extra" / "more"
    ).read_text() == "minemine too"
    assert "notes.txt" in caplog.text
    assert not [path for path in tmp_path.iterdir() if path != directory]


def test_files_of_others_are_kept_when_a_checkpoint_is_removed(tmp_path, caplog):
    (_save(tmp_path, 5) / "notes.txt").write_text("mine")
    _save(tmp_path, 6)
    Units(tmp_path).remove(5)
    Units(tmp_path).remove(6)
    assert {path.name for path in tmp_path.iterdir()} == {"kept-checkpoint-5"}
    assert [path.name for path in (tmp_path / "kept-checkpoint-5").iterdir()] == ["notes.txt"]
    assert "notes.txt" in caplog.text


def test_what_is_no_checkpoint_is_set_aside_and_not_removed(tmp_path, caplog):
    for _ in range(2):
        (tmp_path / "checkpoint-5").mkdir()
        (tmp_path / "checkpoint-5" / "optimizer.pt").write_text("of another program")
        _save(tmp_path, 5)
        Units(tmp_path).remove(5)
    kept = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.pt"))
    assert kept == ["kept-checkpoint-5.1/optimizer.pt", "kept-checkpoint-5/optimizer.pt"]
    assert caplog.text.count("no complete checkpoint") == 2


def test_a_directory_that_a_program_keeps_open_is_removed_later(tmp_path, caplog):
    """What a network file system leaves of a file that is removed while it is open."""
    directory = _save(tmp_path, 5)
    (directory / "sub" / ".nfs0001").write_text("")
    (directory / ".nfs0002").write_text("")
    Units(tmp_path).remove(5)
    left = Units(tmp_path).names(5).old
    assert sorted(path.name for path in left.rglob("*")) == [".nfs0001", ".nfs0002", REMOVED, "sub"]
    assert "open" in caplog.text and [*Units(tmp_path).newest_first()] == []
    for path in [*left.rglob(".nfs*")]:
        path.unlink()
    Units(tmp_path).settle()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["fresh", "old"])
def test_what_cannot_be_judged_is_not_removed(tmp_path, name):
    """It may be the only copy: that of a newer version, or on a disk that fails for a moment."""
    _save(tmp_path, 5).rename(getattr(Units(tmp_path).names(5), name))
    path = getattr(Units(tmp_path).names(5), name) / "manifest.json"
    document = json.loads(path.read_text()) | {"version": 3}
    del document["sha256"]
    path.write_bytes(seal(document))
    with pytest.raises(CheckpointError, match="format version is 3"):
        Units(tmp_path).settle()
    assert (getattr(Units(tmp_path).names(5), name) / "config.json").is_file()


def test_settling_twice_changes_nothing(tmp_path):
    _save(tmp_path, 5)
    _write(Units(tmp_path).names(6).fresh, 1)
    (tmp_path / "checkpoint-5").rename(Units(tmp_path).names(5).old)
    assert [path.name for path in Units(tmp_path).newest_first()] == [".checkpoint-5.old"]
    for _ in range(2):
        Units(tmp_path).settle()
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]
    assert _value(tmp_path / "checkpoint-5") == 1
