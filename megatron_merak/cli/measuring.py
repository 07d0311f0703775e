"""What commands have in common that measure a job's hosts with a rank for each of its processes:
merak-preflight and merak-probe.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigError, MerakError
from ..parallel.position import launched, launcher, position, tell
from .launcher import FLAG
from .progress import ProgressLine
from .words import program

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
