"""How fast messages between pairs of ranks are, and collectives of all: measured, largest size by
largest size, for as long as a size takes little time.
"""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ..parallel.agree import gather_json
from .findings import RankLink
from .rounds import Pair

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)  # bytes of messages
REDUCED = (4 << 10, 256 << 10, 4 << 20, 64 << 20)  # bytes that all ranks reduce
_TURNS = 10  # round trips of which the fastest is the latency
_REPEATED = 3  # times that each size is sent
_ENOUGH = 0.5  # seconds that a size may take, as the one before it says


class Meter:
    """One rank's part of the measurements.

    rank:    of the job.
    device:  of the tensors that are sent.
    group:   all ranks, by the backend of the job.
    control: all ranks, for agreement on the CPU.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        control: dist.ProcessGroup | None,
    ):
        self.rank = rank
        self.device = device
        self.group = group
        self.control = control
        self._small = torch.zeros(1, device=device)
        self._go = torch.zeros(1, dtype=torch.int64, device=device)
        self._data = torch.zeros(SIZES[-1], dtype=torch.uint8, device=device)

    def links(
        self, rounds: Sequence[Sequence[Pair]], say: Callable[[str], object], what: str = "messages"
    ) -> list[RankLink]:
        """Return the links of all pairs, both directions. Collective. what: is measured, for
        ``say``.
        """
        own = []
        for number, pairs in enumerate(rounds):
            say(f"{what}, round {number + 1} of {len(rounds)}")
            dist.barrier(self.control)
            for one, other in pairs:
                if self.rank in (one, other):
                    own += self._meet(one, other)
        return [
            RankLink.of(values)
            for links in gather_json([vars(link) for link in own], self.control, "cpu")
            for values in links
        ]

    def reductions(self, say: Callable[[str], object]) -> dict[int, float]:
        """Return the seconds of an all-reduce over all ranks by size in bytes. Collective."""
        found: dict[int, float] = {}
        if self.group is None:
            return found
        dist.all_reduce(self._small, group=self.group)  # connects
        for size in REDUCED:
            say(f"all-reduce of {size:,} bytes")
            values = torch.zeros(size // 4, device=self.device)
            taken = []
            for _ in range(_REPEATED):
                dist.barrier(self.control)
                began = time.perf_counter()
                dist.all_reduce(values, group=self.group)
                self._wait()
                taken.append(time.perf_counter() - began)
            found[size] = max(gather_json(min(taken), self.control, "cpu"))
            if _REPEATED * found[size] * 16 > 4 * _ENOUGH:  # alike on all ranks
                break
        return found

    def _meet(self, one: int, other: int) -> list[RankLink]:
        """Return the link that this rank sends on, to the other of a pair. Both call it."""
        found = []
        for source, destination in ((one, other), (other, one)):
            peer = destination if self.rank == source else source
            if self.rank == source:
                found.append(self._send(peer))
            else:
                self._receive(peer)
        return found

    def _send(self, peer: int) -> RankLink:
        latency = min(self._round_trip(peer) for _ in range(_TURNS)) / 2
        rates = {}
        for size, larger in zip(SIZES, (*SIZES[1:], 0), strict=True):
            self._command(peer, size)
            taken = []
            for _ in range(_REPEATED):
                began = time.perf_counter()
                dist.send(self._data[:size], peer, self.group)
                dist.recv(self._small, peer, self.group)
                self._wait()
                taken.append(time.perf_counter() - began)
            best = min(taken)
            rate = size / max(best - latency, best / 2)
            rates[str(size)] = rate
            if _REPEATED * best * larger / size > _ENOUGH:
                break
        self._command(peer, 0)
        return RankLink(self.rank, peer, latency, rate, rates)

    def _receive(self, peer: int) -> None:
        for _ in range(_TURNS):
            dist.recv(self._small, peer, self.group)
            dist.send(self._small, peer, self.group)
        while size := self._next_size(peer):
            for _ in range(_REPEATED):
                dist.recv(self._data[:size], peer, self.group)
                dist.send(self._small, peer, self.group)

    def _round_trip(self, peer: int) -> float:
        began = time.perf_counter()
        dist.send(self._small, peer, self.group)
        dist.recv(self._small, peer, self.group)
        self._wait()
        return time.perf_counter() - began

    def _command(self, peer: int, size: int) -> None:
        """Say which size is sent next; 0: none."""
        self._go.fill_(size)
        dist.send(self._go, peer, self.group)

    def _next_size(self, peer: int) -> int:
        dist.recv(self._go, peer, self.group)
        return int(self._go)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
