"""The place of a process: its host, its number there, and when it started, so that others can tell
whether it lives.
"""

import os
from collections.abc import Sequence
from pathlib import Path


def place_of(pid: int) -> list:
    """Return the place of a process of this host; its start is 0 where that is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        host = f"{boot} {os.readlink(f'/proc/{pid}/ns/pid')}"
    except OSError:
        return ["", pid, 0]
    return [host, pid, _started(pid)]


def is_dead(place: Sequence, own: Sequence) -> bool:
    """Whether the process at ``place`` has ended; False for one on another host."""
    host, pid, started = place
    return bool(host) and host == own[0] and bool(started) and _started(pid) != started


def _started(pid: int) -> int:
    """Return when a process started, in ticks since the host did; 0 if it has ended or is
    unknown.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
