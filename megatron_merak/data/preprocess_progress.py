"""What a preprocessing run says of its progress on stderr."""

import os
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from ..counting import counted
from .documents import Reached
from .unfinished import Written

TERMINAL_SECONDS = 0.5
LOG_SECONDS = 30.0


class Ahead:
    """The bytes of the files that a run reads, as they are on the disk; none: not known."""

    def __init__(self, files: Sequence[Path]):
        self._ends = [0, *accumulate(os.stat(file).st_size for file in files)]
        self.total = self._ends[-1]

    def before(self, place: Reached) -> int:
        """Return the bytes that are read at a place."""
        return min(self._ends[min(place.file, len(self._ends) - 1)] + place.end, self.total)


class PreprocessProgress:
    """On a terminal one line, rewritten twice a second at most; in a log a line every half minute,
    and the last.
    """

    def __init__(self, name: str, progress: Written, ahead: Ahead):
        self.name = name
        self._progress = progress
        self._ahead = ahead
        self._read_before = progress.read
        self._ahead_before = ahead.before(progress.place)
        self._start = time.monotonic()
        self._shown = self._start

    def resumed(self) -> None:
        """Say that an earlier run did a part."""
        told = f"going on after the {counted(self._progress.documents, 'document')} of an earlier start"
        print(f"{self.name}: {told}", file=sys.stderr, flush=True)

    def update(self) -> None:
        is_terminal = sys.stderr.isatty()
        now = time.monotonic()
        if now - self._shown < (TERMINAL_SECONDS if is_terminal else LOG_SECONDS):
            return
        self._shown = now
        line = self._line(self._left(now))
        if is_terminal:
            print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def done(self) -> None:
        line = self._line("")
        line = f"\r{line}\033[K" if sys.stderr.isatty() else line
        print(line, file=sys.stderr, flush=True)

    def _left(self, now: float) -> str:
        """Say which part is read, and how long the rest takes at the rate so far."""
        read = self._ahead.before(self._progress.place)
        if not self._ahead.total:
            return ""
        share = f", {100 * read / self._ahead.total:.1f}%"
        done = read - self._ahead_before
        if done <= 0:
            return share
        left = (self._ahead.total - read) * (now - self._start) / done
        return f"{share}, {duration(left)} left"

    def _line(self, left: str) -> str:
        megabytes = self._progress.read / 1e6
        rate = (self._progress.read - self._read_before) / 1e6
        rate /= max(time.monotonic() - self._start, 1e-9)
        documents = counted(self._progress.documents, "document")
        return f"{self.name}: {documents}, {megabytes:.1f} MB, {rate:.1f} MB/s{left}"


def duration(seconds: float) -> str:
    """Return hours and minutes, or minutes and seconds, in digits."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"
