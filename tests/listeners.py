"""The sockets that processes listen on, as the kernel lists them."""

import contextlib
import os
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_LISTENS = "0A"


def _address(text: str) -> str:
    words = [int(text[place : place + 8], 16) for place in range(0, len(text), 8)]
    data = b"".join(struct.pack("=I", word) for word in words)
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)


def _rows(net: Path) -> Iterator[tuple[str, int, str]]:
    """(address, port, inode) of every TCP socket that listens."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in (net / name).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENS:
                    address, _, port = words[1].partition(":")
                    yield _address(address), int(port, 16), words[9]


def addresses(net: Path) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket of this host that listens."""
    return {(address, port) for address, port, _ in _rows(net)}


def descendants(pid: int) -> list[int]:
    """A process and all below it."""
    parents: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(entry))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


def listeners(pid: int) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket on which a process, or one below it, listens."""
    own = set()
    for each in descendants(pid):
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{each}/fd"):
                with contextlib.suppress(OSError):
                    own |= set(
                        re.findall(r"^socket:\[(\d+)\]$", os.readlink(f"/proc/{each}/fd/{name}"))
                    )
    return {(address, port) for address, port, inode in _rows(Path("/proc/net")) if inode in own}
