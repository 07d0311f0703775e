"""The directory that checkpoints will be written to: whether it is one for all hosts, how much is
free, and how fast it is.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from ..parallel.agree import broadcast_json, gather_json
from .findings import Disk

_BLOCK = 8 << 20  # bytes that are written at a time
_ENOUGH = 0.5  # seconds of writing
_SYNCS = 5
_PATIENCE = 5.0  # seconds until a network file system shows what another host wrote
_LOOK_AGAIN = 0.2


def disks(
    directory: str, rank: int, hosts: Sequence[int], control: dist.ProcessGroup | None
) -> list[Disk]:
    """Return what the first rank of each host finds. Collective.

    directory: made if it is not there, and removed again if it was not and is empty.
    hosts:     the host of each rank.
    control:   all ranks, for agreement on the CPU.
    """
    root = Path(directory)
    host = hosts[rank]
    first = hosts.index(host) == rank
    token = broadcast_json(os.urandom(8).hex(), control, "cpu")
    mark = root / f".preflight-{token}-{host}"
    made: list[Path] = []
    found = Disk(host)
    if first:
        found, made = _written(root, mark, host)
    errors = gather_json(found.error, control, "cpu")
    if first and not found.error:
        marks = {
            other: root / f".preflight-{token}-{other}"
            for other in sorted(set(hosts))
            if not errors[hosts.index(other)]
        }
        found = Disk.of(vars(found) | {"missing": _missing(marks)})
    everywhere = gather_json(vars(found), control, "cpu")  # nobody looks for a mark any more
    if first:
        with contextlib.suppress(OSError):
            mark.unlink()
    gather_json(None, control, "cpu")
    for each in made:
        with contextlib.suppress(OSError):  # somebody else has put something there
            each.rmdir()
    return [Disk.of(everywhere[hosts.index(other)]) for other in sorted(set(hosts))]


def _written(root: Path, mark: Path, host: int) -> tuple[Disk, list[Path]]:
    """Return the disk, and the directories that had to be made for it, the innermost first."""
    made = []
    try:
        made = [each for each in (root, *root.parents) if not each.exists()]
        root.mkdir(parents=True, exist_ok=True)
        rate = _rate(mark)
        sync = min(_sync(mark) for _ in range(_SYNCS))
        free = shutil.disk_usage(root).free
    except OSError as error:
        return Disk(host, error=error.strerror or str(error)), made
    return Disk(host, free=free, rate=rate, sync=sync), made


def _rate(mark: Path) -> float:
    """Return the bytes per second that are written and synced."""
    block = os.urandom(_BLOCK)
    written = 0
    began = time.perf_counter()
    with mark.open("wb") as file:
        while (taken := time.perf_counter() - began) < _ENOUGH:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written += len(block)
    return written / taken


def _sync(mark: Path) -> float:
    began = time.perf_counter()
    with mark.open("wb") as file:
        file.write(b"1")
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


def _missing(marks: dict[int, Path]) -> list[int]:
    """Return the hosts whose file does not appear."""
    end = time.monotonic() + _PATIENCE
    while True:
        missing = [host for host, mark in marks.items() if not mark.exists()]
        if not missing or time.monotonic() > end:
            return missing
        time.sleep(_LOOK_AGAIN)
