"""``--nproc-per-node``: ranks on this host without torchrun's command, by its own agent, which says nothing itself."""

import logging
import signal
import sys
from collections.abc import Sequence

FLAG = "--nproc-per-node"


def without_flag(arguments: Sequence[str]) -> list[str]:
    """A command line without the number of ranks."""
    left, rest = list(arguments), []
    while left:
        token = left.pop(0)
        if token == FLAG:
            del left[:1]
        elif not token.startswith(f"{FLAG}="):
            rest.append(token)
    return rest


def start(ranks: int, command: str, arguments: Sequence[str], patience: int | None = None) -> int:
    """Run this command once per rank, and return the exit status: that of the first rank that failed, 0 without.

    ranks:     number of ranks.
    command:   its name in ``COMMANDS``.
    arguments: its command line.
    patience:  seconds that ranks have to end after a signal to this process, which is passed on; None: torchrun's 30.

    Ranks print their own errors; only for one that a signal has ended this process reports.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from ..parallel.listening import LOOPBACK, listen, serve_store

    logging.disable(logging.CRITICAL)  # the agent's own words on ranks that have spoken for themselves
    script = [sys.argv[0]] if sys.argv[0].endswith(".py") else ["-m", "megatron_merak", command]
    listener = listen(LOOPBACK)
    port = listener.getsockname()[1]
    store = serve_store(listener)  # the agent opens it by its port; one that it made would listen on all interfaces
    meeting = ["--rdzv-backend=static", f"--master-addr={LOOPBACK}", f"--master-port={port}"]
    options = run.parse_args([*meeting, f"{FLAG}={ranks}", *script, *without_flag(arguments)])
    if patience is not None:
        options.shutdown_timeout = patience  # read by versions of torch that let it be chosen
    try:
        run.run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            sys.stderr.write(f"rank {rank}: process {failure.pid} was ended by {name}\n")
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    finally:
        del store
    return 0
