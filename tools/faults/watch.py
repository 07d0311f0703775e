"""Run a command with one fault in it, and see what becomes of it."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .hook.injected_fault import VARIABLE, Order

HOOK = Path(__file__).resolve().parent / "hook"
_POLL = 0.02  # seconds between two looks
_GRACE = 5.0  # seconds that a command has to end by SIGTERM before it is killed
_RUN = "MERAK_FAULTED_RUN"  # in the environment of everything that a command starts
_ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\):.*?rank\s*:\s*(\d+)", re.DOTALL)
_SUMMARY = re.compile(r"^=+\n.*?Root Cause.*?^=+$", re.DOTALL | re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Outcome:
    """What became of a command.

    came:       whether the fault came.
    ended:      whether the command ended by itself.
    seconds:    from the fault, or from the start where none came, until it ended or was given up.
    status:     its exit status, -N: ended by signal N; None: it was given up.
    lines:      lines that it printed once the fault had come.
    tracebacks: of them.
    named:      whether they name the rank that had the fault.
    output:     all that was printed.
    """

    came: bool
    ended: bool
    seconds: float
    status: int | None
    lines: int
    tracebacks: int
    named: bool
    output: str

    def __str__(self) -> str:
        how = f"ended with status {self.status}" if self.ended else "did not end"
        when = f"{self.seconds:.1f} s {'after the fault' if self.came else 'after its start'}"
        if not self.came:
            return f"{how} {when}: the fault never came"
        named = "is named" if self.named else "is not named"
        traces = f"{self.tracebacks} traceback{'s' * (self.tracebacks != 1)}"
        return f"{how} {when}: {self.lines} lines, {traces}, the rank {named}"

    def json(self) -> str:
        facts = asdict(self)
        del facts["output"]
        return json.dumps(facts)


def run(
    command: Sequence[str],
    order: Order | None,
    limit: float,
    environment: Mapping[str, str] | None = None,
    disk_size: str | None = None,
) -> Outcome:
    """Run a command, with a fault in it; end what is left of it, stopped processes too, before this
    returns.

    command:     and its arguments.
    order:       the fault, with any directory; None: there is none.
    limit:       seconds from the fault, or from the start until it comes, after which it counts as
                 hung.
    environment: of the command; None: this process's.
    disk_size:   mount a file system of so much memory at the order's target, and leave it there.
    """
    with tempfile.TemporaryDirectory(prefix="fault-") as name:
        directory = Path(name)
        variables = dict(os.environ if environment is None else environment)
        variables[_RUN] = name
        if order is not None:
            order = replace(order, directory=name)
            path = variables.get("PYTHONPATH", "")
            variables["PYTHONPATH"] = f"{HOOK}{os.pathsep}{path}" if path else str(HOOK)
            variables[VARIABLE] = json.dumps(asdict(order))
            if disk_size is not None:
                mount(Path(order.target), disk_size)
        return _watched(command, order, limit, variables, directory)


def _watched(
    command: Sequence[str],
    order: Order | None,
    limit: float,
    variables: Mapping[str, str],
    directory: Path,
) -> Outcome:
    log = directory / "output"
    mark = directory / "came-0"
    with log.open("wb") as output:
        start = time.time()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=variables,
            start_new_session=True,
        )
        came = None
        try:
            while process.poll() is None:
                if came is None:
                    came = _came(mark)
                if time.time() - (start if came is None else came[0]) > limit:
                    break
                time.sleep(_POLL)
            end = time.time()
            status = process.poll()
        finally:
            _end(process, f"{_RUN}={directory}")
    since, said_before = came or _came(mark) or (start, 0)
    text = log.read_bytes()
    said = text[said_before:].decode(errors="replace")
    return Outcome(
        came=mark.exists(),
        ended=status is not None,
        seconds=end - since,
        status=status,
        lines=len(said.splitlines()),
        tracebacks=said.count(_TRACEBACK),
        named=order is not None and names(said, order.rank),
        output=text.decode(errors="replace"),
    )


def _came(mark: Path) -> tuple[float, int] | None:
    """Return when a fault came, and how much had been printed then; None: it did not come yet."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is being written
        facts = json.loads(mark.read_text())
        return facts["time"], facts["said"]
    return None


def names(text: str, rank: int) -> bool:
    """Whether an output blames a rank: torchrun as the root cause, or a line of anybody's that is
    not its own.
    """
    cause = _ROOT_CAUSE.search(text)
    if cause is not None and int(cause[1]) == rank:
        return True
    rest = _SUMMARY.sub("", text)
    rest = re.sub(r"^\W*(default)?\W*rank\W?\d+\]:", "", rest, flags=re.MULTILINE | re.IGNORECASE)
    return re.search(rf"\branks?\W{{0,3}}{rank}\b", rest, re.IGNORECASE) is not None


def running(mark: str) -> list[int]:
    """Return the processes that were started with a mark in their environment."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and mark.encode() in Path(f"/proc/{entry}/environ").read_bytes():
                found.append(int(entry))
    return found


def _end(process: subprocess.Popen, mark: str) -> None:
    """End a command and everything that it started."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    deadline = time.monotonic() + _GRACE
    while (left := running(mark)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(_POLL)


def mount(directory: Path, size: str) -> None:
    """Mount a file system in memory, such as one of 8m."""
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)], check=True
    )


def unmount(directory: Path) -> None:
    subprocess.run(["umount", str(directory)], check=True)


@contextlib.contextmanager
def small_disk(directory: Path, size: str) -> Iterator[Path]:
    """A file system in memory while the block runs. Needs root."""
    mount(directory, size)
    try:
        yield directory
    finally:
        unmount(directory)
        shutil.rmtree(directory, ignore_errors=True)
