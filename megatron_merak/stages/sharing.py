"""Which ranks share parameters: stages that are tied, and data-parallel ranks that each keep a part."""

from collections.abc import Hashable, Mapping
from itertools import product
from typing import TypeVar

import torch.distributed as dist

from ..errors import PlanError
from ..parallel.buffers import ExpertShards, ShardedState
from ..parallel.mesh import Mesh, new_groups
from ..plan import Plan

Key = TypeVar("Key", bound=Hashable)

_SHARDINGS = {
    "no_shard": ShardedState.NOTHING,
    "optim": ShardedState.OPTIMIZER,
    "optim_grads": ShardedState.GRADIENTS,
    "optim_grads_params": ShardedState.PARAMETERS,
}


def tie_groups(
    stages_of: Mapping[Key, tuple[int, ...]], plan: Plan, mesh: Mesh
) -> dict[Key, dist.ProcessGroup]:
    """For each parameter that stages on several pipeline ranks use, this rank's process group of
    those ranks.

    Collective over all ranks: each makes all groups in the same order.
    """
    grid = mesh.grid
    ranks_of = {}
    for key, stages in stages_of.items():
        users = {plan.schedule.rank_of(stage) for stage in stages}
        ranks_of[key] = tuple(sorted(users))
    groups = {}
    for ranks in sorted({ranks for ranks in ranks_of.values() if len(ranks) > 1}):
        members = []
        for dp, cp, tp in product(range(grid.dp), range(grid.cp), range(grid.tp)):
            members.append([grid.rank(tp, cp, dp, pp) for pp in ranks])
        group = new_groups(mesh.rank, members, mesh.timeout, "tied")
        if group is not None:
            groups[ranks] = group
    return {
        key: groups[ranks]
        for key, ranks in ranks_of.items()
        if ranks in groups and mesh.pp_rank in ranks
    }


def stages_sharing(
    stages_of: Mapping[Key, tuple[int, ...]], plan: Plan, mesh: Mesh
) -> dict[Key, int]:
    """The parameters that several stages of this rank use, and how many stages."""
    own_stages = plan.stages_of(mesh.pp_rank)
    counts = {}
    for key, stages in stages_of.items():
        own = [stage for stage in stages if stage in own_stages]
        if len(own) > 1:
            counts[key] = len(own)
    return counts


def expert_shards_of(plan: Plan, mesh: Mesh) -> ExpertShards | None:
    """Which of the data-parallel ranks that divide experts, and of those with the same experts, this
    rank is; None where none divide any.

    Raises PlanError if the mesh was built for another number of them.
    """
    made = (1, 1) if mesh.experts is None else (mesh.experts.ranks, mesh.experts.shards)
    if (plan.expert_group, plan.expert_shards) != made:
        reason = "the groups of ranks were made for another number"
        raise PlanError(
            "expert_parallel",
            plan.expert_parallel,
            reason,
            "Build the mesh with the plan's number",
        )
    if mesh.experts is None:
        return None
    divided = mesh.experts.divided
    place, count = mesh.same(experts=True)
    return ExpertShards(divided, mesh.copy_rank % divided, shards=count, shard=place)


def shard_of(plan: Plan, mesh: Mesh) -> tuple[int, int, ShardedState]:
    """Over how many data-parallel ranks a stage is sharded, which of them this rank is, and what is
    sharded.

    Raises PlanError if the mesh was built for another number of instances.
    """
    if plan.sharding_instances != mesh.instances:
        reason = f"the groups of ranks were made for {mesh.instances}"
        raise PlanError(
            "sharding_instances",
            plan.sharding_instances,
            reason,
            "Build the mesh with the plan's number",
        )
    return mesh.shard_ranks, mesh.shard_rank, _SHARDINGS[plan.sharding]
