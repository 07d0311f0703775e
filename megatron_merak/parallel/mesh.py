"""This process's place in the rank grid, and the process groups that follow from it."""

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from ..plan import Grid
from .clock import Clock, WallClock
from .group_options import group_options
from .peer_group import NAME as PEER_MEMORY

AXES = ("tp", "dp", "pp", "tp-pp")


@dataclass(frozen=True)
class Mesh:
    """One rank's coordinates and groups. A group is None where it would hold this rank alone.

    tp: share a layer. dp: hold the same parameters. pp: hold the stages of one replica. model: tp x pp, one replica.
    instances: groups of neighbouring ``dp`` ranks that shard among themselves; where there are several, inside: the
    ranks of this one, and across: those at the same place of each, which own the same shards.
    control: all ranks, over a backend that moves CPU tensors; for agreement, never for training data.
    timeout: of every collective of these groups and of those made later; None is torch's default. clock: what time it
    is for this rank. workers: of parameter servers, each of which has a grid and groups of its own; this one is number
    ``worker``. steps_together: a step's gradient is the sum of theirs.
    """

    grid: Grid
    rank: int
    device: torch.device
    tp: dist.ProcessGroup | None = None
    dp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None
    model: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    timeout: timedelta | None = None
    clock: Clock = field(default_factory=WallClock)
    instances: int = 1
    inside: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None
    worker: int = 0
    workers: int = 1
    steps_together: bool = True

    @property
    def replicas(self) -> int:
        """How many replicas of the model there are, those of other workers included."""
        return self.grid.dp * self.workers

    @property
    def summed(self) -> int:
        """How many of them a step's gradient comes from."""
        return self.replicas if self.steps_together else self.grid.dp

    @property
    def replica(self) -> int:
        """Which of them this rank belongs to."""
        return self.worker * self.grid.dp + self.dp_rank

    @property
    def tp_rank(self) -> int:
        return self.grid.coordinates(self.rank)[0]

    @property
    def dp_rank(self) -> int:
        return self.grid.coordinates(self.rank)[2]

    @property
    def pp_rank(self) -> int:
        return self.grid.coordinates(self.rank)[3]

    @property
    def shard_ranks(self) -> int:
        """How many ranks share what a sharding strategy shards."""
        return self.grid.dp // self.instances

    @property
    def shard_rank(self) -> int:
        """Which of them this one is."""
        return self.dp_rank % self.shard_ranks

    @property
    def sharing(self) -> dist.ProcessGroup | None:
        """The ranks that share, in the order of their shards."""
        return self.dp if self.instances == 1 else self.inside

    def peer(self, pp_rank: int) -> int:
        """The global rank of another pipeline rank of this replica, at the same tensor-parallel place."""
        tp, cp, dp, _ = self.grid.coordinates(self.rank)
        return self.grid.rank(tp, cp, dp, pp_rank)


def new_groups(
    rank: int, members: list[list[int]], timeout: timedelta | None, use: str, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Make one group per list of ranks; return the one that holds ``rank``, None where it holds no other rank.

    Every rank of the job calls this with the same lists, of which no two share a rank. torch gives a new group its own
    default ``timeout``, not the job's. ``use``: a key of `TRAFFIC`. ``backend``: None is the job's.
    """
    lists = [sorted(ranks) for ranks in members if len(ranks) > 1]
    if not lists:
        return None
    job = dist.get_backend()
    if backend in (None, job) and job == "nccl" and dist.group.WORLD.bound_device_id is not None:
        return dist.split_group(split_ranks=lists, timeout=timeout, pg_options=group_options(use, job, timeout))
    mine = None
    for ranks in lists:
        options = group_options(use, backend or job, timeout)
        group = dist.new_group(ranks, timeout=timeout, backend=backend, pg_options=options)
        mine = group if rank in ranks else mine
    return mine


def control_group(world_size: int, timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """All ranks of the job, over a backend that moves CPU tensors; None for one rank. Collective."""
    if world_size == 1:
        return None
    if dist.get_backend() in ("gloo", "mpi"):
        return dist.group.WORLD
    return dist.new_group(backend="gloo", timeout=timeout)


def build_mesh(
    grid: Grid,
    rank: int,
    device: torch.device,
    timeout: timedelta | None = None,
    clock: Clock | None = None,
    collectives: str | None = None,
    control: dist.ProcessGroup | None = None,
    instances: int = 1,
) -> Mesh:
    """All groups of ``grid``; the default process group must exist unless the grid is a single rank.

    Where that is an emulated one, agreement still goes by gloo and takes no modelled time. ``clock``: the world's.
    ``collectives``: backend of tp and dp, where ranks of one host may share memory, and of pp where it has a way for
    messages too; None is the default group's. ``control``: made unless it is given. ``instances``: see `Mesh`.
    """
    clock = clock or WallClock()
    if grid.size == 1:
        return Mesh(grid, rank, device, clock=clock)
    transfers = collectives if collectives == PEER_MEMORY else None
    backends = (collectives, collectives, transfers, None)
    tp, dp, pp, model = (
        new_groups(rank, grid.groups(axis), timeout, axis, name) for axis, name in zip(AXES, backends, strict=True)
    )
    control = control or control_group(grid.size, timeout)
    groups = (grid.shard_groups(instances), grid.twin_groups(instances)) if instances > 1 else ()
    more = [new_groups(rank, members, timeout, "dp", collectives) for members in groups]
    return Mesh(grid, rank, device, tp, dp, pp, model, control, timeout, clock, instances, *more)
