"""Hangs are named: a thread of every rank notices that ranks wait in vain, says for whom, and ends
the job.

Each rank publishes in the job's store, every second, where it is. A rank that has stood still for a
few seconds reads what the others have published. It blames, in this order:

    a rank that has ended, when all others wait                                     at once
    a rank that is silent: it is stopped, its GIL is held, or its host is gone      after the limit
    a rank that stands still without waiting for another one                        after the limit
    all ranks, where each waits for others                                          after the limit

The limit is that of steps if the blamed rank is in a training step; else, as in a callback, an
evaluation or a save, it is the timeout of collectives, after which the rank that waits would fail
anyway. A rank whose stack changes does not stand still. The first rank that blames writes its
verdict into the store, and every rank prints it and ends.

A thread cannot run while a C function holds the GIL, or while the process is stopped: see
``watcher``.
"""

import contextlib
import faulthandler
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from ..counting import named_ranks
from ..errors import HangError
from .bulletin import ANSWER, Bulletin, Peer
from .places import is_dead, place_of
from .pulse import Pulse
from .stacks import Calls, StackCall, calls_of, shown
from .watcher import examine, is_set

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_TORCH = str(Path(dist.__file__).resolve().parent) + os.sep
_POLLING = str(Path(__file__).with_name("mpi_group.py"))
_WAITING = (".wait(", ".item()", ".tolist()", ".synchronize(", ".cpu()")
_FRAMES = 16  # innermost frames of a stack that is shown
_NAMED = 8  # ranks of which a verdict says where they are
_READERS = 8.0  # seconds for all ranks to print a verdict; a host with too much to do needs some
_TIMEOUT = "--distributed-timeout-minutes (ddp_timeout of MerakArguments)"
# of the timeout of collectives: so much sooner, since their own error would name nobody
_SOONER = 0.05
_SOONER_SECONDS = 10.0  # and at least so much, but half of a short timeout


@dataclass(frozen=True)
class HangLimits:
    """How long a job may stand still, in seconds.

    first:     in the first step, which compiles and captures.
    factor:    in later ones: so many times the longest step.
    least:     in later ones at least.
    elsewhere: outside of steps; also the most in a step.
    poll:      between two looks of the watchdog.
    suspicion: a rank that has stood still for so long reads what others published.
    silence:   a rank that has published nothing for so long, while others look, is silent.
    beside:    age of the process at which its watcher is started.
    """

    first: float = 570.0
    factor: float = 10.0
    least: float = 60.0
    elsewhere: float = 570.0
    poll: float = 1.0
    suspicion: float = 2.0
    silence: float = 10.0
    beside: float = 5.0

    @classmethod
    def of_timeout(cls, seconds: float, default: float) -> "HangLimits":
        """Return the limits of a job.

        seconds: the timeout of its collectives.
        default: what that is unless a user chooses it; one that was chosen holds for steps too.
        """
        most = max(seconds / 2, seconds - max(_SOONER * seconds, _SOONER_SECONDS))
        if seconds == default:
            return cls(first=min(600.0, most), elsewhere=most)
        return cls(first=most, factor=0.0, least=most, elsewhere=most)

    def of_step(self, pulse: Pulse) -> float:
        """Return the limit of the current step."""
        if pulse.steps == 0:
            return self.first
        return min(self.elsewhere, max(self.least, self.factor * pulse.longest))


class Watchdog(threading.Thread):
    """The watchdog of this rank: ``start`` begins, ``farewell`` says that the rank has ended,
    ``stop`` ends.

    rank, size: of the job.
    store:      of the job, without keys of an earlier attempt.
    limits:     how long it may stand still.
    report:     writes (text, text by which reports of one host are compared).
    end:        ends this process at once with a status.
    pulse:      where this rank is.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: dist.Store,
        limits: HangLimits,
        report: Callable[[str, str], object],
        end: Callable[[int], NoReturn],
        pulse: Pulse | None = None,
    ):
        super().__init__(name="megatron_merak watchdog", daemon=True)
        self.rank = rank
        self.size = size
        self.limits = limits
        self.pulse = Pulse() if pulse is None else pulse
        self._report = report
        self._end = end
        self._pid = os.getpid()
        self._bulletin = Bulletin(rank, size, store)
        self._place = place_of(self._pid)
        self._own = _Memory(self.pulse)
        self._ended = ""  # how this rank has ended; empty while it runs
        self._stopped = threading.Event()
        self._still_since = time.monotonic()
        self._seen: tuple[Any, ...] = ()
        self._watcher: _Beside | None = None
        self._poll = limits.poll * max(1.0, size / 1024)
        self._failed = False
        self.obeys = False  # whether this process is about to end by a verdict

    def run(self) -> None:
        self._own.thread = threading.get_native_id()
        began = looked = time.monotonic()
        while not self._stopped.wait(self._poll):
            now = time.monotonic()
            # this process was stopped; what others did meanwhile is unknown
            if now - looked > 5 * self._poll + 5:
                self._forget()
            looked = now
            if self._watcher is None and now - began >= self.limits.beside:
                self._watcher = _Beside(self._own, self.rank, self.limits)
            try:
                self._look()
            except (RuntimeError, ValueError, OSError) as error:
                self._bulletin.forget()  # while the store does not answer, others cannot publish
                if self._ended or self._stopped.is_set() or sys.is_finalizing():
                    return
                self._without_store(error)
            except Exception:  # a fault of ours: whoever goes on without a watchdog should know
                if not self._failed:
                    self._failed = True
                    self._report(
                        f"rank {self.rank}: the watchdog failed, and goes "
                        f"on\n{traceback.format_exc()}",
                        "watchdog",
                    )

    def farewell(self, how: str = "has ended") -> None:
        """Say that this rank has ended: nobody may wait for it any more, and it blames nobody."""
        if os.getpid() != self._pid or self._ended:
            return
        self._ended = how
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            self._bulletin.publish(self._state(0.0))

    def wait_for_all(self, patience: float) -> bool:
        """Wait until every rank has said farewell; False if one ended without it, or was silent for
        so long.

        patience: seconds.
        """
        self._forget()
        answered = time.monotonic()
        while True:
            try:
                peers = self._bulletin.read()
            except (RuntimeError, ValueError, OSError):
                if time.monotonic() - answered > patience:
                    return False
                time.sleep(self.limits.poll)
                continue
            answered = time.monotonic()
            left = [peer for peer in peers.values() if not peer.ended]
            if not left:
                return True
            if any(self._is_gone(peer) or peer.silent > patience for peer in left):
                return False
            time.sleep(self.limits.poll / 4)

    def stop(self) -> None:
        """End the thread, when every rank has said farewell."""
        self.farewell()
        self._stopped.set()
        if self._watcher is not None:
            self._watcher.close()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(2 * self._poll)
        self._bulletin.close()

    def leave_store(self) -> None:
        """Use the job's store no more, behind ``stop``."""
        self._bulletin.leave()

    def gone(self, patience: float = 1.0) -> str | None:
        """Return a line that names the ranks that have ended; None if none has.

        patience: seconds to wait for it: connections are closed before a process has ended.
        """
        end = time.monotonic() + patience
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            while time.monotonic() < end:
                peers = self._bulletin.read()
                gone = [rank for rank, peer in peers.items() if self._is_gone(peer)]
                # Of those, the ones that ended without a farewell are why others did.
                gone = [rank for rank in gone if not peers[rank].ended] or gone
                if gone:
                    return self._verdict(gone, peers)["text"]
                time.sleep(patience / 10)
        return None

    def _look(self) -> None:
        now = time.monotonic()
        calls = self._calls()
        # What differs when the thread has run between two looks, in all likelihood.
        seen = (self.pulse.beats, self.pulse.place(), calls)
        if seen != self._seen:
            self._seen = seen
            self._still_since = now
        still = now - self._still_since
        state = self._state(still, calls)
        if self._watcher is not None:
            limits = f"{self.limits.of_step(self.pulse)} {self.limits.elsewhere}"
            self._watcher.sign_of_life(f"{limits} {_stage(state)}{state['at']}")
        self._bulletin.publish(state)
        if self._bulletin.judged():
            self._obey()
        if self._ended or still < self.limits.suspicion or not (state["in_step"] or state["waits"]):
            return
        verdict = self._judge(state, still)
        if verdict is not None:
            self._bulletin.judge(verdict)
            self._obey(verdict)

    def _state(self, still: float, calls: Calls = ()) -> dict[str, Any]:
        place = self.pulse.place()
        suspicious = still >= self.limits.suspicion
        return {
            "ended": self._ended,
            "at": self.pulse.left if self._ended and self.pulse.left else place.text,
            "in_step": place.in_step,
            "stage": self.pulse.stage,
            "still": still,
            "waits": _waits(calls),
            "stack": shown(calls, _FRAMES) if suspicious else "",
            "place": self._place,
            "memory": self._own.where(),
        }

    def _calls(self) -> Calls:
        """Return where the thread that trains is; where it polls, who polls."""
        calls = calls_of(self.pulse.thread or 0)
        polls = [place for place, call in enumerate(calls) if _polls(call)]
        return calls[polls[-1] :] if polls else calls

    def _forget(self) -> None:
        self._still_since = time.monotonic()
        self._bulletin.forget()

    def _limit(self, in_step: bool) -> float:
        return self.limits.of_step(self.pulse) if in_step else self.limits.elsewhere

    def _is_gone(self, peer: Peer) -> bool:
        return bool(peer.ended) or is_dead(peer.state["place"], self._place)

    def _judge(self, own: dict[str, Any], still: float) -> dict[str, Any] | None:
        """Return the verdict on the ranks for which this one waits in vain; None if it is too early
        to tell.
        """
        peers = self._bulletin.read()
        gone = [rank for rank, peer in peers.items() if self._is_gone(peer)]
        alive = [peer for rank, peer in peers.items() if rank not in gone]
        if gone and own["waits"] and (own["in_step"] or _in_package(self._calls())):
            # A rank that still computes may be what this one waits for: replicas do not end at the
            # same moment.
            if all(peer.state["waits"] and peer.still >= self.limits.suspicion for peer in alive):
                return self._verdict(gone, peers)
        here = Peer(own | {"number": 0}, time.monotonic(), time.monotonic())
        everyone = {rank: peers.get(rank, here) for rank in range(self.size)}
        silent = [rank for rank, peer in peers.items() if peer.silent >= self.limits.silence]
        blamed = silent or [rank for rank, peer in everyone.items() if not peer.state["waits"]]
        blamed = blamed or [*everyone]
        if blamed == [self.rank]:
            return None  # those that wait for it judge
        if all(self._is_in_step(everyone[rank]) for rank in blamed):
            limit = self.limits.of_step(self.pulse)
            stand = min(
                (everyone[rank].still for rank in blamed if rank not in gone), default=still
            )
        else:
            limit = self.limits.elsewhere
            stand = still
        if min(still, stand) < limit:
            return None
        return self._verdict(gone or blamed, everyone, still, own["at"])

    def _verdict(
        self,
        blamed: Sequence[int],
        states: Mapping[int, Peer],
        still: float = 0.0,
        at: str | None = None,
    ) -> dict[str, Any]:
        first = states[blamed[0]]
        at = self.pulse.left or self.pulse.place().text if at is None else at
        what = named_ranks(blamed)
        value = f"{_stage(first.state)}last seen {first.state['at']}"
        stack = first.state["stack"]
        if len(blamed) > 1:
            value = "; ".join(f"{rank} {states[rank].state['at']}" for rank in blamed[:_NAMED])
            value = f"(last seen: {value})"
        waits = f"rank {self.rank} waits {at}"
        waited = f"rank {self.rank} has waited {still:.0f} s {at}"
        if self._is_gone(first):
            how = first.ended or "has ended without a word"
            reason = (
                f"it {how}, and {waits}" if len(blamed) == 1 else f"they have ended, and {waits}"
            )
            remedy = "Look at its exit status and its log; every rank has to make the same calls"
        elif first.silent >= self.limits.silence:
            why, stack = self._examine(first.state)
            reason = f"silent for {first.silent:.0f} s, {why}; {waited}"
            remedy = f"Look at its host and its log, or give more time by {_TIMEOUT}"
        elif not all(state.state["waits"] for state in states.values()):
            reason = f"did not arrive: it has stood still for {first.still:.0f} s, and {waited}"
            remedy = f"Its stack follows; if it may take so long, give more time by {_TIMEOUT}"
        else:
            reason = f"each waits for others, and {waited}"
            remedy = "Ranks have to make the same calls in the same order; a stack follows"
        # One that has said farewell reads too, as long as its process waits for the others.
        dead = [rank for rank, peer in states.items() if is_dead(peer.state["place"], self._place)]
        lost = [
            rank
            for rank, peer in states.items()
            if rank in dead or peer.silent >= self.limits.silence
        ]
        readers = self.size - len(lost)
        return {
            "text": str(HangError(what, value, reason, remedy)),
            "stack": stack,
            "readers": readers,
        }

    def _is_in_step(self, peer: Peer) -> bool:
        """Whether a rank counts as in a step.

        One that has ended does, since nobody waits long for it; a silent one as its memory says, if
        it is of this host.
        """
        if self._is_gone(peer):
            return True
        if peer.silent >= self.limits.silence:
            with contextlib.suppress(OSError), self._memory(peer.state, 3) as flag:
                return is_set(flag)
        return peer.state["in_step"]

    @contextlib.contextmanager
    def _memory(self, state: Mapping[str, Any], index: int) -> Iterator[int]:
        """Yield a file descriptor for an entry of a rank's ``memory``. Raises OSError where it is
        of another host.
        """
        host, pid, _ = state["place"]
        if not host or host != self._place[0]:
            raise OSError("another host")
        file = os.open(f"/proc/{pid}/fd/{state['memory'][index]}", os.O_RDONLY)
        try:
            yield file
        finally:
            os.close(file)

    def _examine(self, state: Mapping[str, Any]) -> tuple[str, str]:
        """Return why a silent rank is so, and its stacks, as far as this host can tell."""
        thread, number = state["memory"][:2]
        with contextlib.suppress(OSError), self._memory(state, 2) as stacks:
            return examine(state["place"][1], thread, number, stacks)
        return "it is stopped, a C function holds the GIL, or its host is lost", ""

    def _obey(self, own: dict[str, Any] | None = None) -> NoReturn:
        """Print the verdict in the store, or ``own`` where it does not come, and end this
        process.
        """
        self.obeys = True
        # connections of ranks that end sooner are closed: no news
        sys.excepthook = lambda *error: None
        verdict = own or {"text": "", "stack": "", "readers": self.size}
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            verdict = self._bulletin.verdict(self.limits.poll / 10)
        self._finish(verdict)

    def _without_store(self, error: Exception) -> None:
        """The store has failed: end this process if it stands still for long."""
        still = time.monotonic() - self._still_since
        place = self.pulse.place()
        limit = self._limit(place.in_step)
        # The next look would come too late, after the error of a collective, which names nobody.
        limit -= min(ANSWER, limit / 5)
        if still < limit or not (place.in_step or _waits(self._calls())):
            return
        reason = (
            f"it does not answer ({str(error).splitlines()[0]}), and rank {self.rank} has "
            "stood still "
        )
        reason += f"for {still:.0f} s {place.text}"
        remedy = "Look at the launcher, or at the host of rank 0"
        text = str(HangError("store", "of the job", reason, remedy))
        self._finish({"text": text, "stack": shown(self._calls(), _FRAMES), "readers": 0})

    def _finish(self, verdict: Mapping[str, Any]) -> NoReturn:
        text = verdict["text"]
        stack = verdict["stack"]
        self._report(f"{text}\n{stack}" if stack else text, text)
        # All ranks should get to print it: a launcher ends the others once one exits.
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            self._bulletin.wait_for_readers(verdict["readers"], _READERS, self._poll / 20)
        if self._watcher is not None:
            self._watcher.close()
        self._end(1)


class _Memory:
    """What other processes of this host read of this one, also while it does not run.

    stacks: a file into which a signal makes this process write its stacks, while the GIL is held
            too.
    flag:   a file with the flag of ``pulse``.
    thread: the thread that the signal is for.
    """

    def __init__(self, pulse: Pulse):
        self.thread = 0
        self.stacks = _file("stacks")
        self.flag = _file("flag")
        os.ftruncate(self.flag, 1)
        pulse.flag = mmap.mmap(self.flag, 1)
        highest = getattr(signal, "SIGRTMAX", None)
        self.number = 0 if highest is None else int(highest) - 3  # nobody uses it
        if self.number:
            faulthandler.register(self.number, file=self.stacks, all_threads=True)

    def where(self) -> list[int]:
        """Return thread, signal and the file descriptors."""
        return [self.thread, self.number, self.stacks, self.flag]


def _file(name: str) -> int:
    """Return the descriptor of a file that nobody else can open by a name: in memory, where the
    system has that.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"megatron_merak {name}")
    descriptor, path = tempfile.mkstemp()
    os.unlink(path)
    return descriptor


class _Beside:
    """The watcher of this process, started as a script without torch."""

    def __init__(self, memory: _Memory, rank: int, limits: HangLimits):
        self._process: subprocess.Popen[bytes] | None = None
        grace = 3 * limits.silence / 2
        script = str(Path(__file__).with_name("watcher.py"))
        arguments = [os.getpid(), *memory.where()]
        command = [
            sys.executable,
            "-I",
            "-S",
            script,
            *map(str, arguments),
            f"rank {rank}",
            str(grace),
        ]
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                bufsize=0,
                pass_fds=[memory.stacks, memory.flag],
            )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)

    def sign_of_life(self, line: str) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):
            if select.select([], [process.stdin], [], 0)[1]:
                os.write(process.stdin.fileno(), f"{line}\n".encode())

    def close(self) -> None:
        process = self._process
        self._process = None
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            process.stdin.close()
            process.wait(1.0)


def running() -> Watchdog | None:
    """Return the watchdog of this process, if it has one."""
    return next((thread for thread in threading.enumerate() if isinstance(thread, Watchdog)), None)


def _stage(state: Mapping[str, Any]) -> str:
    return "" if state["stage"] is None else f"(stage {state['stage']}) "


def _waits(calls: Calls) -> bool:
    """Whether a thread waits for other ranks: in a function of torch.distributed, or where we wait
    for a collective, or for a GPU that may wait for one.
    """
    if not calls:
        return False
    innermost = calls[0]
    if innermost.file.startswith(_TORCH):
        return True
    return innermost.file.startswith(_PACKAGE) and any(
        call in innermost.text() for call in _WAITING
    )


def _polls(call: StackCall) -> bool:
    """Whether a call polls, so that the calls inside of it change while it waits."""
    return call.file == _POLLING and "_engine.wait(" in call.text()


def _in_package(calls: Calls) -> bool:
    return any(call.file.startswith(_PACKAGE) for call in calls)
