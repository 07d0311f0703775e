"""Processes that want the same arrays at the same time."""

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from megatron_merak.data.index_cache import cached_arrays

ROOT = Path(__file__).resolve().parents[2]
BUILDER = """
import sys, time
from pathlib import Path
import numpy as np
from megatron_merak.data.index_cache import cached_arrays

directory, seconds = Path(sys.argv[1]), float(sys.argv[2])

if "without-locks" in sys.argv:
    import errno, fcntl, os

    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    fcntl.flock = flock
    os.getpid = lambda: 7  # as in containers of two hosts

def build():
    with open(directory / "builds", "a") as file:
        file.write("x")
    time.sleep(seconds)
    return [np.arange(1000), np.eye(3)]

first, second = cached_arrays(directory, "Kind", {"key": 1}, ["first", "second"], build)
print(int(first.sum()), float(second.sum()))
"""


def start(directory, seconds, *more):
    command = [sys.executable, "-c", BUILDER, str(directory), str(seconds), *more]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def await_builds(directory, count):
    deadline = time.monotonic() + 30
    while not (directory / "builds").exists() or len((directory / "builds").read_text()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_process_builds_and_all_read(tmp_path):
    children = [start(tmp_path, 0.5) for _ in range(3)]
    outputs = [child.communicate(timeout=60)[0] for child in children]
    assert outputs == ["499500 3.0\n"] * 3
    assert (tmp_path / "builds").read_text() == "x"
    assert not list(tmp_path.glob(".*"))


def test_builders_on_a_disk_without_locks_do_not_disturb_each_other(tmp_path):
    children = [start(tmp_path, 0.5, "without-locks") for _ in range(3)]
    outputs = [child.communicate(timeout=60)[0] for child in children]
    assert outputs == ["499500 3.0\n"] * 3
    assert not list(tmp_path.glob(".*"))


def test_killed_builder_blocks_nobody(tmp_path):
    killed = start(tmp_path, 60)
    await_builds(tmp_path, 1)
    waiting = start(tmp_path, 0)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=30)
    assert waiting.communicate(timeout=60)[0] == "499500 3.0\n"
    assert (tmp_path / "builds").read_text() == "xx"


def test_arrays_without_the_description_do_not_count(tmp_path):
    (kept,) = cached_arrays(tmp_path, "Kind", {"key": 1}, ["only"], lambda: [np.arange(3)])
    assert isinstance(kept, np.memmap) and kept.tolist() == [0, 1, 2]
    assert cached_arrays(tmp_path, "Kind", {"key": 1}, ["only"], lambda: [np.arange(9)])[
        0
    ].tolist() == [0, 1, 2]
    assert cached_arrays(tmp_path, "Kind", {"key": 2}, ["only"], lambda: [np.arange(4)])[
        0
    ].tolist() == [0, 1, 2, 3]
    for path in tmp_path.glob("*description.txt"):
        path.unlink()
    assert cached_arrays(tmp_path, "Kind", {"key": 1}, ["only"], lambda: [np.arange(9)])[
        0
    ].tolist() == list(range(9))


def test_a_file_system_that_cannot_sync_directories_holds_a_cache(tmp_path, monkeypatch):
    def fsync(descriptor, sync=os.fsync):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    (array,) = cached_arrays(tmp_path, "Kind", {"key": 1}, ["first"], lambda: [np.arange(5)])
    assert array.tolist() == [0, 1, 2, 3, 4]
