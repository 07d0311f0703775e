"""One job at a time writes to a directory: a lock file names its owner, and is taken over soon after that dies.

    ROOT/.megatron_merak.lock    {"host", "boot", "pid_space", "pid", "started", "token"} of the owner's first rank

An owner on this machine is looked up among its processes; the lock of a dead one is taken over at once. Of an owner
elsewhere, only the lock file's modification time is visible, which every owner renews: if it does not change while it
is watched, the owner is dead.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch.distributed as dist

from megatron_merak.checkpoint.files import disk_errors
from megatron_merak.durable import make_directory
from megatron_merak.errors import DirectoryLockedError
from megatron_merak.parallel.agree import broadcast_json, together

NAME = ".megatron_merak.lock"
HEARTBEAT = 5.0  # seconds between two heartbeats
PATIENCE = 30.0  # seconds for which a foreign lock is watched for one

_REMEDY = "Check its permissions and its free space"
_LARGEST = 1 << 16  # bytes of a lock file


class DirectoryLock:
    """A lock that the first rank has for all of its job, from construction until `release`.
    Collective over ``group``.

    directory: created if it does not exist.
    group:     None for a single process.
    patience:  seconds for which the lock of an owner on another machine is watched for a heartbeat.

    Raises `DirectoryLockedError`, naming the owner, and `CheckpointError` if no lock can be
    written. A process that has the lock already may take it again.
    """

    def __init__(
        self,
        directory: Path | str,
        group: dist.ProcessGroup | None = None,
        patience: float = PATIENCE,
    ):
        self.directory = Path(directory)
        self.group = group
        self._claim: _Claim | None = None
        with together(group, "cpu"), disk_errors(self.directory, _REMEDY):
            if group is None or dist.get_rank(group) == 0:
                make_directory(self.directory)
                self._claim = _Claim(self.directory / NAME, patience)

    def confirm(self) -> bool:
        """Return whether the directory was removed, and is made anew and locked again; equal on
        every rank.

        Raises `DirectoryLockedError` on every rank if another job took the lock because this one
        was suspended, and `CheckpointError` if no lock can be written. Collective. Call it before
        each save.
        """
        return self.confirm_over(self.group)

    def confirm_over(self, group: dist.ProcessGroup | None) -> bool:
        """Do what `confirm` does, over another group of the same ranks."""
        is_new = False
        with together(group, "cpu"), disk_errors(self.directory, _REMEDY):
            if self._claim is not None:
                is_new = not self.directory.is_dir()
                make_directory(self.directory)
                self._claim.confirm()
        return broadcast_json(is_new, group, "cpu")

    def release(self) -> None:
        """Unlock the directory. Not collective; may be repeated."""
        if self._claim is not None:
            self._claim.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()


class _Claim:
    """One process's claim of a lock file."""

    def __init__(self, path: Path, patience: float):
        self.path = path
        self.owned = {**_this_process(), "token": secrets.token_hex(8)}
        self._over = threading.Event()
        self.nested = True  # this process had the lock before
        watched = None  # an owner elsewhere without a heartbeat
        while not self._take(watched):
            watched = _watch(path, patience)

    def _take(self, presumed_dead: dict | None = None) -> bool:
        """Return whether the lock is ours; False if its owner has to be watched."""
        with _guarded(self.path) as file:
            owner = _read(file)
            if owner is not None and owner != presumed_dead:
                if _same_process(owner, self.owned):
                    return True
                alive = _is_alive(owner, self.owned)
                if alive:
                    raise _locked(self.path, owner)
                if alive is None:
                    return False
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(self.owned).encode(), 0)
            os.fsync(file)
        if self.nested:
            self.nested = False
            threading.Thread(target=self._beat, name="directory lock", daemon=True).start()
        return True

    def _beat(self) -> None:
        while not self._over.wait(HEARTBEAT):
            with contextlib.suppress(OSError):
                if _peek(self.path) == self.owned:
                    os.utime(self.path)

    def confirm(self) -> None:
        owner = _peek(self.path)
        if owner is None and self._take():  # somebody had removed the file
            return
        owner = owner or _peek(self.path) or {}
        if not _same_process(owner, self.owned):
            raise _locked(self.path, owner)

    def release(self) -> None:
        # a fork of the owner does not own
        if self._over.is_set() or self.nested or os.getpid() != self.owned["pid"]:
            return
        self._over.set()
        with contextlib.suppress(OSError), _guarded(self.path) as file:
            if _read(file) == self.owned:
                self.path.unlink()


def _this_process() -> dict:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "boot": _text("/proc/sys/kernel/random/boot_id"),
        "pid_space": _link("/proc/self/ns/pid"),
        "pid": pid,
        "started": _started(pid),
    }


def _text(path: str) -> str | None:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return None


def _link(path: str) -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return None


def _started(pid: int) -> str | None:
    """Return when a process began, in ticks since boot; None for a dead one, a zombie, or without
    /proc.
    """
    text = _text(f"/proc/{pid}/stat")
    fields = text.rpartition(")")[2].split() if text else []
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else None


def _same_process(one: dict, other: dict) -> bool:
    return all(
        one.get(key) == other[key] for key in ("host", "boot", "pid_space", "pid", "started")
    )


def _is_alive(owner: dict, this_process: dict) -> bool | None:
    """Whether the process that wrote a lock is alive; None if that is not visible here."""
    here = all(owner.get(key) == this_process[key] for key in ("host", "boot", "pid_space"))
    pid = owner.get("pid")
    started = owner.get("started")
    if not here or type(pid) is not int or pid <= 0:
        return None
    if this_process["started"] is not None:
        return _started(pid) == started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _watch(path: Path, patience: float) -> dict | None:
    """Wait for a heartbeat of a lock's owner. Return the owner if there was none; else raise."""
    owner = _peek(path)
    before = _renewed(path)
    deadline = time.monotonic() + patience
    while owner is not None and time.monotonic() < deadline:
        time.sleep(min(1.0, patience / 4))
        if _peek(path) != owner:
            return None
        if _renewed(path) != before:
            raise _locked(path, owner)
    return owner


def _renewed(path: Path) -> int | None:
    """Return the modification time in ns; opens the file, so that a network file system asks its
    server.
    """
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns
    return None


def _locked(path: Path, owner: dict) -> DirectoryLockedError:
    who = f"process {owner.get('pid')} on host {owner.get('host')}"
    remedy = (
        "Wait for it, end it, or give this run a directory of its own; if no such process "
        f"exists, remove {path}"
    )
    return DirectoryLockedError(
        "directory", path.parent, f"another job writes to it: {who}", remedy
    )


@contextmanager
def _guarded(path: Path) -> Iterator[int]:
    """Open the lock file; no other process of this host reads or changes it meanwhile."""
    while True:
        file = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644
        )
        try:
            with contextlib.suppress(_NoLocks), _no_locks():
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file, path):  # else its owner released it while this process waited
                yield file
                return
        finally:
            os.close(file)


class _NoLocks(OSError):
    """A file system without locks: owners are still distinguished, except two that start at the
    same instant.
    """


@contextmanager
def _no_locks() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (
            errno.ENOLCK,
            errno.ENOSYS,
            errno.EOPNOTSUPP,
            errno.ENOTSUP,
            errno.EINVAL,
        ):
            raise _NoLocks(*error.args) from error
        raise


def _is_at(file: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), os.stat(path))
    return False


def _peek(path: Path) -> dict | None:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return _read(file.fileno())
    return None


def _read(file: int) -> dict | None:
    """Return the owner that a lock file names; None if it names none, as after a crash while it was
    written.
    """
    try:
        owner = json.loads(os.pread(file, _LARGEST, 0))
    except ValueError:
        return None
    return owner if isinstance(owner, dict) else None
