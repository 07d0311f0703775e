"""The order in which everything writes keeps the rules of ``durable``, and needs each of its syncs."""

import os
import tempfile
from pathlib import Path

import pytest

from megatron_merak.durable import MARGIN
from megatron_merak.errors import FullDiskError
from tests.checkpoint.writers import AGAIN, LEFT, WRITERS, leave
from tests.disk_order import Recorder, Step, broken, syncs_that_matter

# the bytes that each counts before it writes
ROOM = {
    "checkpoint": 2 * 48,
    "checkpoint again": 2 * 48,
    "increment": 96,
    "HuggingFace directory": 2 * 256,
    "HuggingFace, no links": 2 * 256,
    "Megatron-LM directory": 8 + (1 << 14),
}


@pytest.fixture
def place(tmp_path):
    """A directory in memory where there is one: fsync is slow on others."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        yield Path(directory)


def _recorded(place: Path, name: str) -> list[list[Step]]:
    """The steps of writing a value, of writing another over it, and a third."""
    found = []
    for value in (1, 2, 3):
        recorder = Recorder(place)
        with recorder.recording():
            WRITERS[name].write(place / "run", value)
        recorder.close()
        found.append(recorder.steps)
    return found


@pytest.mark.parametrize("name", WRITERS)
def test_the_order_keeps_the_rules_and_needs_each_of_its_syncs(place, name):
    """A sync that is left out breaks a rule, unless a later one of the same thing is in its place."""
    writer = WRITERS[name]
    repeated = set()
    for steps in _recorded(place, name):
        told = "\n".join(map(str, steps))
        assert not broken(steps, writer.has_old), told
        for sync in syncs_that_matter(steps):
            if broken([*steps[:sync], *steps[sync + 1 :]], writer.has_old):
                continue
            path = steps[sync].paths[0]
            assert any(step.number == steps[sync].number for step in steps[sync + 1 :])
            repeated.add(next((each for each in writer.repeats if each in path), path))
    assert repeated == {*writer.repeats}, "syncs that nothing relies on"


@pytest.mark.parametrize(("name", "kind"), AGAIN)
@pytest.mark.parametrize("left", LEFT)
def test_what_a_kill_left_is_settled_by_the_same_rules(place, name, kind, left):
    leave(place / "run", name, kind, left)
    recorder = Recorder(place)
    with recorder.recording():
        kind(place / "run").settle()
    recorder.close()
    steps = recorder.steps
    assert WRITERS[name].read(place / "run") == 1 and not broken(steps), broken(steps)
    syncs = syncs_that_matter(steps)
    assert syncs and all(broken([*steps[:sync], *steps[sync + 1 :]]) for sync in syncs)


FILES = "iter_0000005.new/model-rank-00000.safetensors"
BREACHES = {
    "the bytes of a file": (f"fsync run/{FILES}.tmp", "bytes are not on the disk yet"),
    "the names beside a mark": ("fsync run/iter_0000005.new", "in it are not on the disk yet"),
    "the bytes of a mark": ("fsync run/iter_0000005.new/manifest.json.tmp", "bytes are not on"),
    "the name of the directory": ("fsync run", "the new is not on the disk yet"),
    "that the old is incomplete": ("fsync run/iter_0000005.old", "its mark may still be there"),
}


@pytest.mark.parametrize("name", BREACHES)
def test_a_breach_is_named(place, name):
    call, told = BREACHES[name]
    steps = _recorded(place, "checkpoint again")[1]
    first = next(at for at, step in enumerate(steps) if str(step) == call)
    faults = broken([*steps[:first], *steps[first + 1 :]])
    assert any(told in fault for fault in faults), faults


def test_a_mark_before_the_last_file_and_a_removal_before_the_name_are_breaches(place):
    steps = _recorded(place, "checkpoint again")[1]
    calls = [str(step) for step in steps]
    mark = next(at for at, step in enumerate(steps) if step.is_mark)
    file = next(at for at, call in enumerate(calls) if call.endswith(f"{FILES}.tmp -> run/{FILES}"))
    late = [*steps[:file], *steps[file + 1 : mark + 1], steps[file], *steps[mark + 1 :]]
    assert any("its mark is not the last" in fault for fault in broken(late)), broken(late)
    named = calls.index("replace run/iter_0000005.new -> run/iter_0000005")
    gone = calls.index("unlink run/iter_0000005.old/manifest.json")
    early = [*steps[: named + 1], steps[gone], *steps[named + 1 : gone], *steps[gone + 1 :]]
    assert any("the new is not on the disk yet" in fault for fault in broken(early))


@pytest.mark.parametrize("name", ROOM)
def test_a_save_without_room_is_refused_before_anything_is_written(place, monkeypatch, name):
    """The margin is part of what is needed."""
    WRITERS[name].write(place / "run", 1)
    kept = os.statvfs
    room = ROOM[name] + MARGIN

    def statvfs(path):
        fields = list(kept(path))
        fields[1:5] = [1, 1 << 40, room - 1, room - 1]
        return os.statvfs_result(fields)

    recorder = Recorder(place)
    with monkeypatch.context() as patch, recorder.recording():
        patch.setattr(os, "statvfs", statvfs)
        with pytest.raises(FullDiskError, match=f"{room:,} bytes are needed and {room - 1:,} are"):
            WRITERS[name].write(place / "run", 2)
    recorder.close()
    assert not [step for step in recorder.steps if step.written], recorder.steps
    assert WRITERS[name].read(place / "run") == 1
    room += 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", statvfs)
        WRITERS[name].write(place / "run", 2)
    assert WRITERS[name].read(place / "run") == 2
