"""``--nproc-per-node``: ranks on this host without torchrun's command, by its own agent, which says
nothing itself.
"""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import LaunchError

if TYPE_CHECKING:
    from .hosts import HostPlace, Meetings

EMIT = "--emit"  # writes the files of a job instead of starting one
FLAG = "--nproc-per-node"
STANDALONE = "--standalone"  # a job of this host alone
# the agent passes them on, waits for its ranks and ends
_ENDING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)


def without_flag(arguments: Sequence[str]) -> list[str]:
    """A command line without the number of ranks."""
    left = list(arguments)
    rest = []
    while left:
        token = left.pop(0)
        if token == FLAG:
            del left[:1]
        elif not token.startswith(f"{FLAG}="):
            rest.append(token)
    return rest


def start(ranks: int, command: str, arguments: Sequence[str], patience: int | None = None) -> int:
    """Run this command once per rank, and return the exit status: that of the first rank that
    failed, 0 without.

    ranks:     number of ranks.
    command:   its name in ``COMMANDS``.
    arguments: its command line.
    patience:  seconds that ranks have to end after a signal to this process, which is passed on;
               None: torchrun's 30.

    Ranks print their own errors; only for one that a signal has ended this process reports.
    """
    script = [sys.argv[0]] if sys.argv[0].endswith(".py") else ["-m", "megatron_merak", command]
    return run_agent([STANDALONE, f"{FLAG}={ranks}", *script, *without_flag(arguments)], patience)


def run_agent(
    words: Sequence[str], patience: int | None = None, place: "HostPlace | None" = None
) -> int:
    """Run torchrun's agent in this process and return the exit status of its ranks, see ``start``.

    words: torchrun's command line.
    place: of this host among those of the job, which meet again after a failure; None: ``words``
           say it.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    from ..parallel.listening import LOOPBACK, listen, serve_store
    from ..parallel.position import LAUNCHER, pass_to_ranks
    from ..parallel.process import launcher_place

    pass_to_ranks(LAUNCHER, launcher_place())
    # the agent's own words on ranks that have spoken for themselves
    logging.disable(logging.CRITICAL)
    store = None
    notices = _Notices()
    meetings: Sequence[Meetings] = ()
    if STANDALONE in words or (place is not None and not place.port):
        listener = listen(LOOPBACK)
        port = listener.getsockname()[1]
        # the agent opens it by its port; one that it made would listen on all interfaces
        store = serve_store(listener)
    if STANDALONE in words:
        meeting = ["--rdzv-backend=static", f"--master-addr={LOOPBACK}", f"--master-port={port}"]
        words = [*meeting, *(word for word in words if word != STANDALONE)]
    if place is not None:
        from .hosts import register

        if not place.port:
            place = replace(place, port=port)
        name = f"megatron-merak-{id(notices)}"  # torch takes a name once in a process
        meetings = register(name, place, notices.number)
        words = [*place.words(name), *words]
    options = run.parse_args([*words])
    if patience is not None:
        options.shutdown_timeout = patience  # read by versions of torch that let it be chosen
    # What this process ignores (nohup, a script's background job) stays ignored, here and by the
    # ranks.
    handled = [
        name for name in _ENDING if signal.getsignal(signal.Signals[name]) is not signal.SIG_IGN
    ]
    options.signals_to_handle = ",".join(handled)  # likewise
    for number in _NOTICES:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, notices.pass_on)
    try:
        run.run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            with contextlib.suppress(OSError):  # the terminal is lost
                sys.stderr.write(f"rank {rank}: process {failure.pid} was ended by {name}\n")
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    except RendezvousError as error:
        raise _apart(error, place) from error
    finally:
        for each in meetings:
            with contextlib.suppress(SignalException):  # the job has ended already
                each.leave()
        del store
    return 0


def _apart(error: Exception, place: "HostPlace | None") -> LaunchError:
    """What to tell where hosts do not meet."""
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

    where = "" if place is None else f"{place.address}:{place.port}"
    if isinstance(error, RendezvousClosedError):
        reason = "the job has failed on another host as often as --max-restarts allows"
        remedy = "Read that host's output; with --load the next start goes on from the checkpoint"
    elif isinstance(error, RendezvousTimeoutError):
        reason = "not all hosts came in time"
        remedy = "Look for those that did not start, and give all the same --nnodes"
    else:
        reason = "the connection to the host that keeps the rendezvous is lost"
        remedy = "If that host is gone, start the job again on all hosts"
    return LaunchError("rendezvous", where, reason, remedy)


class _Notices:
    """Signals that tell this launcher to let its ranks save and end."""

    def __init__(self) -> None:
        self._number = 0

    def number(self) -> int:
        """The last one that was passed on; 0 without."""
        return self._number

    def pass_on(self, number: int, _frame: object) -> None:
        """Give ranks notice, and wait for them as before; without ranks, end as for other signals."""
        from torch.distributed.elastic.multiprocessing.api import SignalException

        ranks = _ranks_here()
        self._number = number
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if not ranks:
            raise SignalException(
                f"Process {os.getpid()} got signal: {number}", sigval=signal.Signals(number)
            )


def _ranks_here() -> list[int]:
    """Return the processes that the agent has started, each of which leads a session; none where
    that is unknown.
    """
    pid = os.getpid()
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [child for child in map(int, children) if os.getsid(child) == child]
    return []
