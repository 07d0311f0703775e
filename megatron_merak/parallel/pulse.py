"""What this rank is doing, noted by the thread that trains: attributes only, so a note takes a
tenth of a microsecond.

The watchdog reads the notes from its own thread and puts them into words (``F3@1 of step 40,
all-reduce 17``).
"""

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..pipeline_parallel.ops import Op
from .in_flight import Work


class Place(NamedTuple):
    """Where a rank is.

    text:    in words, with a preposition.
    in_step: whether it computes a training step, and nothing that may take long by nature.
    """

    text: str
    in_step: bool


class TimedWork:
    """A work whose waits are added up in a pulse."""

    def __init__(self, work: Work, pulse: "Pulse"):
        self._work = work
        self._pulse = pulse

    def wait(self) -> None:
        now = self._pulse.timer
        assert now is not None
        began = now()
        self._work.wait()
        self._pulse.waited += now() - began


class Pulse:
    """Notes of one rank. One thread writes them; reading is safe from any thread.

    beats:       grows with every note.
    op:          what runs: an op of the schedule, ops that run together, or a text.
    collectives: number of tensor-parallel collectives launched in this step; ``collective`` is the
                 last one's kind.
    step:        the current or the last step, from 1; 0 before the first.
    steps:       number of steps that are complete.
    longest:     seconds of the longest step, without what a script does between its backward and
                 its update.
    aside:       work of any length that a step may contain, such as a capture; empty for none.
    stage:       of this rank in a pipeline; None without one.
    thread:      the thread that trains.
    left:        where it was when an exception ended its last step; empty if none did.
    timer:       the clock by which `timed` works add up how long they are waited for; None: they
                 do not.
    waited:      that time so far, in seconds. Waits do not block the host of a GPU.
    flag:        one byte, 1 where `place` is in a step. The watchdog puts it into memory that other
                 processes read: what it publishes itself is old once this process no longer runs.
    """

    def __init__(self) -> None:
        self.beats = self.collectives = self.step = self.steps = 0
        self.op: Op | tuple[Op, ...] | str = ""
        self.collective = ""
        self.longest = 0.0
        self.aside = ""
        self.left = ""
        self.timer: Callable[[], float] | None = None
        self.waited = 0.0
        self.flag: bytearray | mmap.mmap = bytearray(1)
        self.stage: int | None = None
        self.thread = threading.main_thread().ident
        self._depth = 0
        self._spent = 0.0

    def at(self, op: Op | tuple[Op, ...] | str) -> None:
        """Note what runs now."""
        self.op = op
        self.beats += 1

    def launched(self, kind: str) -> None:
        """Note that a tensor-parallel collective was launched."""
        self.collective = kind
        self.collectives += 1
        self.beats += 1

    def timed(self, work: Work) -> Work:
        """Return a work whose waits are added up, if that is asked for."""
        return work if self.timer is None else TimedWork(work, self)

    @contextmanager
    def in_step(self, number: int, completes: bool = False) -> Iterator[None]:
        """Note that a part of training step ``number`` runs meanwhile; it may be entered within
        itself.

        completes: the step is complete at the end.
        """
        self._depth += 1
        if number != self.step:
            self.step = number
            self.collectives = 0
            self._spent = 0.0
        if self._depth > 1:
            try:
                yield
            finally:
                self._depth -= 1
            return
        self.thread = threading.get_ident()
        self.left = ""
        began = time.monotonic()
        self._mark()
        try:
            yield
            self._spent += time.monotonic() - began
            if completes:
                self.longest = max(self.longest, self._spent)
                self.steps += 1
        except BaseException:
            self.left = self.place().text
            raise
        finally:
            self._depth -= 1
            self.op = ""
            self._mark()

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Note that work runs meanwhile whose length says nothing about that of steps."""
        before = self.aside
        self.aside = text
        self._mark()
        try:
            yield
        finally:
            self.aside = before
            self._mark()

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Forget afterwards the steps that ran meanwhile: they are none of the run's."""
        step = self.step
        steps = self.steps
        longest = self.longest
        stage = self.stage
        try:
            yield
        finally:
            self.step = step
            self.steps = steps
            self.longest = longest
            self.stage = stage
            self.left = ""

    def _mark(self) -> None:
        self.beats += 1
        self.flag[0] = self._depth > 0 and not self.aside

    def place(self) -> Place:
        """Return where this rank is."""
        in_step = self._depth > 0
        op = _words(self.op)
        if in_step:
            where = f"in {op} of step {self.step}" if op else f"in step {self.step}"
            if self.collectives:
                where += f", {self.collective} {self.collectives}"
        elif op:
            where = f"in {op} outside of training steps"
        else:
            where = f"after step {self.step}" if self.step else "before the first step"
        if self.aside:
            where = f"{self.aside} {where}"
        return Place(where, in_step and not self.aside)


def _words(op: Op | tuple[Op, ...] | str) -> str:
    if isinstance(op, str):
        return op
    ops = (op,) if isinstance(op, Op) else op
    return "|".join(f"{each.kind.value}{each.microbatch}@{each.stage}" for each in ops)
