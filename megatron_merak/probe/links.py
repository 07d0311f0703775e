"""How long messages and collectives between the ranks of a job take, by size."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from ..cluster.link_times import (
    ALL_GATHER,
    ALL_REDUCE,
    BETWEEN,
    INSIDE,
    MESSAGE,
    REDUCE_SCATTER,
    LinkTime,
)
from ..parallel.agree import gather_json
from ..parallel.mesh import new_groups
from ..tensor_parallel.sequence import gather_single, reduce_scatter_single

SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)  # bytes
_REPEATED = 9  # times, the first of which are not counted
_WARM_UPS = 2
_ENOUGH = 0.1  # seconds that one time of the next size may take


class Wires:
    """One rank's part of the measurements.

    rank:    of the job.
    hosts:   the host of each rank.
    device:  of the tensors that are sent.
    control: all ranks, for agreement on the CPU; None: this process is alone.
    backend: of collectives, see ``World.collectives``.
    say:     called with what is being done.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[int],
        device: torch.device,
        control: dist.ProcessGroup | None,
        backend: str | None,
        say: Callable[[str], object],
    ):
        self.rank = rank
        self.device = device
        self.control = control
        self.backend = backend
        self.say = say
        places = [rank - hosts.index(host) for rank, host in enumerate(hosts)]
        self.sides = {
            INSIDE: [rank for rank, host in enumerate(hosts) if host == hosts[0]],
            BETWEEN: [rank for rank, place in enumerate(places) if place == 0],
        }

    def times(self) -> list[LinkTime]:
        """Return what was measured inside the first host, and between the first ranks of hosts.
        Collective over all ranks of the job.
        """
        found = []
        for where, ranks in self.sides.items():
            if len(ranks) > 1:
                found += self._side(where, ranks)
        return found

    def _side(self, where: str, ranks: Sequence[int]) -> list[LinkTime]:
        summing = new_groups(self.rank, [[*ranks]], None, "dp", backend=self.backend)
        sending = new_groups(self.rank, [[*ranks]], None, "pp")
        found = []
        for what in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, MESSAGE):
            group = sending if what == MESSAGE else summing
            for size in SIZES:
                self.say(f"{what} of {size:,} bytes")
                seconds = self._seconds(what, ranks, group, size)
                found.append(LinkTime(where, what, len(ranks), size, seconds))
                if 4 * seconds > _ENOUGH:  # alike on all ranks
                    break
        return found

    def _seconds(
        self, what: str, ranks: Sequence[int], group: dist.ProcessGroup | None, size: int
    ) -> float:
        """Return the median time on the slowest rank."""
        own = 0.0
        if self.rank in ranks and (what != MESSAGE or self.rank in ranks[:2]):
            call = self._call(what, ranks, group, size)
            taken = []
            for _ in range(_REPEATED):
                began = time.perf_counter()
                call()
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                taken.append(time.perf_counter() - began)
            own = median(taken[_WARM_UPS:])
        return max(gather_json(own, self.control, "cpu")) / (2 if what == MESSAGE else 1)

    def _call(
        self, what: str, ranks: Sequence[int], group: dist.ProcessGroup | None, size: int
    ) -> Callable[[], object]:
        shard = torch.zeros(size // 4, device=self.device)
        if what == MESSAGE:
            return partial(self._there_and_back, shard, ranks[0], ranks[1], group)
        if what == ALL_REDUCE:
            return lambda: dist.all_reduce(shard, group=group)
        whole = torch.zeros(size // 4 * len(ranks), device=self.device)
        if what == ALL_GATHER:
            return lambda: gather_single(whole, shard, group=group)
        return lambda: reduce_scatter_single(shard, whole, group=group)

    def _there_and_back(
        self, values: torch.Tensor, one: int, other: int, group: dist.ProcessGroup | None
    ) -> None:
        if self.rank == one:
            dist.send(values, other, group)
            dist.recv(values, other, group)
        else:
            dist.recv(values, one, group)
            dist.send(values, one, group)
