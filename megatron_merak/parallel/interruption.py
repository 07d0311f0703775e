"""Ctrl-C and SIGTERM in a job that can save first: noted, agreed on by all ranks, and the second one ends at once.

The signals may come to one rank or to all, at different moments, so ranks have to agree on the step behind which they
stop. The collective for that is launched before a step and read after it: it travels while the step computes.
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
GRACE = 1.0  # seconds in which a signal that comes again is the same one, sent by several


class Interrupted(Exception):
    """A run was interrupted by a signal and has ended in order.

    number: of the signal
    text:   what the user is told, empty on ranks that do not tell it
    """

    def __init__(self, number: int, text: str = ""):
        super().__init__(number, text)
        self.number, self.text = number, text

    @property
    def status(self) -> int:
        """The exit status of a process that a signal has ended."""
        return 128 + self.number


class Interruption:
    """Notes the first signal of SIGNALS while it is entered; a second one, GRACE seconds later, calls ``end``.

    group:  all ranks of the job, None for a process alone
    end:    given the second signal's number, by a thread, so that it is called even while the process waits elsewhere
    active: False where a run cannot save: then signals do what they did before, and nothing is exchanged

    Only the main thread of a process is told of signals; in another thread none is noted. One that came too late to be
    agreed on is sent again when this is left, to whatever handled it before.
    """

    def __init__(self, group: dist.ProcessGroup | None, end: Callable[[int], object], active: bool = True):
        self.group, self.end, self.active = group, end, active
        self.noted = 0  # the first signal that this rank was sent
        self.agreed = 0  # the signal for which all ranks stop
        self._asked: tuple[torch.Tensor, dist.Work] | None = None
        self._listens = active and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if self._listens:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
            self._watch = threading.Thread(target=self._second, name="interruption", daemon=True)
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
        if self.noted and not self.agreed and raised is None:
            signal.raise_signal(self.noted)

    def before_step(self) -> None:
        """Launch the exchange of what ranks noted. Collective."""
        if self.active and self.group is not None:
            noted = torch.tensor([self.noted], dtype=torch.int32)
            self._asked = noted, dist.all_reduce(noted, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def after_step(self) -> int:
        """The signal for which all ranks stop behind this step, 0 for none; alike on every rank."""
        if self._asked is None:
            self.agreed = self.noted
        else:
            noted, work = self._asked
            work.wait()
            self.agreed, self._asked = int(noted), None
        return self.agreed

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.noted = self.noted or number

    def _second(self) -> None:
        """Read the signals as they come: Python's handlers wait for what the main thread does."""
        first = None
        while numbers := os.read(self._reader, 1):
            if numbers[0] not in SIGNALS:
                continue
            now = time.monotonic()
            if first is None:
                first = now
            elif now - first > GRACE:
                self.end(numbers[0])
