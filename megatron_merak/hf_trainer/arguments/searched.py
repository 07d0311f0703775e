"""``MerakArguments(parallel="auto")``: what a search decides, and how arguments hold what it chose."""

import dataclasses
from typing import Any

from ...config.parallel import ParallelConfig
from ...errors import ConfigError
from ...planner.search import Choice
from ...planner.search.choice import SEARCHED
from ...training.searched import pins_in
from .shared import SHARED

NAME = "parallel"
VERIFY = "parallel_verify"
# other names for what a search decides -> how a pin calls it
_ALSO = {
    "activation_checkpointing": "recompute",
    "gradient_checkpointing": "recompute",
    "recompute_activations": "recompute",
    "fsdp": "sharding",
    "deepspeed": "sharding",
    "parallelism_config": "sharding",
}
_UNTRIED = (
    "schedule_file",
    "num_distributed_optimizer_instances",
    "hierarchical_context_parallel_sizes",
    "cpu_offloading",
    "cpu_offloading_num_layers",
    "offload_model_states",
)


def pinned(args: Any) -> dict[str, Any]:
    """Return the fields of ``Choice`` that ``args.parallel`` pins. Raises ConfigError."""
    return pins_in(args.parallel, NAME)


def check_search(args: Any) -> None:
    """Raise ConfigError for arguments that a search decides, or never tries, and for plans to try
    where there is no search.
    """
    _check_verify(args)
    if args.parallel is None:
        return
    pinned(args)
    defaults = {each.name: each.default for each in dataclasses.fields(args)}
    given = [name for name in (*SEARCHED, *_ALSO, *_UNTRIED) if _is_given(args, name, defaults)]
    if not given:
        return
    name = given[0]
    if name in _UNTRIED:
        raise ConfigError(name, getattr(args, name), "no search tries it", "Leave it out")
    pin = SEARCHED[name] if name in SEARCHED else _ALSO[name]
    remedy = f"Leave it out, or pin it: parallel='auto,{pin}=VALUE'"
    raise ConfigError(name, repr(getattr(args, name)), "it is decided by the search", remedy)


def _check_verify(args: Any) -> None:
    wanted = args.parallel_verify
    if wanted is None:
        return
    if type(wanted) is not int or wanted < 2:
        remedy = "Give the number of plans to try, 2 or more"
        raise ConfigError(VERIFY, repr(wanted), "it compares plans", remedy)
    if args.parallel is None:
        reason = f"it has no effect without {NAME}"
        raise ConfigError(VERIFY, wanted, reason, f"Set {NAME}='auto', or leave it out")


def apply_choice(args: Any, choice: Choice, rows: int, micro_batches: int) -> None:
    """Set the arguments that were chosen, and unset what asked for it.

    rows:          of a micro-batch.
    micro_batches: of a step, on each replica.
    """
    parallel = choice.applied(ParallelConfig())
    for name in SEARCHED.keys() & SHARED.keys():
        setattr(args, name, getattr(parallel, name))
    if not choice.layer.exchanges_rows:
        args.moe_expert_rank_capacity_factor = None
    args.gradient_checkpointing = parallel.recompute_granularity == "full"
    args.recompute_activations = parallel.recompute_granularity == "selective"
    args.per_device_train_batch_size = rows
    args.gradient_accumulation_steps = micro_batches
    args.parallel = None
    args.parallel_verify = None


def _is_given(args: Any, name: str, defaults: dict[str, Any]) -> bool:
    if name not in defaults:
        return False
    value = getattr(args, name)
    return value != defaults[name] and bool(value)
