"""``MerakArguments(plan=...)``: the arguments that a stored plan decides."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...cluster import Cluster
from ...config import table
from ...config.rank_order import normal
from ...config.settings import InPlan
from ...errors import ConfigError, PlanError
from ...plan import Plan
from ...plan.fit import check_ranks
from ...training.plan_file import check_memory, stored
from . import fsdp
from .instances import degrees_of
from .shared import SHARED

# Arguments that a plan decides.
DECIDES: Mapping[str, InPlan] = MappingProxyType(
    {name: where for name, where in table.DECIDES.items() if name in SHARED}
    | {
        "per_device_train_batch_size": table.DECIDES["micro_batch_size"],
        "fp8": table.DECIDES["fp8_format"],
        "gradient_accumulation_steps": InPlan("num_microbatches"),
    }
    | {
        name: table.DECIDES[name]
        for name in (
            "num_distributed_optimizer_instances",
            "hierarchical_context_parallel_sizes",
        )
    }
)
# Arguments from which plans are made; they have no effect beside a stored plan.
MAKES = (
    *(name for name in table.MAKES if name in SHARED),
    "activation_checkpointing",
    "gradient_checkpointing",
    "recompute_activations",
)


def take_from_plan(args: Any) -> None:
    """Set arguments that have their defaults to what the plan ``args.plan`` decides.

    Raises PlanError for a file that is no plan, and ConfigError for an argument that contradicts
    it, or from which plans are made.
    """
    plan = stored(args.plan)
    if plan.is_of_gpt:
        raise ConfigError(
            "plan",
            args.plan,
            "it is a plan of the GPT of merak-pretrain",
            "Make it with tools/plan.py show --model",
        )
    if (hybrid := fsdp.hybrid_of(args)) and plan.sharding_instances == 1 < plan.grid.copies:
        remedy = "Leave it out, or make the plan with --num-distributed-optimizer-instances"
        raise ConfigError(
            f"fsdp: {hybrid}", repr(args.fsdp), f"the plan {args.plan} has one instance", remedy
        )
    defaults = {each.name: each.default for each in dataclasses.fields(args)}
    for name in (name for name in MAKES if name in defaults):
        if getattr(args, name) != defaults[name]:
            raise ConfigError(
                name, getattr(args, name), f"it is decided by the plan {args.plan}", "Leave it out"
            )
    if fsdp.recomputes(args):
        raise ConfigError(
            "fsdp_config: activation_checkpointing",
            True,
            f"it is decided by the plan {args.plan}",
            "Leave it out",
        )
    order = args.rank_order and normal(args.rank_order)
    degrees = degrees_of(args)
    effective = {
        "data_parallel_sharding_strategy": args.sharding,
        "offload_model_states": args.offloads_model_states,
        "rank_order": order,
        "expert_tensor_parallel_size": degrees.expert_tensor_parallel,
        "hierarchical_context_parallel_sizes": degrees.hierarchical_context_parallel_sizes or None,
    }
    for name, where in DECIDES.items():
        setting = effective.get(name, getattr(args, name))
        decided = where.read(plan)
        if setting not in (defaults[name], decided):
            reason = f"the plan {args.plan} has {decided}"
            raise ConfigError(name, setting, reason, "Leave it out, or change the plan")
        setattr(args, name, decided)


def plan_of_arguments(args: Any, dtype: str, cluster: Cluster, rank: int) -> Plan | None:
    """Return the plan that ``args.plan`` names; None without one. Raises PlanError if it does not
    fit the job or machine.

    dtype:   of the model's computation.
    cluster: on which the job runs, as this rank knows it.
    rank:    whose memory is checked.
    """
    if args.plan is None:
        return None
    plan = stored(args.plan)
    check_ranks(plan, args.world_size)
    if plan.dtype != dtype:
        flag = {"bfloat16": "bf16", "float16": "fp16"}.get(plan.dtype)
        remedy = "Make a plan for it" if flag is None else f"Set {flag}=True"
        raise PlanError("plan: dtype", plan.dtype, f"the model computes in {dtype}", remedy)
    check_memory(plan, cluster, rank)
    return plan
