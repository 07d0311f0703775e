"""What a rank says of itself and its host."""

import contextlib
import fcntl
import os
import shutil
import socket
import struct
import subprocess
from pathlib import Path

import torch

from ..parallel.process import cores
from ..parallel.same_software import hardware, settings, software
from .findings import RankFacts

_ADDRESS_OF = 0x8915  # SIOCGIFADDR
_QUERY = "driver_version,ecc.mode.current,ecc.errors.uncorrected.volatile.total"
_PATIENCE = 20.0  # seconds for nvidia-smi


def facts_of(device: torch.device) -> RankFacts:
    """Return what this rank says. device: its own."""
    of_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if of_gpu else hardware(device)["CPU"]
    return RankFacts(
        socket.gethostname(),
        interfaces(),
        cores(),
        torch.get_num_threads(),
        memory=_available(),
        device=name,
        device_memory=torch.cuda.get_device_properties(device).total_memory if of_gpu else 0,
        driver=_driver(device.index or 0) if of_gpu else "",
        software=software() | settings(device),
    )


def interfaces() -> list[str]:
    """Return the network interfaces of this host, but for that of the host alone, with their IPv4
    addresses and speeds.
    """
    found = []
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            continue
        text = " ".join(filter(None, (name, _address(name), _speed(name))))
        found.append(text)
    return found


def _address(name: str) -> str:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        given = fcntl.ioctl(asked.fileno(), _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(given[20:24])
    return ""


def _speed(name: str) -> str:
    with contextlib.suppress(OSError, ValueError):
        megabits = int(Path(f"/sys/class/net/{name}/speed").read_text())
        return f"{megabits / 1000:g} Gbit/s" if megabits > 0 else ""
    return ""


def _available() -> int:
    with contextlib.suppress(OSError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def _driver(index: int) -> str:
    """Return driver, ECC mode and uncorrected errors of a GPU; empty where nvidia-smi says
    nothing.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    which = f"GPU-{uuid}" if uuid else str(index)
    command = [tool, f"--id={which}", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE)
        fields = [field.strip() for field in told.stdout.strip().split(",")]
        if told.returncode == 0 and len(fields) == 3:
            driver, mode, errors = fields
            return f"driver {driver}, ECC {mode.lower()}, {errors} uncorrected errors"
    return ""
