"""A clock of modelled time, and a network of nodes on it that share their links."""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from megatron_merak.cluster import Link

_SAME = 1e-9  # relative difference of two times that is one of rounding


class Clock:
    """Does what was planned, in the order of modelled time; what falls together, in the order in
    which it was planned.

    now: seconds.
    """

    def __init__(self):
        self.now = 0.0
        self._planned: list[tuple[float, bool, int, Callable[[], object]]] = []
        self._number = count()

    def after(self, seconds: float, action: Callable[[], object], last: bool = False) -> None:
        """Plan ``action``; ``last``: behind all others of that moment."""
        heapq.heappush(self._planned, (self.now + seconds, last, next(self._number), action))

    def run(self) -> None:
        """Until nothing is planned."""
        while self._planned:
            self.now, _, _, action = heapq.heappop(self._planned)
            action()


@dataclass(eq=False)
class _Message:
    source: int
    target: int
    size: float
    left: float
    arrived: Callable[[], object]
    rate: float = 0.0


class Network:
    """Nodes that send and receive at ``link.bandwidth`` each. A message starts ``link.latency``
    seconds after it is sent. Messages under way together share the ends that they meet at, max-min
    fair, as long TCP connections do. What a node sends to itself arrives at once.

    sent, received: bytes of each node.
    """

    def __init__(self, clock: Clock, link: Link):
        self.clock, self.link = clock, link
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self._messages: list[_Message] = []
        self._since = 0.0
        self._turn = 0
        self._settling = False

    def send(self, source: int, target: int, size: float, arrived: Callable[[], object]) -> None:
        """Call ``arrived`` when ``size`` bytes have come from one node to another."""
        if source == target:
            self.clock.after(0.0, arrived)
            return
        self.sent[source] += size
        self.received[target] += size
        message = _Message(source, target, size=size, left=size, arrived=arrived)
        self.clock.after(self.link.latency, lambda: self._start(message))

    def _start(self, message: _Message) -> None:
        self._advance()
        self._messages.append(message)
        self._settle()

    def _advance(self) -> None:
        """Let messages move from the last moment at which rates changed until now."""
        passed, self._since = self.clock.now - self._since, self.clock.now
        for message in self._messages:
            message.left -= message.rate * passed

    def _settle(self) -> None:
        """Share links anew, once all that starts or arrives at this moment has."""
        if not self._settling:
            self._settling = True
            self.clock.after(0.0, self._share, last=True)

    def _share(self) -> None:
        self._settling = False
        self._turn += 1
        if not self._messages:
            return
        fair_rates(self._messages, self.link.bandwidth)
        turn, soonest = self._turn, min(message.left / message.rate for message in self._messages)
        first = [
            message
            for message in self._messages
            if message.left / message.rate <= soonest * (1 + _SAME)
        ]
        self.clock.after(soonest, lambda: self._arrive(first) if turn == self._turn else None)

    def _arrive(self, first: list[_Message]) -> None:
        self._advance()
        for message in first:
            self._messages.remove(message)
            message.arrived()
        self._settle()


def fair_rates(messages: list[_Message], bandwidth: float) -> None:
    """Set the max-min fair rate of each message: the fullest end is divided first, and what it
    leaves of the others among their other messages."""
    ends: dict[tuple[str, int], list[_Message]] = {}
    for message in messages:
        ends.setdefault(("out", message.source), []).append(message)
        ends.setdefault(("in", message.target), []).append(message)
    room = dict.fromkeys(ends, bandwidth)
    while ends:
        fullest = min(ends, key=lambda end: room[end] / len(ends[end]))
        rate = room[fullest] / len(ends[fullest])
        for message in list(ends[fullest]):
            message.rate = rate
            for end in (("out", message.source), ("in", message.target)):
                ends[end].remove(message)
                room[end] -= rate
                if not ends[end]:
                    del ends[end]
