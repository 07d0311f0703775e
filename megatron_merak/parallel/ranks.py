"""All ranks of a job once they have met: how they agree, which hosts they are on, and groups of a
grid of them.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from ..plan import Grid
from .attendance import attend
from .launch import World
from .mesh import Mesh, build_mesh, control_group
from .nodes import Nodes, find_nodes
from .same_software import check_same_software


class Members(Protocol):
    """All ranks of a job and this one among them, as far as agreement needs them: `Ranks`, and a
    `Mesh` of them.

    control: all ranks, for agreement on the CPU; None for one rank.
    """

    @property
    def rank(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def control(self) -> dist.ProcessGroup | None: ...


@dataclass(frozen=True)
class Ranks:
    """All ranks of a job, which run the same software; made by `meet`.

    world:   this rank's place among them.
    control: see `Members`.
    nodes:   their hosts.
    timeout: of collectives, also of groups that are made later.
    """

    world: World
    control: dist.ProcessGroup | None
    nodes: Nodes
    timeout: timedelta

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def device(self) -> torch.device:
        return self.world.device

    def mesh(
        self,
        grid: Grid,
        instances: int = 1,
        expert_group: int = 1,
        expert_shards: int = 1,
        cp_inner: int = 1,
    ) -> Mesh:
        """Return this rank's groups of a grid. Collective.

        instances:    see `Mesh`.
        expert_group: see `Plan`, likewise expert_shards and cp_inner.
        """
        world = self.world
        return build_mesh(
            grid,
            world.rank,
            world.device,
            timeout=self.timeout,
            clock=world.clock,
            collectives=world.collectives,
            control=self.control,
            instances=instances,
            expert_group=expert_group,
            expert_shards=expert_shards,
            cp_inner=cp_inner,
            pulse=world.pulse,
        )


def meet(world: World, timeout: timedelta, call: str | None = None) -> Ranks:
    """Return the ranks of the job when all of them are here. Collective.

    call: what every rank calls, where a script may call something else on some of them.

    Raises LaunchError on every rank unless all run the same software, and ConfigError for different
    calls.
    """
    control = control_group(world.size, timeout)
    if call is not None:
        attend(call, control)
    check_same_software(control, world.device)
    return Ranks(world, control, find_nodes(world, control), timeout)
