"""A line on the terminal that shows the progress of a long search."""

import sys
import time
from typing import TextIO

SEARCHING = "searching a pipeline schedule"
_AFTER = 2.0  # seconds
_EVERY = 0.2


class SearchProgress:
    """Called with the finished share of the work; shows it on a terminal once the work has taken
    some seconds.

    what:   the work, such as "searching a schedule".
    shown:  False: write nothing.
    stream: where to write (default: stderr); nothing is written unless it is a terminal.
    """

    def __init__(self, what: str, stream: TextIO | None = None, shown: bool = True):
        self.what = what
        self.stream = stream or sys.stderr
        self.is_shown = shown and self.stream.isatty()
        self.last = time.monotonic() + _AFTER - _EVERY
        self.length = 0
        self.before = 0
        self.parts = 1

    def part(self, before: int, parts: int) -> None:
        """Declare that what follows is one of so many parts of the work, with so many before it."""
        self.before = before
        self.parts = parts

    def __call__(self, share: float, best: str = "") -> None:
        """Show the finished share, and the best so far in words."""
        share = (self.before + share) / self.parts
        if self.is_shown and time.monotonic() - self.last > _EVERY:
            self.last = time.monotonic()
            self._write(f"{self.what}: {share:.0%}" + (f", {best}" if best else ""))

    def __enter__(self) -> "SearchProgress":
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the line."""
        if self.length:
            self._write("")
            self.stream.write("\r")

    def _write(self, line: str) -> None:
        self.stream.write(f"\r{line.ljust(self.length)}")
        self.stream.flush()
        self.length = len(line)
