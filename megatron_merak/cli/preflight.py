"""Let every rank of a job meet every other, before a job does: messages and collectives, matrix
products, clocks, versions, and the directory of checkpoints; and say which host or link is slow.

    merak-preflight --nproc-per-node 8 --save DIRECTORY     eight ranks of this host
    srun -N 4 --ntasks-per-node 8 merak-preflight --save DIRECTORY
    torchrun --nnodes 4 --nproc-per-node 8 ... -m megatron_merak preflight --save DIRECTORY
    merak-launch --nproc-per-node 8 preflight --json FILE

Start it as the job will be started. The exit status is 1 if something is wrong; each finding is a line.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import durable
from ..config.backends import BACKENDS
from ..config.command_line import CommandParser
from ..counting import counted
from ..errors import ConfigError, MerakError
from ..parallel.position import launched, launcher, position, tell
from .door import command
from .launcher import FLAG, start
from .words import described, error_text, program

if TYPE_CHECKING:
    from ..errors import LaunchError
    from ..preflight.findings import Findings

_PATIENCE = 120  # seconds


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog=program(),
        description=described(__doc__ or "", "merak-preflight"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        FLAG, type=int, metavar="N", help="start this many ranks on this host (default: this one)"
    )
    parser.add_argument(
        "--save", default="", metavar="DIRECTORY", help="the directory that a job will save to"
    )
    parser.add_argument("--json", metavar="FILE", help="write all that was measured")
    choices = [name for name in BACKENDS if name != "emu"]
    parser.add_argument(
        "--distributed-backend",
        default="auto",
        choices=["auto", *choices],
        help="backend of the messages and collectives (default: auto, nccl on GPUs, else gloo)",
    )
    parser.add_argument(
        "--timeout",
        type=int,
        default=_PATIENCE,
        metavar="SECONDS",
        help=f"how long to wait for ranks that do not come or do not answer (default: {_PATIENCE})",
    )
    parser.add_argument(
        "--least-bandwidth",
        type=float,
        default=0.05,
        metavar="GB/S",
        help="what a link between hosts has to reach, in either direction (default: 0.05)",
    )
    return parser.parse_args(words)


def _checked(options: argparse.Namespace) -> argparse.Namespace:
    """Return ``options``; raise ConfigError for numbers that cannot be."""
    ranks = options.nproc_per_node
    if ranks is not None and ranks < 1:
        raise ConfigError(FLAG, ranks, "it is below 1", "Use at least 1")
    if ranks is not None and (launched() or position()[1] > 1):
        reason = f"{launcher().name} has already started this process"
        raise ConfigError(FLAG, ranks, reason, "Give the number of ranks to one of them")
    if options.timeout < 1:
        raise ConfigError("--timeout", options.timeout, "it is below 1", "Use at least 1 second")
    if not 0 <= options.least_bandwidth < float("inf"):
        value = options.least_bandwidth
        raise ConfigError("--least-bandwidth", value, "it is no bandwidth", "Use 0 or more")
    return options


class _Progress:
    """What the first rank says on stderr while it goes on, in one line of a terminal."""

    def __init__(self, rank: int):
        self._first = rank == 0
        self._live = sys.stderr.isatty()
        self._began = time.monotonic()
        self._said = ""

    def __call__(self, text: str) -> None:
        if not self._first:
            return
        seconds = time.monotonic() - self._began
        if self._live:
            sys.stderr.write(f"\r\033[Kpreflight {seconds:3.0f} s: {text}")
            sys.stderr.flush()
        elif (kind := text.partition(",")[0]) != self._said:
            self._said = kind
            sys.stderr.write(f"preflight {seconds:3.0f} s: {text}\n")

    def done(self) -> None:
        if self._first and self._live:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run merak-preflight; return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = _checked(_arguments(words))
    except MerakError as error:
        tell(error_text(error))
        return 2
    if options.nproc_per_node is not None:
        return start(options.nproc_per_node, "preflight", words)
    return _rank(options)


def _rank(options: argparse.Namespace) -> int:
    """The part of one rank."""
    from ..parallel.launch import abandon

    try:
        return _looked(options)
    except MerakError as error:
        if error.trace:
            tell(error.trace)
        tell(f"{program()}: {error}", alike=str(error))
    except RuntimeError as error:  # a connection that was lost, which the watchdog would name later
        text = str(error).splitlines()[0]
        tell(f"{program()}: rank {position()[0]}: {text}", alike=text)
    abandon(1)


def _looked(options: argparse.Namespace) -> int:
    from datetime import timedelta

    from ..parallel.launch import DEFAULT_TIMEOUT, launch, leave
    from ..parallel.mesh import control_group
    from ..parallel.nodes import find_nodes
    from ..parallel.watchdog import HangLimits
    from ..preflight.judge import judge
    from ..preflight.look import look

    limits = HangLimits.of_timeout(options.timeout, 60 * DEFAULT_TIMEOUT)
    world = launch(options.distributed_backend, options.timeout / 60, limits=limits)
    progress = _Progress(world.rank)
    control = control_group(world.size, timedelta(seconds=options.timeout))
    nodes = find_nodes(world, control)
    least = options.least_bandwidth * 1e9
    found = look(world, control, nodes, options.save, least_rate=least, say=progress)
    progress.done()
    problems = judge(found, least)
    if world.rank == 0:
        _show(found, problems)
        if options.json:
            _write(found, problems, Path(options.json))
    leave(world)
    return int(bool(problems))


def _show(found: "Findings", problems: "list[LaunchError]") -> None:
    from ..preflight.table import table

    print(table(found))
    print()
    for problem in problems:
        print(problem)
    hosts = counted(len(found.host_names), "host")
    ranks = counted(len(found.ranks), "rank")
    print(
        f"{ranks} on {hosts}: {counted(len(problems), 'problem') if problems else 'nothing is wrong'}"
    )


def _write(found: "Findings", problems: "list[LaunchError]", path: Path) -> None:
    values = found.to_json() | {"problems": [str(problem) for problem in problems]}
    with durable.replaced(path) as file:
        file.write((json.dumps(values, indent=2) + "\n").encode())
