"""The stack of another thread, read without keeping its variables alive.

An object of a thread's frame keeps all its variables alive, also after the function has returned;
torch notices when tensors die, and a capture of a model in another thread then records other
constants. The compiled part reads a stack in one go, while it has the GIL. ``faulthandler`` does so
too, but goes through the list of threads without its lock: Python 3.11 then crashes where a thread
of torch is just making itself known to it.

Without the compiled part frames are held for some microseconds.
"""

import linecache
import sys
from typing import NamedTuple

from .. import _native


class StackCall(NamedTuple):
    """One call of a stack: the file, the line (0 if unknown) and the function that runs."""

    file: str
    line: int
    function: str

    def text(self) -> str:
        """Return the line of code that runs; empty if it cannot be read."""
        return linecache.getline(self.file, self.line).strip() if self.line else ""


Calls = tuple[StackCall, ...]  # the innermost one first


def calls_of(thread: int) -> Calls:
    """Return the calls of a thread of this process, by its identifier; none if it does not
    exist.
    """
    read = getattr(_native.host(), "calls", _calls_of_frames)
    return tuple(StackCall(*call) for call in read(thread))


def _calls_of_frames(thread: int) -> list[tuple[str, int, str]]:
    """What ``_C.calls`` returns."""
    found = []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        found.append((code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return found


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
