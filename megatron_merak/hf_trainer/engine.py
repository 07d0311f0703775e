"""Build the engine of a ``MerakTrainer`` from its arguments: capture and plan the model, fill this rank's shards."""

import math
from dataclasses import replace
from typing import Any

from torch import nn

from ..config import OptimizerConfig, ParallelConfig
from ..optimizer.recipe import Recipe
from ..optimizer.torch_optimizer import check_layout
from ..parallel.agree import together
from ..parallel.mesh import Mesh
from ..parallel.nodes import Nodes, located
from ..pipeline_parallel.search.progress import SEARCHING, Progress
from ..stages.blueprint import blueprint_from_plan, make_blueprint
from ..stages.captured import CapturedModel
from ..stages.devices import cluster_of
from ..stages.optimizer_state import adamw_of, torch_optimizer_of
from ..stages.precision import compute_dtype
from ..stages.traced import Batch, OwnLoss, Traced
from .arguments import deepspeed
from .arguments.fields import PARALLEL_FIELDS
from .arguments.instances import instances_of
from .arguments.merak_arguments import MerakArguments
from .arguments.optimizers import adam_of
from .arguments.plan_arguments import plan_of_arguments


def wishes(args: MerakArguments) -> dict[str, Any]:
    """Return what arguments request: keywords of ``make_blueprint``, settings of the optimizer, and the rest."""
    parallel = ParallelConfig(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        recompute_granularity=args.recompute_granularity,
        data_parallel_sharding_strategy=args.sharding,
        num_distributed_optimizer_instances=instances_of(args),
        **{name: getattr(args, name) for name in PARALLEL_FIELDS},
    )
    optimizer = OptimizerConfig(
        lr=args.learning_rate or None,
        weight_decay=args.weight_decay,
        clip_grad=0.0 if math.isinf(args.max_grad_norm) else args.max_grad_norm,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_epsilon,
    )
    plan = {
        "microbatches": args.gradient_accumulation_steps,
        "cluster": cluster_of(args.world, args.device_profile),
        "parallel": parallel,
        "graph_sharding": args.graph_sharding,
        "rules": args.tensor_parallel_rules or "",
    }
    others = {
        name: getattr(args, name) for name in ("optim", "optim_args", "seed", "bf16", "fp16", "replica_check_interval")
    }
    return others | {"plan": plan, "plan file": args.plan, "optimizer": optimizer}


def build_engine(
    model: nn.Module,
    example: Batch,
    args: MerakArguments,
    mesh: Mesh,
    recipe: Recipe,
    loss: OwnLoss | None = None,
    nodes: Nodes | None = None,
) -> CapturedModel:
    """Capture the model, follow the plan of the arguments or make one, and fill this rank's shards. Collective.

    recipe: which optimizer steps which parameter.
    nodes:  the hosts of the job; None: unknown.
    """
    requested = wishes(args)
    adam = adam_of(recipe)
    check_layout(recipe, mesh.grid.tp * mesh.grid.pp, requested["plan"]["parallel"].sharding != "no_shard")
    requested["plan"]["state_bytes"] = recipe.state_bytes
    requested["plan"]["cluster"] = located(requested["plan"]["cluster"], nodes or Nodes())
    traced = Traced(
        model, example, compute_dtype(model, args.bf16, args.fp16), args.bf16 or args.fp16, mesh=mesh, loss=loss
    )
    with together(mesh.control, "cpu"):
        stored = plan_of_arguments(args, traced.dtype, requested["plan"]["cluster"])
        state_of = recipe.state_of if adam is None else None
        if stored is None:
            with Progress(SEARCHING, shown=mesh.rank == 0) as progress:
                blueprint = make_blueprint(traced, mesh.grid, **requested["plan"], state_of=state_of, progress=progress)
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
        scaler=deepspeed.scaler_of(args) if args.fp16 else None,
    )
