"""By how much the clocks of hosts differ: the first rank asks each host for its time."""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..parallel.agree import broadcast_json

_TURNS = 8


def skews(rank: int, hosts: Sequence[int], control: dist.ProcessGroup | None) -> list[float]:
    """Return the seconds by which the clock of each host is ahead of the first one's. Collective.

    hosts:   the host of each rank.
    control: all ranks, for agreement on the CPU.
    """
    firsts = [hosts.index(host) for host in range(max(hosts) + 1)]
    found = [0.0]
    value = torch.zeros(1, dtype=torch.float64)
    for other in firsts[1:]:
        if rank == 0:
            found.append(_asked(other, value, control))
        elif rank == other:
            for _ in range(_TURNS):
                dist.recv(value, 0, control)
                value.fill_(time.time())
                dist.send(value, 0, control)
    return broadcast_json(found, control, "cpu")


def _asked(other: int, value: torch.Tensor, control: dist.ProcessGroup | None) -> float:
    """Return the difference in the fastest of some round trips, at the middle of it."""
    turns = []
    for _ in range(_TURNS):
        began = time.time()
        dist.send(value, other, control)
        dist.recv(value, other, control)
        ended = time.time()
        turns.append((ended - began, float(value) - (began + ended) / 2))
    return min(turns)[1]
