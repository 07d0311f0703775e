"""``MerakArguments(plan=...)``: the arguments that a stored plan decides."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ...cluster import Cluster
from ...config.rank_order import normal
from ...errors import ConfigError, PlanError
from ...plan import Plan
from ...plan.fit import check_ranks
from ...training.plan_file import check_memory, stored
from . import fsdp

# Arguments that a plan decides.
DECIDES: Mapping[str, Callable[[Plan], Any]] = MappingProxyType(
    {
        "tensor_model_parallel_size": lambda plan: plan.grid.tp,
        "pipeline_model_parallel_size": lambda plan: plan.grid.pp,
        "rank_order": lambda plan: plan.grid.order,
        "per_device_train_batch_size": lambda plan: plan.micro_batch_size,
        "gradient_accumulation_steps": lambda plan: plan.num_microbatches,
        "tp_comm_overlap": lambda plan: plan.overlap,
        "data_parallel_sharding_strategy": lambda plan: plan.sharding,
        "num_distributed_optimizer_instances": lambda plan: plan.sharding_instances,
        "graph_sharding": lambda plan: plan.graph_sharding,
        "grad_reduce_in_bf16": lambda plan: plan.grad_reduce_in_bf16,
    }
)
# Arguments from which plans are made; they have no effect beside a stored plan.
MAKES = (
    *("pipeline_schedule", "schedule_file", "num_virtual_stages_per_pipeline_rank", "activation_checkpointing"),
    *("gradient_checkpointing", "recompute_method", "recompute_num_layers", "recompute_activations"),
    *("device_memory_gb", "tensor_parallel_rules", "device_profile"),
)


def take_from_plan(args: Any) -> None:
    """Set arguments that have their defaults to what the plan ``args.plan`` decides.

    Raises PlanError for a file that is no plan, and ConfigError for an argument that contradicts it, or from which
    plans are made.
    """
    plan = stored(args.plan)
    if not plan.graph_sharding:
        raise ConfigError(
            "plan", args.plan, "it is a plan of the native model", "Make it with tools/plan.py show --model"
        )
    if (hybrid := fsdp.hybrid_of(args)) and plan.sharding_instances == 1 < plan.grid.dp:
        remedy = "Leave it out, or make the plan with --num-distributed-optimizer-instances"
        raise ConfigError(f"fsdp: {hybrid}", repr(args.fsdp), f"the plan {args.plan} has one instance", remedy)
    defaults = {each.name: each.default for each in dataclasses.fields(args)}
    for name in (name for name in MAKES if name in defaults):
        if getattr(args, name) != defaults[name]:
            raise ConfigError(name, getattr(args, name), f"it is decided by the plan {args.plan}", "Leave it out")
    if fsdp.recomputes(args):
        raise ConfigError(
            "fsdp_config: activation_checkpointing", True, f"it is decided by the plan {args.plan}", "Leave it out"
        )
    order = args.rank_order and normal(args.rank_order)
    effective = {"data_parallel_sharding_strategy": args.sharding, "rank_order": order}
    for name, value in DECIDES.items():
        setting = effective.get(name, getattr(args, name))
        if setting not in (defaults[name], value(plan)):
            reason = f"the plan {args.plan} has {value(plan)}"
            raise ConfigError(name, setting, reason, "Leave it out, or change the plan")
        setattr(args, name, value(plan))


def plan_of_arguments(args: Any, dtype: str, cluster: Cluster) -> Plan | None:
    """Return the plan that ``args.plan`` names; None without one. Raises PlanError if it does not fit the job or
    machine.

    dtype:   of the model's computation.
    cluster: on which the job runs.
    """
    if args.plan is None:
        return None
    plan = stored(args.plan)
    check_ranks(plan, args.world_size)
    if plan.dtype != dtype:
        flag = {"bfloat16": "bf16", "float16": "fp16"}.get(plan.dtype)
        remedy = "Make a plan for it" if flag is None else f"Set {flag}=True"
        raise PlanError("plan: dtype", plan.dtype, f"the model computes in {dtype}", remedy)
    check_memory(plan, cluster)
    return plan
