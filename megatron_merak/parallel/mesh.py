"""This rank's coordinates in the grid of ranks, and its process groups."""

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from ..plan import Grid
from .clock import Clock, WallClock
from .group_options import group_options
from .mpi_group import NAME as MPI
from .peer_group import NAME as PEER_MEMORY
from .pulse import Pulse

# The axes of each group that every mesh has, and the traffic that it is for.
AXES = ("tp", "dp", "pp", "tp-cp-pp")
USES = ("tp", "dp", "pp", "tp-pp")


@dataclass(frozen=True)
class SampleDivision:
    """How the samples of a step are divided, where other meshes have replicas of the same model.

    replicas: of the model, over which samples are divided.
    first:    index among them of a mesh's first one.
    summed:   number of replicas that a step's gradient is summed over.
    """

    replicas: int
    first: int
    summed: int


@dataclass(frozen=True)
class ContextGroups:
    """Groups of a rank where sequences are divided.

    cp:      context-parallel ranks, over which sequences are divided.
    copies:  ranks with the same weights: cp x dp.
    weights: ranks that have all weights together: tp x pp.
    inner:   neighbours in ``cp`` that exchange heads; None where none do beside a ring.
    outer:   those at the same place of each such group, which are a ring; likewise.
    """

    cp: dist.ProcessGroup | None
    copies: dist.ProcessGroup | None
    weights: dist.ProcessGroup | None
    inner: dist.ProcessGroup | None = None
    outer: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class ExpertGroups:
    """Groups of a rank where several copies of a layer divide its experts.

    ranks:   number of ranks that divide them.
    rank:    index of this rank among these.
    divided: number of copies that divide them, which are neighbours.
    shards:  neighbours among the ranks that shard each expert.
    group:   the ranks that divide them.
    same:    ranks that have the same experts; None: this one alone.
    weights: ranks that have all weights together: ``group`` x pp.
    """

    ranks: int
    rank: int
    divided: int
    shards: int
    group: dist.ProcessGroup | None
    same: dist.ProcessGroup | None
    weights: dist.ProcessGroup | None


@dataclass(frozen=True)
class Mesh:
    """One rank's coordinates and process groups. A group is None where it would contain this rank
    alone.

    tp:              tensor-parallel ranks, over which the weights of a layer are sharded.
    dp:              data-parallel ranks, which have the same parameters and other samples.
    pp:              pipeline-parallel ranks, the stages of one replica.
    model:           all ranks of one replica: tp x cp x pp.
    control:         all ranks, over a backend for CPU tensors; for agreement, never for training
                     data.
    timeout:         of the collectives of these groups and of groups made later; None: torch's
                     default.
    clock:           the time of this rank.
    instances:       number of groups of neighbouring ``dp`` ranks, each of which has a full set of
                     shards.
    instance:        the ranks of this rank's instance; None with one instance.
    replicate_group: the ranks, one per instance, that own the same shards as this one; None with
                     one instance.
    division:        of samples; None: over the replicas of this mesh, as there are no others.
    pulse:           where this rank notes what it does, for the job's watchdog.
    contexts:        groups that context parallelism adds; None without it.
    experts:         groups that are added where copies of a layer divide its experts; None where
                     none do.
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
    instance: dist.ProcessGroup | None = None
    replicate_group: dist.ProcessGroup | None = None
    division: SampleDivision | None = None
    pulse: Pulse = field(default_factory=Pulse)
    contexts: ContextGroups | None = None
    experts: ExpertGroups | None = None

    @property
    def cp(self) -> dist.ProcessGroup | None:
        """Context-parallel ranks, over which sequences are divided."""
        return None if self.contexts is None else self.contexts.cp

    @property
    def copies(self) -> dist.ProcessGroup | None:
        """The ranks that have the same weights, and add up their gradients."""
        return self.dp if self.contexts is None else self.contexts.copies

    @property
    def weights(self) -> dist.ProcessGroup | None:
        """The ranks that have all weights together, each others."""
        return self.model if self.contexts is None else self.contexts.weights

    def sharing(self, experts: bool) -> tuple[int, int]:
        """Return the index of this rank among those that shard a tensor of a layer, and their number.

        experts: whether it has experts that copies of the layer divide.
        """
        if experts:
            assert self.experts is not None, "no copies divide experts"
            return self.experts.rank, self.experts.ranks
        return self.tp_rank, self.grid.tp

    def same(self, experts: bool) -> tuple[int, int]:
        """Return the index of this rank among those that have the same shard of a tensor, and their
        number.

        experts: see `sharing`.
        """
        divided = 1
        if experts:
            assert self.experts is not None, "no copies divide experts"
            divided = self.experts.divided
        return self.copy_rank // divided, self.grid.copies // divided

    def ranks_with_same(self, experts: bool) -> list[int]:
        """Return the ranks that have the same shard of a tensor, ascending. experts: see
        `sharing`.
        """
        members = self.grid.same_weights(self.rank)
        if not experts:
            return members
        assert self.experts is not None, "no copies divide experts"
        divided = self.experts.divided
        return members[self.copy_rank % divided :: divided]

    @property
    def replicas(self) -> int:
        """Number of replicas of the model that samples are divided over."""
        return self.grid.dp if self.division is None else self.division.replicas

    @property
    def summed(self) -> int:
        """Number of replicas that a step's gradient is summed over."""
        return self.grid.dp if self.division is None else self.division.summed

    @property
    def replica(self) -> int:
        """Index of this rank's replica among `replicas`."""
        return self.dp_rank if self.division is None else self.division.first + self.dp_rank

    @property
    def layer_rank(self) -> int:
        """Index of this rank in `layer`."""
        tp, cp, _, _ = self.grid.coordinates(self.rank)
        return cp * self.grid.tp + tp

    @property
    def tp_rank(self) -> int:
        return self.grid.coordinates(self.rank)[0]

    @property
    def cp_rank(self) -> int:
        return self.grid.coordinates(self.rank)[1]

    @property
    def copy_rank(self) -> int:
        """Index of this rank in `copies`."""
        return self.grid.copy_rank(self.rank)

    @property
    def dp_rank(self) -> int:
        return self.grid.coordinates(self.rank)[2]

    @property
    def pp_rank(self) -> int:
        return self.grid.coordinates(self.rank)[3]

    @property
    def shard_ranks(self) -> int:
        """Number of ranks that a sharding strategy shards over."""
        return self.grid.copies // self.instances

    @property
    def shard_rank(self) -> int:
        """Index of this rank in `shard_group`."""
        return self.copy_rank % self.shard_ranks

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks that a sharding strategy shards over, in the order of their shards."""
        return self.copies if self.instances == 1 else self.instance

    def group_of_thread(self) -> dist.ProcessGroup | None:
        """Return a new group of all ranks for a thread, whose collectives are in an order of their
        own; None for one rank. Collective.
        """
        if self.control is None:
            return None
        ranks = dist.get_process_group_ranks(self.control)
        return dist.new_group(ranks, timeout=self.timeout, backend="gloo")

    def peer(self, pp_rank: int) -> int:
        """Return the global rank of a pipeline rank of this replica at the same place in its
        layers.
        """
        tp, cp, dp, _ = self.grid.coordinates(self.rank)
        return self.grid.rank(tp, cp, dp, pp_rank)


def new_groups(
    rank: int,
    members: list[list[int]],
    timeout: timedelta | None,
    use: str,
    backend: str | None = None,
) -> dist.ProcessGroup | None:
    """Make one process group per list of ranks; return that of ``rank``, None where it would
    contain no other rank.

    Every rank of the job must call this with the same lists, of which no two have a rank in common.

    timeout: None is torch's default for new groups, not the job's.
    use:     a key of `TRAFFIC`.
    backend: None is the job's.
    """
    lists = [sorted(ranks) for ranks in members if len(ranks) > 1]
    if not lists:
        return None
    job = dist.get_backend()
    world = dist.group.WORLD
    if (
        backend in (None, job)
        and job == "nccl"
        and world is not None
        and world.bound_device_id is not None
    ):
        return dist.split_group(
            split_ranks=lists, timeout=timeout, pg_options=group_options(use, job, timeout)
        )
    own = None
    for ranks in lists:
        options = group_options(use, backend or job, timeout)
        group = dist.new_group(ranks, timeout=timeout, backend=backend, pg_options=options)
        own = group if rank in ranks else own
    return own


def control_group(world_size: int, timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """Return a group of all ranks of the job, over a backend for CPU tensors; None for one rank.
    Collective.
    """
    if world_size == 1:
        return None
    if dist.get_backend() in ("gloo", "mpi", MPI):
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
    pulse: Pulse | None = None,
    expert_group: int = 1,
    expert_shards: int = 1,
    cp_inner: int = 1,
) -> Mesh:
    """Return the mesh of a rank, with all groups of ``grid``. Collective.

    The default process group must exist unless the grid is a single rank. Where it is an emulated
    one, the control group still uses gloo and takes no modelled time.

    clock:           None is a `WallClock`.
    collectives:     backend of tp, cp and dp, where ranks of one host may share memory, and of pp if
                     it supports point-to-point messages; None is that of the default group.
    control:         None: it is created here.
    instances:       see `Mesh`.
    pulse:           see `Mesh`; None: one that nobody reads.
    expert_group:    see `Plan`, likewise expert_shards and cp_inner.
    """
    clock = clock or WallClock()
    if grid.size == 1:
        return Mesh(grid, rank, device, clock=clock)
    pulse = Pulse() if pulse is None else pulse
    pulse.stage = grid.coordinates(rank)[3] if grid.pp > 1 else None
    transfers = collectives if collectives == PEER_MEMORY else None
    backends = (collectives, collectives, transfers, None)
    tp, dp, pp, model = (
        new_groups(rank, grid.groups(axes), timeout, use, backend=name)
        for axes, use, name in zip(AXES, USES, backends, strict=True)
    )
    control = control or control_group(grid.size, timeout)
    contexts = None
    if grid.cp > 1:
        inner, outer = grid.context_levels(cp_inner) if cp_inner > 1 else ([], [])
        contexts = ContextGroups(
            cp=new_groups(rank, grid.groups("cp"), timeout, "tp", backend=collectives),
            copies=new_groups(rank, grid.groups("cp-dp"), timeout, "dp", backend=collectives),
            weights=new_groups(rank, grid.groups("tp-pp"), timeout, "tp-pp"),
            inner=new_groups(rank, inner, timeout, "tp", backend=collectives),
            outer=new_groups(rank, outer, timeout, "tp", backend=collectives),
        )
    experts = None
    if expert_group > 1:
        experts = _expert_groups(
            grid, rank, expert_group, expert_shards, timeout=timeout, collectives=collectives
        )
    instance = None
    replicas = None
    if instances > 1:
        instance = new_groups(
            rank, grid.shard_groups(instances), timeout, "dp", backend=collectives
        )
        replicas = new_groups(
            rank, grid.replicate_groups(instances), timeout, "dp", backend=collectives
        )
    return Mesh(
        grid,
        rank,
        device,
        tp=tp,
        dp=dp,
        pp=pp,
        model=model,
        control=control,
        timeout=timeout,
        clock=clock,
        instances=instances,
        instance=instance,
        replicate_group=replicas,
        pulse=pulse,
        contexts=contexts,
        experts=experts,
    )


def _expert_groups(
    grid: Grid,
    rank: int,
    ranks: int,
    shards: int,
    timeout: timedelta | None,
    collectives: str | None,
) -> ExpertGroups:
    """Return the groups of a rank of which some of ``ranks`` ranks divide experts, ``shards`` of them
    each. Collective.
    """
    divided = ranks // grid.tp
    together = grid.expert_groups(ranks)
    own = next(members for members in together if rank in members)
    same: dict[tuple[int, int], list[int]] = {}
    replicas: dict[int, list[int]] = {}
    for members in together:
        for place, member in enumerate(members):
            same.setdefault((grid.coordinates(member)[3], place), []).append(member)
            replicas.setdefault(grid.copy_rank(member) // divided, []).append(member)
    return ExpertGroups(
        ranks=ranks,
        rank=own.index(rank),
        divided=divided,
        shards=shards,
        group=new_groups(rank, together, timeout, "tp", backend=collectives),
        same=new_groups(rank, list(same.values()), timeout, "dp", backend=collectives),
        weights=new_groups(rank, list(replicas.values()), timeout, "tp-pp"),
    )
