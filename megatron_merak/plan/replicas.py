"""What replicas share instead of each holding all of it."""

from dataclasses import dataclass

from megatron_merak.config.instances import refused_instances
from megatron_merak.config.parallel import SHARDINGS
from megatron_merak.errors import PlanError
from megatron_merak.plan.parts import Grid

FLAG = "--data-parallel-sharding-strategy"
TWO_PASSES = ("sub-pipeline", "pair")  # overlaps that run two passes in turns


@dataclass(frozen=True)
class Shards:
    """Over how many ranks each part of a parameter's state is sharded; 1: every replica has all of it."""

    optimizer: int = 1
    gradients: int = 1
    parameters: int = 1

    @classmethod
    def of(cls, sharding: str, replicas: int) -> "Shards":
        """``sharding``: one of ``SHARDINGS``, each of which shards one part more than the one before it."""
        parts = SHARDINGS.index(sharding)
        return cls(*(replicas if part < parts else 1 for part in range(3)))


UNSHARDED = Shards()


def check_instances(instances: int, replicas: int, sharding: str) -> None:
    """Raises PlanError where ``replicas`` cannot be divided into ``instances`` that shard, each among its own."""
    if refused := refused_instances(instances, replicas, sharding):
        raise PlanError("sharding_instances", instances, *refused)


def instances_by_node(grid: Grid, ranks_per_node: int) -> int:
    """The fewest instances of which each lies in one node; ``grid.dp`` where no two neighbouring replicas do."""
    for count in range(1, grid.dp):
        if grid.dp % count == 0:
            groups = grid.shard_groups(count)
            if all(ranks[0] // ranks_per_node == ranks[-1] // ranks_per_node for ranks in groups):
                return count
    return grid.dp


def refused_together(sharding: str, replicas: int, overlap: str, paired: bool = False) -> PlanError | None:
    """The error that tells what the runtime cannot do yet under a strategy; None where it can.

    overlap: of tensor-parallel collectives. paired: the schedule runs a forward and a backward together.
    """
    if Shards.of(sharding, replicas).gradients == 1:
        return None
    reason = f"it runs two passes in turns, and {FLAG} {sharding} gathers and reduces one unit of one pass at a time"
    if overlap in TWO_PASSES:
        remedy = f"Use weight-gradient or none, or {FLAG} optim"
        return PlanError("--tp-comm-overlap", overlap, reason, remedy)
    if paired:
        return PlanError("schedule", "(with pairs)", reason, f"Take its pairs apart, or use {FLAG} optim")
    return None
