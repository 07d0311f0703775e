"""A file of lines that a run appends to, and that must never end the run: a full disk, or a removed
directory.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def _say(text: str) -> None:
    with suppress(OSError):
        sys.stderr.write(text + "\n")


class LineFile:
    """A file, opened to append lines; its directory is created if it does not exist. Raises OSError
    at the start only.

    say: called with a line for the user: once if lines cannot be written, once when they are, and
         if the file is gone.

    Lines that cannot be written are kept in memory, and written before the next one.
    """

    def __init__(self, path: str | Path, say: Callable[[str], object] = _say):
        self.path = Path(path)
        self.say = say
        self._waiting = b""
        self._fails = False
        self._open()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab", buffering=0)

    def write(self, line: str) -> None:
        """Append a line, to which a newline is added."""
        self._waiting += line.encode() + b"\n"
        try:
            self._flush()
        except OSError as error:
            if not self._fails:
                self.say(
                    f"{self.path} cannot be written ({error.strerror}): its lines are kept, and "
                    "written later"
                )
            self._fails = True
            return
        if self._fails:
            self.say(f"{self.path} can be written again, and nothing of it is lost")
        self._fails = False

    def _flush(self) -> None:
        if os.fstat(self._file.fileno()).st_nlink == 0:
            self._file.close()
            self._open()
            self.say(
                f"{self.path} was removed under the run, with the lines in it: it is made anew"
            )
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def close(self) -> None:
        """Close the file; lines that still cannot be written are lost, which is said."""
        try:
            self._flush()
        except OSError as error:
            lost = self._waiting.count(b"\n")
            self.say(
                f"{self.path} cannot be written ({error.strerror}): its last lines are lost, "
                f"{lost} of them"
            )
        self._file.close()
