"""What the first rank says on stderr while a command measures, in one line of a terminal."""

import sys
import time


class ProgressLine:
    """Called with what is being done; on other ranks it says nothing.

    name: what the line begins with.
    """

    def __init__(self, name: str, rank: int):
        self._name = name
        self._first = rank == 0
        self._live = sys.stderr.isatty()
        self._began = time.monotonic()
        self._said = ""

    def __call__(self, text: str) -> None:
        if not self._first:
            return
        seconds = time.monotonic() - self._began
        if self._live:
            sys.stderr.write(f"\r\033[K{self._name} {seconds:3.0f} s: {text}")
            sys.stderr.flush()
        elif (kind := text.partition(",")[0]) != self._said:
            self._said = kind
            sys.stderr.write(f"{self._name} {seconds:3.0f} s: {text}\n")

    def done(self) -> None:
        if self._first and self._live:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
