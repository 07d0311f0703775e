"""Set up memory shared by the ranks of one host. They exchange by gloo what each found, so that all
decide alike.
"""

import fcntl
import json
import os
import platform
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import _native

NAME = "merak_shm"
MOUNT = Path("/dev/shm")
SHARE = 4  # a group takes at most this part of what the mount has left
# after which a name in the mount no longer belongs to a group that is being created
STALE_SECONDS = 60.0
_MESSAGE = 4096  # bytes of one rank's message
_PROBLEM = 1000  # characters of a problem that are reported


@dataclass(frozen=True)
class SegmentSettings:
    """How groups are created.

    slots:      blocks, and so operations, that a rank may have in flight.
    slot_sizes: bytes of a block, the preferred size first.
    ranks_here: ranks of the job on this host, if known.
    room:       free bytes in the mount of shared memory; None: look.
    host:       identifies this host; None: ask the machine.
    """

    slots: int = 8
    slot_sizes: Sequence[int] = tuple(2**power for power in range(18, 13, -1))
    ranks_here: int = 0
    room: int | None = None
    host: str | None = None


class NotHere(Exception):
    """Why these ranks cannot share memory; every rank of the group raises the same."""


class SeveralHosts(NotHere):
    """They are on several hosts."""


def connect(
    gloo: dist.ProcessGroupGloo, ranks: Sequence[int], group: str, settings: SegmentSettings
):
    """Return this rank's communicator (``_C.shared_memory.Communicator``) in the group ``group``.
    Raises NotHere.

    Collective over ``gloo``, whose ranks are ``ranks`` of the job.
    """
    part: Any = getattr(_native.host(), "shared_memory", None)
    introductions = _agree(gloo, _introduction(part, len(ranks), settings))
    if len({one["host"] for one in introductions}) > 1:
        raise SeveralHosts("they are on several hosts")
    cores = 0
    for one in introductions:
        cores |= int(one["cores"], 16)
    crowded = 0 < cores.bit_count() < max(len(ranks), settings.ranks_here)
    seat = part.Seat(gloo.rank(), list(ranks), group, crowded)
    core, created = _first(part, seat, len(ranks), settings) if gloo.rank() == 0 else (None, {})
    try:
        segment = _agree(gloo, created)[0]
        joined = {}
        if core is None:
            core, joined = _join(part, seat, len(ranks), segment)
        _agree(gloo, joined)
    finally:
        if "name" in created:
            part.unlink(created["name"])
    core.watch()
    _exchange(gloo, {})  # none may end before the others watch it
    return core


def _exchange(gloo: Any, value: dict) -> list[dict]:
    """Return all ranks' values, in rank order."""
    text = json.dumps(value).encode()
    assert len(text) <= _MESSAGE, text
    local = torch.frombuffer(bytearray(text.ljust(_MESSAGE)), dtype=torch.uint8)
    every = [torch.empty_like(local) for _ in range(gloo.size())]
    gloo.allgather([every], [local]).wait()
    return [json.loads(one.numpy().tobytes()) for one in every]


def _agree(gloo: dist.ProcessGroupGloo, value: dict) -> list[dict]:
    """Call ``_exchange``; raise if a rank reported a "problem"."""
    messages = _exchange(gloo, value)
    for one in messages:
        if "problem" in one:
            raise NotHere(one["problem"])
    return messages


def _problem(text: object) -> dict:
    return {"problem": str(text)[:_PROBLEM]}


def _introduction(part, ranks: int, settings: SegmentSettings) -> dict:
    if part is None:
        return _problem(
            _native.host_problem() or "megatron_merak/_C has no shared memory: build it again"
        )
    if ranks > part.MOST_RANKS:
        return _problem(f"at most {part.MOST_RANKS} ranks share memory")
    cores = (
        sum(1 << core for core in os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else 0
    )
    return {"host": settings.host or _host(), "cores": f"{cores:x}"}


def _host() -> str:
    """This boot of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _first(part, seat, ranks: int, settings: SegmentSettings) -> tuple:
    """Create the segment on the first rank: (communicator, how to join it), or (None, the
    problem).
    """
    sweep()
    room = _room() if settings.room is None else settings.room
    problem = {}
    for size in settings.slot_sizes:
        shape = part.Shape(ranks, settings.slots, size)
        if shape.bytes > room // SHARE:
            problem = _problem(
                f"{MOUNT} has {room >> 10} KiB left, and {SHARE} x {shape.bytes >> 10} KiB are "
                "asked for"
            )
            continue
        name = f"/{NAME}-{os.getpid()}-{secrets.token_hex(8)}"
        token = secrets.randbits(62)
        try:
            core = part.Communicator.create(name, token, shape, seat)
        except OSError as error:
            problem = _problem(error)
            continue
        return core, {"name": name, "token": token, "slots": settings.slots, "size": size}
    return None, problem


def _join(part, seat, ranks: int, segment: dict) -> tuple:
    """Join it on the other ranks: (communicator, nothing to report), or (None, the problem)."""
    shape = part.Shape(ranks, segment["slots"], segment["size"])
    try:
        return part.Communicator.join(segment["name"], segment["token"], shape, seat), {}
    except (OSError, RuntimeError) as error:
        return None, _problem(error)


def _room() -> int:
    """Return the free bytes in the mount of shared memory; infinite if it is no mount."""
    try:
        stats = os.statvfs(MOUNT)
    except OSError:
        return 2**62
    return stats.f_bavail * stats.f_frsize


def sweep(mount: Path = MOUNT) -> None:
    """Remove the names of segments whose first rank was killed before others joined: their locks
    are free.
    """
    for path in sorted(mount.glob(f"{NAME}-*")) if mount.is_dir() else ():
        try:
            if time.time() - path.stat().st_mtime < STALE_SECONDS:
                continue
            with path.open("r+b") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
                path.unlink()
        except OSError:
            continue  # in use, another user's, or gone
