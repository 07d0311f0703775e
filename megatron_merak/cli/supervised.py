"""Ranks that outlive each other: started by the launcher of jobs with parameter servers."""

import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..parameter_server.supervisor import Hosts

TRAINING = ("pretrain", "pretrain-hf")


def supervise(ranks: int, command: str, flags: Sequence[str], servers: int) -> int:
    """Run one of TRAINING on this host alone, the last ``servers`` ranks of which only serve; the
    job's exit status.
    """
    from ..parameter_server.supervisor import Hosts

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return supervised(command, flags, Hosts(ranks, port=port), servers)


def supervised(
    script: str, flags: Sequence[str], hosts: "Hosts", servers: int, restarts: int = 3
) -> int:
    """Run one of TRAINING, or a script, on the ranks of ``hosts`` that are here; the exit status of
    the job.
    """
    from ..parallel.position import LAUNCHER, environment
    from ..parallel.process import launcher_place
    from ..parameter_server.supervisor import Supervisor

    start = ["-m", "megatron_merak", script] if script in TRAINING else [script]
    command = [sys.executable, "-u", *start, *flags]
    variables = environment() | {LAUNCHER: launcher_place()}
    return Supervisor(command, variables, hosts, servers, restarts=restarts, say=_say).run()


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)
