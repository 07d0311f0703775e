"""Run a stored or hand-edited plan: flags need not repeat what it decides, and must not contradict it."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..arguments import flags
from ..cluster import Cluster
from ..config import RAMP, STEPS, RunConfig, flag_name
from ..errors import ConfigError, PlanError, ScheduleError
from ..pipeline_parallel.check import check
from ..pipeline_parallel.schedule_files import executable
from ..plan import Plan
from ..plan.fit import check_ranks
from ..planner.memory import overflowing_ranks
from ..planner.predict import priced

# Settings that a plan decides.
DECIDES: Mapping[str, Callable[[Plan], Any]] = MappingProxyType(
    {
        "tensor_model_parallel_size": lambda plan: plan.grid.tp,
        "pipeline_model_parallel_size": lambda plan: plan.grid.pp,
        "rank_order": lambda plan: plan.grid.order,
        "micro_batch_size": lambda plan: plan.micro_batch_size,
        "global_batch_size": lambda plan: plan.global_batch_size,
        "seq_length": lambda plan: plan.sequence_length,
        "bf16": lambda plan: plan.dtype == "bfloat16",
        "fp16": lambda plan: plan.dtype == "float16",
        "sequence_parallel": lambda plan: plan.sequence_parallel,
        "tp_comm_overlap": lambda plan: plan.overlap,
        "no_overlap_grad_reduce": lambda plan: not plan.overlap_grad_reduce,
        "ddp_bucket_size": lambda plan: plan.bucket_size,
        "data_parallel_sharding_strategy": lambda plan: plan.sharding,
        "num_distributed_optimizer_instances": lambda plan: plan.sharding_instances,
        "no_overlap_param_gather": lambda plan: not plan.overlap_param_gather,
        "cross_entropy_chunk_size": lambda plan: plan.loss_chunk,
        "grad_reduce_in_bf16": lambda plan: plan.grad_reduce_in_bf16,
        "fp32_residual_connection": lambda plan: plan.fp32_residual,
        "graph_sharding": lambda plan: plan.graph_sharding,
    }
)
# Settings from which plans are made; they have no effect beside a stored plan.
MAKES = (
    *("pipeline_schedule", "schedule_file", "num_virtual_stages_per_pipeline_rank"),
    *("microbatch_group_size_per_virtual_pipeline_stage", "recompute_granularity", "recompute_method"),
    *("recompute_num_layers", "device_memory_gb", "tensor_parallel_rules", "device_profile"),
)


def stored(path: str) -> Plan:
    """Return the plan of a JSON file, with new predictions, as it may have been edited. Raises PlanError."""
    remedy = "Use a file written by tools/plan.py"
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise OSError("it is not a regular file")
        plan = Plan.from_json(Path(path).read_text(encoding="utf-8"))
        check(plan.schedule)
        executable(plan.schedule, "plan", path)
    except (OSError, ValueError) as error:
        raise PlanError("plan", path, f"it cannot be read ({error})", remedy) from error
    except (PlanError, ScheduleError) as error:
        raise PlanError("plan", path, f"{error.what} {error.value}: {error.reason}", error.remedy) from error
    return priced(plan)


def decided(kind: type[RunConfig], arguments: Sequence[str]) -> dict[str, Any]:
    """Return the settings that a ``--plan`` on the command line decides, by field.

    Raises PlanError, and ConfigError for a flag from which plans are made.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--plan")
    try:
        path = finder.parse_known_args(arguments)[0].plan
    except argparse.ArgumentError:
        return {}  # the parser of all flags reports it
    if path is None:
        return {}
    plan = stored(path)
    known = {flag.field for flag in flags(kind)}
    names = {argument.partition("=")[0] for argument in arguments}
    for name in MAKES:
        if flag_name(name) in names and name in known:
            raise ConfigError(flag_name(name), "(given)", f"it is decided by the plan {path}", "Leave it out")
    if names & {RAMP, STEPS}:  # they set the sizes, of which the plan has the largest
        known -= {"global_batch_size"}
    if "--use-distributed-optimizer" in names:  # it says so alone
        known -= {"data_parallel_sharding_strategy"}
    if "--use-tp-pp-dp-mapping" in names:
        known -= {"rank_order"}
    return {name: value(plan) for name, value in DECIDES.items() if name in known}


def check_plan_ranks(config: RunConfig, world_size: int) -> None:
    """Raise PlanError if ``--plan`` names a plan for another number of ranks.

    Called before checks of its degrees, whose errors would blame flags.
    """
    if config.parallel.plan is not None:
        check_ranks(stored(config.parallel.plan), world_size)


def plan_of(config: RunConfig, world_size: int, cluster: Cluster) -> Plan | None:
    """Return the plan that ``--plan`` names; None without it.

    cluster: on which the job runs.

    Raises PlanError if it does not fit the job or machine, and ConfigError for a flag that contradicts it.
    """
    parallel = config.parallel
    if parallel.plan is None:
        return None
    plan = stored(parallel.plan)
    check_ranks(plan, world_size)
    settings = {flag.field: getattr(getattr(config, flag.section), flag.field) for flag in flags(type(config))}
    settings["global_batch_size"], steps = config.global_batch_size(world_size), config.train.step_batch_size_schedule
    settings["data_parallel_sharding_strategy"], settings["rank_order"] = parallel.sharding, parallel.order
    other_names = {"global_batch_size": STEPS} if steps else {}
    if parallel.data_parallel_sharding_strategy is None and parallel.use_distributed_optimizer:
        other_names["data_parallel_sharding_strategy"] = "--use-distributed-optimizer"
    if parallel.rank_order is None and parallel.use_tp_pp_dp_mapping:
        other_names["rank_order"] = "--use-tp-pp-dp-mapping"
    compare(plan, settings, lambda name: other_names.get(name) or flag_name(name))
    check_memory(plan, cluster)
    return plan


def compare(plan: Plan, settings: Mapping[str, Any], named: Callable[[str], str]) -> None:
    """Raise ConfigError for the first setting that contradicts a plan. named: returns its name for the user."""
    for name, value in DECIDES.items():
        if name in settings and settings[name] != value(plan):
            reason = f"the plan has {value(plan)}"
            raise ConfigError(named(name), settings[name], reason, "Leave it out, or change the plan")


def check_memory(plan: Plan, cluster: Cluster) -> None:
    """Raise PlanError if a rank of ``cluster`` has less memory, all of it counted, than the plan needs.

    A plan that leaves less than the reserve runs: it may be what ``--device-memory-gb`` asked for. Its table says it.
    """
    for rank in overflowing_ranks(plan, cluster.device.memory):
        capacity = cluster.device.memory / 2**30
        reason = f"pipeline rank {rank} does not fit into the {capacity:.0f} GiB of {cluster.device.name}"
        remedy = "Make a plan for this device"
        raise PlanError("plan", f"(priced for {plan.cluster.device.name})", reason, remedy)
