"""Collectives that follow one another: what one leaves, the next takes on, and the computation goes on meanwhile."""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from .clock import Clock

Launch = Callable[[], dist.Work]


class Relay:
    """Launches collectives behind others that are under way.

    On a GPU a stream of its own waits for the first one, on a modelled device likewise, so that nothing else does. A
    CPU has no streams: there the second one is launched when the next pair is, by when the first one is mostly through.

    device: where the tensors are. clock: of this rank.
    """

    def __init__(self, device: torch.device, clock: Clock):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._clock = clock
        self._blocks = self._aside() is None
        self._under_way: deque[tuple[dist.Work, Launch]] = deque()
        self._launched: list[dist.Work] = []

    def start(self) -> None:
        """Forget what was left behind by a step that failed."""
        self._under_way.clear()
        self._launched.clear()

    def follow(self, work: dist.Work, launch: Launch) -> None:
        """Let ``launch`` start a collective once ``work`` is through. Ranks call this in the same order."""
        self._under_way.append((work, launch))
        self._pass_on(1 if self._blocks else 0)

    def finish(self) -> None:
        """Return when all is through (on CUDA: for the current stream)."""
        self._pass_on(0)
        for work in self._launched:
            work.wait()
        self._launched.clear()

    def _pass_on(self, left: int) -> None:
        while len(self._under_way) > left:
            work, launch = self._under_way.popleft()
            with self._aside() or nullcontext():
                work.wait()
                self._launched.append(launch())

    def _aside(self) -> AbstractContextManager | None:
        return self._clock.aside() if self._stream is None else torch.cuda.stream(self._stream)
