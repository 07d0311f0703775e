"""What replicas shard instead of each having all of it."""

from dataclasses import dataclass

from megatron_merak.config.checks import refused_experts
from megatron_merak.config.instances import refused_instances
from megatron_merak.config.parallel import SHARDINGS
from megatron_merak.errors import PlanError
from megatron_merak.plan.parts import Grid

FLAG = "--data-parallel-sharding-strategy"
TWO_PASSES = ("sub-pipeline", "pair")  # overlaps that run two passes in turns


@dataclass(frozen=True)
class Shards:
    """Number of ranks over which each part of a parameter's state is sharded; 1: every replica has
    all of it.

    on_host: whether all parts are in host memory.
    """

    optimizer: int = 1
    gradients: int = 1
    parameters: int = 1
    on_host: bool = False

    @classmethod
    def of(cls, sharding: str, replicas: int, on_host: bool = False) -> "Shards":
        """Return the shards of a strategy. sharding: one of ``SHARDINGS``, each of which shards one
        part more than the one before.
        """
        parts = SHARDINGS.index(sharding)
        counts = [replicas if part < parts else 1 for part in range(3)]
        return cls(counts[0], counts[1], counts[2], on_host)

    @property
    def brings_gradients(self) -> bool:
        """Whether full gradients of a unit exist only while its backward runs."""
        return self.gradients > 1 or self.on_host

    @property
    def brings_parameters(self) -> bool:
        """Whether full weights of a unit exist only while it computes."""
        return self.parameters > 1 or self.on_host


UNSHARDED = Shards()


def check_instances(instances: int, replicas: int, sharding: str) -> None:
    """Raise PlanError if ``replicas`` cannot be grouped into ``instances`` that shard among their
    own.
    """
    if refused := refused_instances(instances, replicas, sharding):
        raise PlanError("sharding_instances", instances, *refused)


def check_experts(
    experts: int, shards: int, room: float | None, grid: Grid, instances: int
) -> None:
    """Raise PlanError if ranks of a grid cannot divide the experts of a layer into so many parts, and
    each into so many shards, or have no room for rows.
    """
    if room is not None:
        if room < 1:
            raise PlanError("expert_room", room, "it is below 1", "Use 1 or more, or null")
        if experts * shards == 1:
            raise PlanError("expert_room", room, "no ranks divide experts", "Use null")
    if shards < 1:
        raise PlanError("expert_shards", shards, "it is below 1", "Use 1 or more")
    if refused := refused_experts(experts, grid.tp, grid.copies, shards):
        if experts == 1:
            raise PlanError("expert_shards", shards, *refused)
        raise PlanError("expert_parallel", experts, *refused)
    if experts * shards > grid.tp and instances > 1:
        reason = (
            f"{experts * shards} ranks divide experts, over copies of a layer that instances are "
            "made of"
        )
        raise PlanError("sharding_instances", instances, reason, "Use 1")


def instances_by_node(grid: Grid, ranks_per_node: int) -> int:
    """Return the fewest instances that are each inside one node; ``grid.copies`` if no two neighbours
    are.
    """
    for count in range(1, grid.copies):
        if grid.copies % count == 0:
            groups = grid.shard_groups(count)
            if all(ranks[0] // ranks_per_node == ranks[-1] // ranks_per_node for ranks in groups):
                return count
    return grid.copies


def refused_together(
    sharding: str, replicas: int, overlap: str, paired: bool = False, on_host: bool = False
) -> PlanError | None:
    """Return the error for what the runtime does not support under a strategy; None if it does.

    overlap: of tensor-parallel collectives.
    paired:  whether the schedule runs a forward and a backward together.
    on_host: whether model states are in host memory.
    """
    if not Shards.of(sharding, replicas, on_host).brings_gradients:
        return None
    reason = (
        f"it runs two passes in turns, and {FLAG} {sharding} gathers and reduces one unit "
        "of one pass at a time"
    )
    if overlap in TWO_PASSES:
        remedy = f"Use weight-gradient or none, or {FLAG} optim"
        return PlanError("--tp-comm-overlap", overlap, reason, remedy)
    if paired:
        return PlanError(
            "schedule", "(with pairs)", reason, f"Take its pairs apart, or use {FLAG} optim"
        )
    return None
