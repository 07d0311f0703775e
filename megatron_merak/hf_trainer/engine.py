"""Build the engine of a ``MerakTrainer`` from its arguments: capture and plan the model, fill this
rank's shards.
"""

import math
from dataclasses import fields, replace
from typing import Any

from torch import nn

from ..config import OptimizerConfig, ParallelConfig
from ..errors import ConfigError
from ..optimizer.recipe import Recipe
from ..optimizer.torch_optimizer import check_layout, check_on_host
from ..parallel.agree import together
from ..parallel.mesh import Mesh
from ..parallel.nodes import located
from ..parallel.ranks import Ranks
from ..pipeline_parallel.search.progress import SEARCHING, SearchProgress
from ..planner.request import Request
from ..stages.blueprint import blueprint_from_plan, make_blueprint
from ..stages.captured import CapturedModel
from ..stages.devices import cluster_of
from ..stages.optimizer_state import adamw_of, torch_optimizer_of
from ..stages.precision import compute_dtype
from ..stages.traced import Batch, OwnLoss, Traced
from .arguments import deepspeed
from .arguments.instances import degrees_of, grid_of, instances_of
from .arguments.merak_arguments import MerakArguments
from .arguments.optimizers import adam_of
from .arguments.plan_arguments import plan_of_arguments
from .arguments.shared import SHARED


def wishes(args: MerakArguments) -> dict[str, Any]:
    """Return what arguments request: of a plan, of the optimizer, and the rest."""
    effective = {
        "recompute_granularity": args.recompute_granularity,
        "data_parallel_sharding_strategy": args.sharding,
        "offload_model_states": args.offloads_model_states,
        "num_distributed_optimizer_instances": instances_of(args),
        "hierarchical_context_parallel_sizes": degrees_of(args).hierarchical_context_parallel_sizes,
    }
    names = [row.name for row in fields(ParallelConfig) if row.name in SHARED]
    parallel = ParallelConfig(**{name: getattr(args, name) for name in names} | effective)
    optimizer = replace(
        args.moments,
        lr=args.learning_rate or None,
        weight_decay=args.weight_decay,
        clip_grad=0.0 if math.isinf(args.max_grad_norm) else args.max_grad_norm,
        adam_eps=args.adam_epsilon,
    )
    request = Request(
        parallel=parallel,
        replicas=grid_of(args).dp,
        microbatches=args.gradient_accumulation_steps,
        fp8=args.precision.fp8,
        graph_sharding=args.graph_sharding,
        rules=args.tensor_parallel_rules or "",
    )
    others = {
        name: getattr(args, name)
        for name in ("optim", "optim_args", "seed", "bf16", "fp16", "replica_check_interval")
    }
    cluster = cluster_of(args.world, args.device_profile)
    return others | {
        "request": request,
        "cluster": cluster,
        "plan file": args.plan,
        "optimizer": optimizer,
    }


def state_bytes_of(optimizer: OptimizerConfig, recipe: Recipe) -> float:
    """Return the bytes of state of a parameter on average, of ``recipe`` stored as ``optimizer``
    says. Raises ConfigError where it says how to store moments of another optimizer than AdamW.
    """
    if not optimizer.use_precision_aware_optimizer:
        return recipe.state_bytes
    if adam_of(recipe) is None:
        reason = f"its types are of the moments of AdamW, and {recipe.name} is another optimizer"
        remedy = "Leave it out, or use adamw_torch without amsgrad and with one pair of betas"
        raise ConfigError("use_precision_aware_optimizer", True, reason, remedy)
    return optimizer.state_bytes


def build_engine(
    model: nn.Module,
    example: Batch,
    args: MerakArguments,
    ranks: Ranks,
    mesh: Mesh,
    recipe: Recipe,
    loss: OwnLoss | None = None,
) -> CapturedModel:
    """Capture the model, follow the plan of the arguments or make one, and fill this rank's shards.
    Collective.

    ranks:  all ranks of the job.
    mesh:   their groups.
    recipe: which optimizer steps which parameter.
    """
    requested = wishes(args)
    adam = adam_of(recipe)
    state_bytes = state_bytes_of(requested["optimizer"], recipe)
    request = replace(requested["request"], state_bytes=state_bytes)
    check_layout(recipe, mesh.grid.tp * mesh.grid.pp, request.parallel.sharding != "no_shard")
    if request.parallel.offload_model_states:
        check_on_host(recipe, mesh.grid.tp * mesh.grid.copies)
    cluster = located(requested["cluster"], ranks.nodes)
    traced = Traced(
        model,
        example,
        compute_dtype(model, args.bf16, args.fp16),
        args.bf16 or args.fp16,
        ranks=ranks,
        loss=loss,
    )
    with together(ranks.control, "cpu"):
        stored = plan_of_arguments(args, traced.dtype, cluster, ranks.rank)
        state_of = recipe.state_of if adam is None else None
        if stored is None:
            with SearchProgress(SEARCHING, shown=mesh.rank == 0) as progress:
                blueprint = make_blueprint(
                    traced, request, cluster, state_of=state_of, progress=progress
                )
        else:
            blueprint = blueprint_from_plan(traced, stored, state_of)
    return CapturedModel(
        blueprint,
        mesh,
        optimizer=replace(requested["optimizer"], **(adam or {})),
        optimizer_of=torch_optimizer_of(recipe) if adam is None else adamw_of,
        seed=args.seed,
        group_of=recipe.group_of,
        replica_check_interval=args.replica_check_interval,
        graph_warm_up=request.parallel.graph_warm_up,
        scaler=deepspeed.scaler_of(args) if args.fp16 else None,
    )
