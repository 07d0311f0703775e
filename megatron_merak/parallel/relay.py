"""Chains of two collectives, the second of which uses the result of the first, overlapped with
computation.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from .clock import Clock
from .in_flight import Work

Launch = Callable[[], Work]


class Relay:
    """Launches collectives after others that are in flight.

    On a GPU, and on a modelled device, a side stream waits for the first collective, which blocks
    nothing else. A CPU has no streams: the second collective is launched together with the next
    pair, when the first one is mostly done.

    device: of the tensors.
    clock:  of this rank.
    """

    def __init__(self, device: torch.device, clock: Clock):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._clock = clock
        self._blocks = self._side_stream() is None
        self._in_flight: deque[tuple[Work, Launch]] = deque()
        self._launched: list[Work] = []

    def start(self) -> None:
        """Drop the collectives of a step that failed."""
        self._in_flight.clear()
        self._launched.clear()

    def follow(self, work: Work, launch: Launch) -> None:
        """Call ``launch``, which starts a collective, once ``work`` is done. Call it in the same
        order on all ranks.
        """
        self._in_flight.append((work, launch))
        self._launch_next(1 if self._blocks else 0)

    def finish(self) -> None:
        """Wait for all collectives (on CUDA: on the current stream)."""
        self._launch_next(0)
        for work in self._launched:
            work.wait()
        self._launched.clear()

    def _launch_next(self, left: int) -> None:
        while len(self._in_flight) > left:
            work, launch = self._in_flight.popleft()
            with self._side_stream() or nullcontext():
                work.wait()
                self._launched.append(launch())

    def _side_stream(self) -> AbstractContextManager | None:
        return (
            self._clock.side_stream() if self._stream is None else torch.cuda.stream(self._stream)
        )
