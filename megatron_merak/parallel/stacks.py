"""The stack of another thread, read without touching its frames.

``sys._current_frames`` makes objects of a thread's frames. Whoever holds one keeps all its
variables alive, also after the function has returned; torch notices when tensors die, and a capture
of a model in another thread then records other constants. ``faulthandler`` reads the interpreter's
own memory instead, in one go while it holds the GIL.
"""

import faulthandler
import linecache
import os
import re
from typing import NamedTuple

_LINE = re.compile(r'  File "(.*)", line (\d+|\?+) in (.*)')
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


class StackCall(NamedTuple):
    """One call of a stack: the file, the line (0 if unknown) and the function that runs."""

    file: str
    line: int
    function: str

    def text(self) -> str:
        """Return the line of code that runs; empty if it cannot be read."""
        return linecache.getline(self.file, self.line).strip() if self.line else ""


Calls = tuple[StackCall, ...]  # the innermost one first


def calls_of(thread: int, file: int) -> Calls:
    """Return the calls of a thread of this process; none where it has over a hundred newer ones.

    thread: its identifier.
    file:   descriptor of a file of the caller's, which is overwritten.
    """
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)
    faulthandler.dump_traceback(file, all_threads=True)
    text = os.pread(file, 1 << 20, 0).decode("ascii", errors="replace")
    for each in text.split("\n\n"):
        heading, _, body = each.partition("\n")
        if re.search(rf"hread 0x0*{thread:x} ", heading):
            found = (_LINE.fullmatch(line) for line in body.splitlines())
            return tuple(_call(match) for match in found if match)
    return ()


def shown(calls: Calls, most: int) -> str:
    """Return calls as a traceback does: the innermost one last, each with its line of code.

    most: number of innermost calls that are shown.
    """
    lines = []
    for call in reversed(calls[:most]):
        lines.append(f'  File "{call.file}", line {call.line}, in {call.function}')
        if text := call.text():
            lines.append(f"    {text}")
    return "\n".join(lines)


def _call(match: re.Match[str]) -> StackCall:
    file, line, function = match.groups()
    return StackCall(_unescaped(file), int(line) if line.isdigit() else 0, _unescaped(function))


def _unescaped(text: str) -> str:
    """Return a text as it was before faulthandler escaped what is not ASCII."""
    return _ESCAPED.sub(lambda match: chr(int(next(filter(None, match.groups())), 16)), text)
