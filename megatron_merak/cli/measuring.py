"""What commands have in common that measure a job's hosts with a rank for each of its processes:
merak-preflight and merak-probe.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from ..config.backends import BACKENDS
from ..config.command_line import CommandParser
from ..errors import ConfigError, MerakError
from ..parallel.position import launched, launcher, position, tell
from .launcher import FLAG, start
from .progress import ProgressLine
from .words import described, error_text, program

if TYPE_CHECKING:
    import torch.distributed as dist

    from ..parallel.launch import World
    from ..parallel.nodes import Nodes


class MeasuringRanks(NamedTuple):
    """A rank among those that measure.

    control:  all of them, for agreement on the CPU; None for one rank.
    progress: the line of the first rank that says what is being done.
    """

    world: "World"
    control: "dist.ProcessGroup | None"
    nodes: "Nodes"
    progress: ProgressLine


def measuring_parser(text: str, name: str, backend: str) -> CommandParser:
    """Return a parser with the flags that say which ranks measure, and by which backend.

    text:    what the command does, with examples of ``name``.
    name:    of the command, merak-probe.
    backend: what that is of, in words.
    """
    parser = CommandParser(
        prog=program(),
        description=described(text, name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        FLAG, type=int, metavar="N", help="start this many ranks on this host (default: this one)"
    )
    choices = [each for each in BACKENDS if each != "emu"]
    parser.add_argument(
        "--distributed-backend", default="auto", choices=["auto", *choices], help=backend
    )
    return parser


def measured(
    name: str,
    words: Sequence[str],
    options_of: Callable[[Sequence[str]], argparse.Namespace],
    rank: Callable[[argparse.Namespace], int],
) -> int:
    """Be one rank, or start as many as the flags say; return the exit status.

    name:       of the command, as ``merak-launch`` knows it.
    words:      its flags.
    options_of: reads and checks them.
    rank:       the part of one rank.
    """
    try:
        options = options_of(words)
    except MerakError as error:
        tell(error_text(error))
        return 2
    if options.nproc_per_node is not None:
        return start(options.nproc_per_node, name, words)
    return as_rank(lambda: rank(options))


def check_ranks(ranks: int | None) -> None:
    """Raise ConfigError for a number of ranks that this process cannot start; None: it is one."""
    if ranks is not None and ranks < 1:
        raise ConfigError(FLAG, ranks, "it is below 1", "Use at least 1")
    if ranks is not None and (launched() or position()[1] > 1):
        reason = f"{launcher().name} has already started this process"
        raise ConfigError(FLAG, ranks, reason, "Give the number of ranks to one of them")


def as_rank(work: Callable[[], int]) -> int:
    """Return what the part of one rank returns; end the process, with a line, where it fails."""
    from ..parallel.launch import abandon

    try:
        return work()
    except MerakError as error:
        if error.trace:
            tell(error.trace)
        tell(f"{program()}: {error}", alike=str(error))
    except RuntimeError as error:  # a connection that was lost, which the watchdog would name later
        text = str(error).splitlines()[0]
        tell(f"{program()}: rank {position()[0]}: {text}", alike=text)
    abandon(1)


@contextmanager
def measuring(
    name: str, backend: str, patience: float, use_cpu: bool = False
) -> Iterator[MeasuringRanks]:
    """Join the other ranks, and leave them when all is measured. Collective over all ranks.

    name:     of the progress line.
    backend:  of messages and collectives.
    patience: seconds to wait for ranks that do not come or do not answer.
    use_cpu:  whether GPUs are left alone.
    """
    from datetime import timedelta

    from ..parallel.launch import DEFAULT_TIMEOUT, launch, leave
    from ..parallel.mesh import control_group
    from ..parallel.nodes import find_nodes
    from ..parallel.watchdog import HangLimits

    limits = HangLimits.of_timeout(patience, 60 * DEFAULT_TIMEOUT)
    world = launch(backend, patience / 60, limits=limits, use_cpu=use_cpu)
    progress = ProgressLine(name, world.rank)
    control = control_group(world.size, timedelta(seconds=patience))
    yield MeasuringRanks(world, control, find_nodes(world, control), progress)
    leave(world)
