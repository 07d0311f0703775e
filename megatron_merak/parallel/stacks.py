"""The stack of another thread, read without touching it.

`sys._current_frames` returns frames, and whoever holds a frame keeps its variables alive when its function has
returned. Tracing goes by what is alive: a capture beside such a look has other operations, or fails. faulthandler only
prints names and lines.
"""

import codecs
import faulthandler
import linecache
import os
import re
from typing import NamedTuple

_LARGEST = 1 << 20  # bytes of a look
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


class Call(NamedTuple):
    """A call in a stack: where it stands, and in which function."""

    file: str
    line: int
    function: str

    def text(self) -> str:
        """Return the line of its code."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        code = self.text()
        return f'  File "{self.file}", line {self.line}, in {self.function}' + f"\n    {code}" * bool(code)


class Stacks:
    """Reads the stacks of this process's threads.

    file: descriptor of a file that nothing else writes to.
    """

    def __init__(self, file: int):
        self._file = file

    def of(self, thread: int | None) -> tuple[Call, ...]:
        """Return the calls of a thread, innermost first; empty where it has ended."""
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        faulthandler.dump_traceback(self._file, all_threads=True)
        return calls(os.pread(self._file, _LARGEST, 0).decode("ascii", "replace"), thread)


def calls(text: str, thread: int | None) -> tuple[Call, ...]:
    """Return the calls of a thread in what faulthandler has printed."""
    for part in text.split("\n\n"):
        head, *lines = part.strip("\n").split("\n")
        found = re.match(r"(?:Current t|T)hread 0x([0-9a-f]+)", head)
        if found is not None and int(found[1], 16) == thread:
            matches = [match for match in map(_FRAME.match, lines) if match is not None]
            return tuple(Call(_name(match[1]), _number(match[2]), match[3]) for match in matches)
    return ()


def _name(text: str) -> str:
    return codecs.decode(text, "unicode_escape") if "\\" in text else text


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
