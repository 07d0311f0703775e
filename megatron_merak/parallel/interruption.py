"""Signals that ask a job to end, in one that can save first: all ranks stop after the same step.

Ctrl-C, SIGTERM, SIGQUIT and the SIGHUP of a lost terminal end a run; a second one ends it at once.
SIGUSR1 and SIGUSR2 give notice that a time limit is near (``sbatch --signal``): they end the run
alike, and the signal that comes at the limit does not cut short the save that they began.

Signals may reach one rank or all, at different times, so ranks must agree on the step after which
they stop. The collective for that is launched before a step and awaited after it, overlapped with
the step.
"""

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Self

import torch
import torch.distributed as dist

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, *NOTICES)
# a second signal within so many seconds counts as the same one, sent by several processes
GRACE = 1.0
_END = bytes(1)  # no signal's number
_USUAL = (signal.SIG_DFL, signal.default_int_handler)


class Interrupted(SystemExit):
    """A run was interrupted by a signal and has ended properly; a script that does not catch it
    ends without a word.

    number: of the signal.
    text:   message to the user, empty on ranks that do not print it.
    """

    def __init__(self, number: int, text: str = ""):
        super().__init__(number, text)
        self.number = number
        self.text = text
        self.code = self.status

    @property
    def status(self) -> int:
        """The exit status of a process that was ended by the signal."""
        return 128 + self.number


class Interruption:
    """A context that records the first signal of SIGNALS; a second one, more than GRACE seconds
    later, calls ``end``.

    group:  all ranks of the job; None for a single process.
    end:    called with the second signal's number, by a thread, so that it runs even while the main
            thread is blocked.
    active: False where a run cannot save: then signals are handled as before, and nothing is
            exchanged.

    Signals are recorded only if the context is entered in the main thread. Those that this process
    ignores (``nohup``) stay ignored, and those for which somebody has installed a handler stay with
    it. A signal that came too late for ranks to agree on is raised again when the context is left,
    for the previous handler.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, end: Callable[[int], object], active: bool = True
    ):
        self.group = group
        self.end = end
        self.active = active
        self.received = 0  # the first signal that this rank received
        self.agreed = 0  # the signal because of which all ranks stop
        self.kept: list[str] = []  # signals that stay with handlers of others
        self._exchange: tuple[torch.Tensor, dist.Work] | None = None
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._listens = active and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if self._listens:
            handlers = {number: signal.getsignal(number) for number in SIGNALS}
            caught = _caught()
            taken = [number for number in SIGNALS if handlers[number] in _USUAL]
            taken = [
                number
                for number in taken
                if handlers[number] is not signal.SIG_DFL or number not in caught
            ]
            self.kept = [
                number.name
                for number in SIGNALS
                if number not in taken and handlers[number] is not signal.SIG_IGN
            ]
            self._terminals = [number for number in (0, 1, 2) if os.isatty(number)]
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, self._note) for number in taken}
            # A forked child would not end at SIGTERM, and would report its signals as this
            # process's.
            os.register_at_fork(after_in_child=_Restored(self))
            self._watch = threading.Thread(
                target=self._watch_second, name="interruption", daemon=True
            )
            self._watch.start()
        return self

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        if not self._listens:
            return
        self.restore()
        signal.set_wakeup_fd(self._wakeup)
        # forked children may have the pipe, so closing it here does not end the thread
        os.write(self._writer, _END)
        self._watch.join()
        os.close(self._writer)
        os.close(self._reader)
        if self.received and not self.agreed and raised is None:
            signal.raise_signal(self.received)

    def restore(self) -> None:
        """Install the handlers that were there before."""
        while self._before:
            signal.signal(*self._before.popitem())

    def before_step(self) -> None:
        """Launch the exchange of recorded signals. Collective."""
        if self.active and self.group is not None:
            received = torch.tensor([self.received], dtype=torch.int32)
            self._exchange = (
                received,
                dist.all_reduce(received, dist.ReduceOp.MAX, group=self.group, async_op=True),
            )

    def after_step(self) -> int:
        """Return the signal because of which all ranks stop after this step, 0 for none; equal on
        every rank.
        """
        if self._exchange is None:
            self.agreed = self.received
        else:
            received, work = self._exchange
            work.wait()
            self.agreed = int(received)
            self._exchange = None
        return self.agreed

    def stops(self) -> int:
        """Return the signal because of which all ranks stop now, 0 for none; equal on every rank.
        Collective.
        """
        self.before_step()
        return self.after_step()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or number
        if number == signal.SIGHUP:
            self._leave_terminal()

    def _leave_terminal(self) -> None:
        """What is written to a lost terminal is an error, which would end the run before it saves:
        discard it.
        """
        for number in self._terminals:
            if not os.isatty(number):
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, number)
                os.close(nowhere)

    def _watch_second(self) -> None:
        """Read signals in a thread: Python runs handlers only between instructions of the main
        thread.
        """
        first = None
        while (numbers := os.read(self._reader, 1)) != _END:
            if numbers[0] not in SIGNALS or numbers[0] in NOTICES:
                continue
            now = time.monotonic()
            if first is None:
                first = now
            elif now - first > GRACE:
                self.end(numbers[0])


class _Restored:
    """Lets a forked child handle signals as its parent did before an Interruption. It cannot be
    unregistered.
    """

    def __init__(self, interruption: Interruption):
        self._interruption = weakref.ref(interruption)

    def __call__(self) -> None:
        interruption = self._interruption()
        if interruption is not None and interruption._before:
            interruption.restore()
            signal.set_wakeup_fd(-1)


def _caught() -> set[int]:
    """Return the signals that this process handles, also by handlers that Python does not know
    (faulthandler's).
    """
    if sys.platform != "linux":
        return set()
    lines = Path("/proc/self/status").read_text().splitlines()
    mask = int(next(line.split()[1] for line in lines if line.startswith("SigCgt:")), 16)
    return {number for number in SIGNALS if mask >> (number - 1) & 1}
