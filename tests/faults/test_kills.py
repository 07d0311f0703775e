"""kill -9 before each call that touches the disk, in all that writes: what was there, or what is
new, is whole.
"""

import os
import tempfile
from pathlib import Path

import pytest

from tests.checkpoint.kills import DISK, fork, kill_before_call
from tests.faults.doors import DOORS
from tests.ranks import run_ranks

CALLS = DISK | {"ftruncate", "pwrite", "flock", "stat", "lstat", "listdir", "link"}
# Door: a stride that leaves about a dozen kills; fewest kills of the sweep.
EXPECTED = {
    "checkpoint": (9, 40),
    "save_model": (13, 60),
    "merak-convert": (17, 40),
    "merak-convert back": (11, 30),
    "merak-convert to megatron": (160, 900),
    "merak-convert to megatron-legacy": (90, 300),
    "merak-convert to dcp": (160, 900),
    "parameter server": (1, 3),
    "index cache": (2, 10),
    "merak-preprocess": (2, 10),
}


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


def _kill_everywhere(rank: int, world: int, root: Path, name: str, stride: int) -> int:
    """Kill before every ``stride``-th call; return the number of kills."""
    door = DOORS[name](root)
    value = 1
    kills = 0
    door.write(value)
    done = False
    while not done:

        def work(report, number=kills * stride, value=value):
            kill_before_call(number, CALLS)
            door.write(value + 1)
            report()

        done, written = fork(work)
        if door.repeats:
            door.write(value + 1)
            assert door.read() == value + 1
            value += 1
        else:
            found = door.read()
            before_or_none = (value, None) if name == "merak-preprocess" else (value,)
            allowed = (value + 1,) if written else (*before_or_none, value + 1)
            assert found in allowed, (kills * stride, found, value)
            if found != value:
                value += 1
                door.write(value)
        kills += not done
    return kills


@pytest.mark.parametrize("name", DOORS)
def test_a_kill_now_and_then_leaves_what_can_be_read(root, name, record_property):
    stride, _ = EXPECTED[name]
    [kills] = run_ranks(_kill_everywhere, 1, root, name, stride, timeout=200.0)
    record_property("kills", kills)
    assert kills > 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", DOORS)
def test_a_kill_before_any_disk_call_leaves_what_can_be_read(root, name, record_property):
    _, fewest = EXPECTED[name]
    [kills] = run_ranks(_kill_everywhere, 1, root, name, 1, timeout=1700.0)
    record_property("kills", kills)
    assert kills >= fewest, kills
