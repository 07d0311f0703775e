"""Ctrl-C and SIGTERM in a job that can save first: all ranks stop after the same step; a second signal ends it now.

Signals may reach one rank or all, at different times, so ranks must agree on the step after which they stop. The
collective for that is launched before a step and awaited after it, overlapped with the step.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE = 1.0  # a second signal within so many seconds counts as the same one, sent by several processes


class Interrupted(Exception):
    """A run was interrupted by a signal and has ended properly.

    number: of the signal.
    text:   message to the user, empty on ranks that do not print it.
    """

    def __init__(self, number: int, text: str = ""):
        super().__init__(number, text)
        self.number, self.text = number, text

    @property
    def status(self) -> int:
        """The exit status of a process that was ended by the signal."""
        return 128 + self.number


class Interruption:
    """A context that records the first signal of SIGNALS; a second one, more than GRACE seconds later, calls ``end``.

    group:  all ranks of the job; None for a single process.
    end:    called with the second signal's number, by a thread, so that it runs even while the main thread is blocked.
    active: False where a run cannot save: then signals are handled as before, and nothing is exchanged.

    Signals are recorded only if the context is entered in the main thread. A signal that came too late for ranks to
    agree on is raised again when the context is left, for the previous handler.
    """

    def __init__(self, group: dist.ProcessGroup | None, end: Callable[[int], object], active: bool = True):
        self.group, self.end, self.active = group, end, active
        self.received = 0  # the first signal that this rank received
        self.agreed = 0  # the signal because of which all ranks stop
        self._exchange: tuple[torch.Tensor, dist.Work] | None = None
        self._listens = active and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if self._listens:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
            self._watch = threading.Thread(target=self._watch_second, name="interruption", daemon=True)
            self._watch.start()
        return self

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        if not self._listens:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._writer)  # ends the thread
        self._watch.join()
        os.close(self._reader)
        if self.received and not self.agreed and raised is None:
            signal.raise_signal(self.received)

    def before_step(self) -> None:
        """Launch the exchange of recorded signals. Collective."""
        if self.active and self.group is not None:
            received = torch.tensor([self.received], dtype=torch.int32)
            self._exchange = received, dist.all_reduce(received, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def after_step(self) -> int:
        """Return the signal because of which all ranks stop after this step, 0 for none; equal on every rank."""
        if self._exchange is None:
            self.agreed = self.received
        else:
            received, work = self._exchange
            work.wait()
            self.agreed, self._exchange = int(received), None
        return self.agreed

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or number

    def _watch_second(self) -> None:
        """Read signals in a thread: Python runs handlers only between instructions of the main thread."""
        first = None
        while numbers := os.read(self._reader, 1):
            if numbers[0] not in SIGNALS:
                continue
            now = time.monotonic()
            if first is None:
                first = now
            elif now - first > GRACE:
                self.end(numbers[0])
