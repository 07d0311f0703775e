"""One writer per directory: the living are refused by name, the dead are succeeded."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_merak.checkpoint import lock
from megatron_merak.checkpoint.lock import NAME, DirectoryLock
from megatron_merak.errors import CheckpointError, DirectoryLockedError
from tests.ranks import run_ranks


def _owner(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**lock._this_process(), "token": "theirs", **changes}))


@pytest.fixture
def holder(tmp_path):
    """Another process, whose lock lies in tmp_path."""
    process = subprocess.Popen(["sleep", "60"])
    _owner(tmp_path / NAME, pid=process.pid, started=lock._started(process.pid))
    yield process
    process.kill()
    process.wait()


def test_a_living_owner_is_refused_by_name_and_a_dead_one_succeeded(tmp_path, holder):
    with pytest.raises(
        DirectoryLockedError, match=f"another job writes to it: process {holder.pid} on host"
    ):
        DirectoryLock(tmp_path)
    holder.send_signal(signal.SIGSTOP)  # stopped is not dead
    with pytest.raises(DirectoryLockedError):
        DirectoryLock(tmp_path)
    holder.kill()
    deadline = time.monotonic() + 10  # a zombie at least; nobody waits for it yet
    while lock._started(holder.pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    with DirectoryLock(tmp_path) as held:
        held.confirm()
    assert os.listdir(tmp_path) == []


def test_release_lets_the_next_one_in_and_a_process_may_lock_twice(tmp_path):
    first = DirectoryLock(tmp_path / "made" / "on the way")
    with DirectoryLock(first.directory):
        pass
    first.confirm()
    assert (first.directory / NAME).exists()
    first.release()
    first.release()
    assert not (first.directory / NAME).exists()
    outer, inner = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    outer.release()
    inner.confirm()
    assert (tmp_path / NAME).exists()
    inner.release()
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize("left", [b"", b"{", b"[1]", b"\xff"])
def test_a_lock_that_names_nobody_is_taken(tmp_path, left):
    (tmp_path / NAME).write_bytes(left)
    DirectoryLock(tmp_path).release()


def test_a_reused_process_number_is_another_process(tmp_path):
    _owner(tmp_path / NAME, started="1")
    DirectoryLock(tmp_path).release()


@pytest.mark.parametrize(
    "where", [{"host": "elsewhere"}, {"boot": "another"}, {"pid_space": "pid:[1]"}]
)
def test_an_owner_elsewhere_is_known_by_its_signs_of_life(tmp_path, where):
    path = tmp_path / NAME
    _owner(path, **where)
    began = time.monotonic()
    DirectoryLock(tmp_path, patience=0.4).release()
    assert time.monotonic() - began >= 0.4

    _owner(path, **where)
    beat = threading.Timer(0.2, lambda: os.utime(path))
    beat.start()
    with pytest.raises(DirectoryLockedError, match=f"if no such process exists, remove {path}"):
        DirectoryLock(tmp_path, patience=60)
    beat.join()


def test_an_owner_shows_signs_of_life_and_notices_its_successor(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT", 0.05)
    path = tmp_path / NAME
    held = DirectoryLock(tmp_path)
    os.utime(path, (0, 0))
    deadline = time.monotonic() + 10
    while path.stat().st_mtime == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert path.stat().st_mtime > 0
    path.unlink()
    held.confirm()  # a file that somebody removed is written again
    assert path.exists()
    _owner(path, pid=1, started="1")
    with pytest.raises(DirectoryLockedError, match="process 1 on host"):
        held.confirm()
    held.release()
    assert path.exists(), "it was the successor's"


def test_what_cannot_be_a_lock_is_a_typed_error(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "a" / NAME).mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / NAME).symlink_to(tmp_path / "file")
    (tmp_path / "c").mkdir()
    os.mkfifo(tmp_path / "c" / NAME)
    for directory in ("file", "a", "b", "c", "nul\0"):
        with pytest.raises(CheckpointError):
            DirectoryLock(tmp_path / directory)
    assert (tmp_path / "file").read_text() == ""


def test_a_file_system_without_locks_still_tells_owners_apart(tmp_path, monkeypatch, holder):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(DirectoryLockedError, match=f"process {holder.pid}"):
        DirectoryLock(tmp_path)
    DirectoryLock(tmp_path / "other").release()


def _race(rank: int, world: int, root: Path, rounds: int) -> list[int]:
    """Each round all ranks ask for the lock that a dead owner left; how often this one got it."""
    won = []
    for _ in range(rounds):
        if rank == 0:
            _owner(root / NAME, started="1")
        dist.barrier()
        try:
            held = DirectoryLock(root)
        except DirectoryLockedError:
            held = None
        won.append(held is not None)
        dist.barrier()
        if held is not None:
            held.confirm()
            held.release()
        dist.barrier()
        assert rank > 0 or not (root / NAME).exists()
    return won


def test_one_of_many_succeeds_a_dead_owner(tmp_path):
    won = run_ranks(_race, 4, tmp_path, 30)
    assert [sum(one) for one in zip(*won, strict=True)] == [1] * 30


def _refused(rank: int, world: int, root: Path) -> str:
    with pytest.raises(DirectoryLockedError) as caught:
        DirectoryLock(root, dist.group.WORLD)
    return str(caught.value)


def test_a_refusal_reaches_every_rank(tmp_path, holder):
    one, other = run_ranks(_refused, 2, tmp_path)
    assert one == other and f"process {holder.pid}" in one
