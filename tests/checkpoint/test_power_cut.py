"""A power cut leaves the old or the new, and once a writer has returned, the new."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_merak.checkpoint import store
from megatron_merak.checkpoint.directory import TRACKER
from megatron_merak.errors import FullDiskError
from tests.checkpoint.writers import AGAIN, LEFT, WRITERS, Writer, leave, shards_of
from tests.power_cut import Disk

SETTLE = (
    "checkpoint again",
    "checkpoint, pruned",
    "files in place",
    "unit again",
    "units, rotated",
)


@pytest.fixture
def place(tmp_path):
    """A directory in memory where there is one: fsync is slow on others."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        yield Path(directory)


def _write_watched(
    writer: Writer,
    disk: Disk,
    value: int,
    old: int | None,
    look: Callable[[], object] = lambda: None,
) -> None:
    """Write a value over an old one; ``look`` is called with each state between them."""
    allowed = (old, value, None) if writer.may_lack else (old, value)

    def is_old_or_new() -> None:
        found = writer.read(disk.spare / "run")
        assert found in allowed, f"{found} is there, not one of {allowed}"
        look()

    def is_new() -> None:
        found = writer.read(disk.spare / "run")
        assert found == value, f"{value} is written, but {found} is there"

    with disk.watched(is_old_or_new):
        writer.write(disk.root / "run", value)
    disk.cut(is_new)


@pytest.mark.parametrize("name", WRITERS)
def test_a_power_cut_leaves_the_old_or_the_new_and_then_the_new(place, name):
    (place / "disk").mkdir()
    disk = Disk(place / "disk", place / "spare")
    old = None
    for value in (1, 2, 3):
        _write_watched(WRITERS[name], disk, value, old)
        old = value
    disk.close()


@pytest.mark.parametrize("name", SETTLE)
def test_a_second_power_cut_leaves_what_the_first_left_or_the_new(place, name):
    """The next save begins by completing or undoing what it finds."""
    writer = WRITERS[name]
    writer.write(place / "disk" / "run", 1)
    disk = Disk(place / "disk", place / "spare")
    states: list[Path] = []

    def keep() -> None:
        states.append(place / f"state-{len(states)}")
        shutil.copytree(disk.spare, states[-1], symlinks=True)

    _write_watched(writer, disk, 2, 1, keep)
    disk.close()
    assert len(states) > 10
    for state in states[:: -(-len(states) // 6)]:
        disk = Disk(state, place / "spare")
        _write_watched(writer, disk, 2, writer.read(state / "run"))
        disk.close()


@pytest.mark.parametrize(("name", "kind"), AGAIN)
@pytest.mark.parametrize("left", LEFT)
def test_what_was_settled_keeps_its_name(place, name, kind, left):
    leave(place / "run", name, kind, left)
    disk = Disk(place / "run", place / "spare")

    def is_whole() -> None:
        assert WRITERS[name].read(disk.spare) == 1

    with disk.watched(is_whole):
        kind(place / "run").settle()
    disk.cut(lambda: kind(disk.spare).check(kind(disk.spare).names(5).plain, 5))
    disk.close()


FIGURE = """\
fsync NAME.new/FILE.tmp
replace NAME.new/FILE.tmp -> NAME.new/FILE
fsync NAME.new
fsync NAME.new/manifest.json.tmp
replace NAME.new/manifest.json.tmp -> NAME.new/manifest.json
fsync NAME.new
replace NAME -> NAME.old
replace NAME.new -> NAME
fsync .
unlink NAME.old/manifest.json
fsync NAME.old
unlink NAME.old/FILE
rmdir NAME.old
fsync TRACKER.tmp
replace TRACKER.tmp -> TRACKER
fsync .
"""


def test_a_checkpoint_is_replaced_by_the_calls_of_the_figure(place):
    def write(value: int) -> None:
        kinds = {"model": shards_of(value)["model"]}
        store.save(place / "run", 5, kinds, {}, group=None, device="cpu")

    write(1)
    disk = Disk(place / "run", place / "spare")
    with disk.watched(lambda: None):
        write(2)
    disk.close()
    calls = "".join(f"{call}\n" for call in disk.calls if not call.startswith("mkdir"))
    told = calls.replace("iter_0000005", "NAME").replace("model-rank-00000.safetensors", "FILE")
    assert told.replace(TRACKER, "TRACKER") == FIGURE


@pytest.mark.parametrize(
    ("name", "counted"),
    [("checkpoint", 2 * 48), ("HuggingFace directory", 2 * 256)],
)
def test_there_is_room_for_more_than_the_tensors(place, monkeypatch, name, counted):
    writer = WRITERS[name]
    kept = os.statvfs

    def with_room(room: int) -> Callable:
        def statvfs(path):
            fields = list(kept(path))
            fields[1:5] = [1, 1 << 40, room, room]
            return os.statvfs_result(fields)

        return statvfs

    needed = counted + (1 << 20)
    monkeypatch.setattr(os, "statvfs", with_room(needed - 1))
    reason = f"{needed:,} bytes are needed and {needed - 1:,} are free"
    with pytest.raises(FullDiskError, match=reason):
        writer.write(place, 1)
    assert writer.read(place) is None
    monkeypatch.setattr(os, "statvfs", with_room(needed))
    writer.write(place, 1)
    assert writer.read(place) == 1
