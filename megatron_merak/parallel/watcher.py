"""A small process beside a rank: it reports and ends the rank when no Python code of it runs any
more.

That is so while a C function holds the GIL, and while the process is stopped; then the watchdog, a
thread of the rank, cannot run either. Started by the watchdog as a script of its own, without the
package and without torch:

    python -I -S watcher.py PID THREAD SIGNAL STACKS FLAG RANK GRACE

PID, THREAD: the rank's process, and the thread of it that gets the signal (not the training thread,
             whose system calls a signal would interrupt).
SIGNAL:      makes the rank write all its stacks into the file descriptor STACKS, without needing
             the GIL; 0: none.
FLAG:        the file descriptor of a byte that is 1 while the rank is in a training step.
RANK:        in words.
GRACE:       seconds between the report and the end, in which other ranks report too.

Every line that it reads from its standard input is a sign of life: how many seconds may pass until
the next one in a step and elsewhere, and where the rank is. It ends with its input, that is with
the rank.
"""

import os
import select
import signal
import sys
import time

_LOOK = 0.25  # seconds between two looks
_PAUSE = 5.0  # a look that comes so late means that this process did not run either
_PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_WRITES = 2.0  # seconds for the rank to write its stacks


def main(arguments: list[str]) -> None:
    pid, thread, number, stacks, flag = map(int, arguments[:5])
    rank = arguments[5]
    grace = float(arguments[6])
    # to all processes of a terminal or a launcher; the rank decides when this one ends
    for each in _PASSED_ON:
        signal.signal(each, signal.SIG_IGN)
    parent = os.getppid()
    limits: tuple[float, float] | None = None
    where = ""
    heard = looked = time.monotonic()
    text = b""
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], _LOOK)
        now = time.monotonic()
        if now - looked > _PAUSE:  # the whole job was stopped, as by Ctrl-Z
            heard = now
        looked = now
        if readable:
            read = os.read(0, 65536)
            if not read:
                return
            *lines, text = (text + read).split(b"\n")
            if lines:
                in_step, elsewhere, where = lines[-1].decode(errors="replace").split(" ", 2)
                limits = (float(in_step), float(elsewhere))
                heard = now
        elif limits is not None and now - heard > limits[0 if is_set(flag) else 1]:
            _report(pid, thread, number, stacks, f"{rank} {where}", now - heard)
            if not select.select([0], [], [], grace)[0]:
                os.kill(pid, signal.SIGKILL)
                return
            heard = time.monotonic()  # it goes on, or it has ended


def is_set(flag: int) -> bool:
    """Whether the byte of a file descriptor is 1."""
    return os.pread(flag, 1, 0) == b"\1"


def _report(pid: int, thread: int, number: int, stacks: int, rank: str, silent: float) -> None:
    reason, stack = examine(pid, thread, number, stacks)
    line = f"{rank}: silent for {silent:.0f} s, {reason}. It is ended; its stack follows."
    sys.stderr.write(f"{line}\n{stack}\n")
    sys.stderr.flush()


def examine(pid: int, thread: int, number: int, stacks: int) -> tuple[str, str]:
    """Return why a silent process of this host is so, and its stacks. See above for the
    arguments.
    """
    if _state(pid) in "Tt":
        return "it is stopped (SIGSTOP, or a debugger)", "no stack: it is stopped"
    stack = _stacks(pid, thread, number, stacks) or "no stack: it does not write one"
    return "none of its Python code runs (a C function holds the GIL)", stack


def _state(pid: int) -> str:
    """Return the letter by which the kernel calls what a process does; a question mark where there
    is none.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"


def _stacks(pid: int, thread: int, number: int, stacks: int) -> str:
    if not number:
        return ""
    size = os.fstat(stacks).st_size
    try:
        import ctypes

        ctypes.CDLL(None).tgkill(pid, thread, number)
    except (ImportError, AttributeError, OSError):
        os.kill(pid, number)
    start = size
    end = time.monotonic() + _WRITES
    while time.monotonic() < end:
        time.sleep(_LOOK)
        before = size
        size = os.fstat(stacks).st_size
        if size > start and size == before:
            break
    text = os.pread(stacks, 1 << 20, start).decode(errors="replace").rstrip()
    # The thread that wrote them is the watchdog's own.
    threads = text.split("\n\n")
    return "\n\n".join(
        [each for each in threads if not each.startswith("Current thread")] or threads
    )


if __name__ == "__main__":
    main(sys.argv[1:])
