"""Processes that load data: they outlast the signals of a job, and none hangs where it is forked.

A rank has threads beside the one that forks. Python before 3.11.10 may fork while one of them holds
the interpreter's list of threads, as one of gloo does for a moment when it releases a tensor; the
child then waits for that list before its first line of Python, and the rank for its batch, without
end (CPython's issue 112275). A signal that reaches the child at that moment ends it.
"""

import contextlib
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext, ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess

from ...errors import DataError
from ...parallel.interruption import SIGNALS

# seconds for a forked process to begin, at each attempt; one that has begun nothing loses nothing
PATIENCE = (5.0, 10.0, 20.0)


def loading_context(method: str | None) -> BaseContext | str | None:
    """Return the ``multiprocessing_context`` of a ``DataLoader``.

    method: how to start processes; None: as this process does.
    """
    usual = multiprocessing.get_start_method(allow_none=True)
    usual = usual or multiprocessing.get_all_start_methods()[0]  # without deciding it
    return _Forks() if (method or usual) == "fork" else method


class _LoadingProcess(ForkProcess):
    """A forked process that says when it outlasts signals, before it does anything else."""

    tells: Connection

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Popen:
        return _Begun(process_obj)

    def run(self) -> None:
        outlast_signals()
        self.tells.send_bytes(b"begun")
        self.tells.close()
        super().run()


class _Begun(Popen):
    """A fork that is repeated until its child has begun."""

    def __init__(self, process_obj: BaseProcess):
        assert isinstance(process_obj, _LoadingProcess)
        for patience in PATIENCE:
            hears, process_obj.tells = multiprocessing.Pipe(duplex=False)
            super().__init__(process_obj)
            process_obj.tells.close()
            with contextlib.suppress(EOFError), hears:
                if hears.poll(patience) and hears.recv_bytes():
                    return
            self.kill()
            self.wait()
            self.close()
        reason = f"{len(PATIENCE)} processes that load data were forked, and none began"
        remedy = "Start them anew: dataloader_multiprocessing_context='spawn'"
        raise DataError("dataloader_num_workers", "(set)", reason, remedy)


class _Forks(ForkContext):
    Process = _LoadingProcess


def outlast_signals(_worker: int = 0) -> None:
    """Let a process that loads data go on when a signal is sent to all processes of a job: its rank
    ends it.

    Else a rank that completes its step would find its workers dead. ``end_workers`` has to be
    called at exit. torch handles SIGTERM again in a process that it starts, so this is also to be
    the ``worker_init_fn`` of a ``DataLoader``.
    """
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setsid()  # out of the group to which terminals and torchrun send signals
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # only the first one
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))


def end_workers() -> None:
    """End the processes that outlast signals; Python's own SIGTERM to them at exit is the first,
    and it would wait.
    """
    for child in multiprocessing.active_children():
        with contextlib.suppress(ProcessLookupError):
            if child.daemon and child.pid is not None and os.getsid(child.pid) == child.pid:
                child.kill()
