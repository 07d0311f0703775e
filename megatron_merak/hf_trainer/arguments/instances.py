"""The instances into which replicas are grouped; each instance shards among its own replicas."""

from typing import Any

from ...config import ParallelConfig
from ...config.instances import choices_of_instances, refused_instances
from ...config.rank_order import normal
from ...errors import ConfigError
from ...parallel.mesh import Mesh
from ...parallel.ranks import Ranks
from ...plan import Grid
from ...plan.fit import check_ranks
from ...plan.replicas import instances_by_node
from ...training.plan_file import stored
from . import fsdp, parallelism

NAME = "num_distributed_optimizer_instances"


def grid_of(args: Any) -> Grid:
    """Return the grid of ranks that the degrees in the arguments define."""
    tp = args.tensor_model_parallel_size
    cp = args.context_parallel_size
    pp = args.pipeline_model_parallel_size
    replicas = args.world_size // (tp * cp * pp)
    return Grid(tp=tp, cp=cp, dp=replicas, pp=pp, order=normal(args.rank_order, cp))


def degrees_of(args: Any) -> ParallelConfig:
    """Return the degrees of layers in the arguments."""
    sizes = args.hierarchical_context_parallel_sizes or ()
    return ParallelConfig(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        cp_comm_type=args.cp_comm_type,
        hierarchical_context_parallel_sizes=tuple(map(str, sizes)),
        sequence_parallel=args.sequence_parallel,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        moe_expert_rank_capacity_factor=args.moe_expert_rank_capacity_factor,
        parallel=args.parallel,
    )


def mesh_of(args: Any, ranks: Ranks) -> Mesh:
    """Return a rank's groups of the grid in the arguments. Collective."""
    degrees = degrees_of(args)
    return ranks.mesh(
        grid_of(args),
        instances_of(args),
        degrees.expert_group,
        degrees.expert_shards,
        cp_inner=degrees.cp_inner,
    )


def instances_of(args: Any) -> int:
    """Return ``num_distributed_optimizer_instances``, or what ``parallelism_config`` or ``fsdp``
    implies.

    If ``fsdp`` shards inside nodes, there are as many instances as keep each inside a node. Raises
    ConfigError if replicas cannot be grouped so, or if nothing says what a node is.
    """
    instances = getattr(args, NAME)
    hybrid = fsdp.hybrid_of(args)
    grid = grid_of(args)
    replicate_size = parallelism.instances_of(args)
    if instances is not None and replicate_size not in (None, instances):
        reason = f"parallelism_config has dp_replicate_size {replicate_size}"
        raise ConfigError(NAME, instances, reason, "Set only one of them")
    instances = replicate_size if instances is None else instances
    if instances is not None:
        if type(instances) is not int or instances < 1:
            raise ConfigError(
                NAME, repr(instances), "it counts groups of ranks", "Give a whole number, 1 or more"
            )
        if refused := refused_instances(instances, grid.copies, args.sharding or "no_shard"):
            raise ConfigError(NAME, instances, *refused)
        return instances
    return 1 if hybrid is None or grid.copies == 1 else _by_node(args, hybrid, grid)


def _by_node(args: Any, hybrid: str, grid: Grid) -> int:
    node = args.world.ranks_per_node
    counts = " or ".join(map(str, choices_of_instances(grid.copies)))
    instances = instances_by_node(grid, node) if node else grid.copies
    if instances == grid.copies:
        plain = "full_shard" if hybrid == "hybrid_shard" else "shard_grad_op"
        reason = (
            f"no two adjacent ones of the {grid.copies} data-parallel ranks are in one node of "
            f"{node} ranks"
        )
        reason = (
            reason
            if node
            else "LOCAL_WORLD_SIZE is not set, so nothing says how many ranks a node has"
        )
        remedy = (
            f"Set {NAME}={counts}, or use {plain}"
            if node
            else f"Start ranks by torchrun, or set {NAME}={counts}"
        )
        raise ConfigError(f"fsdp: {hybrid}", repr(args.fsdp), reason, remedy)
    return instances


def check_instances(args: Any) -> None:
    """Raise as ``instances_of`` does, and PlanError for a plan with instances and another number of
    ranks.
    """
    if args.plan is not None and getattr(args, NAME) > 1:
        check_ranks(stored(args.plan), args.world_size)
    instances_of(args)
