"""What data-parallel ranks shard, and the tensor-parallel degree, from whichever argument sets
them.
"""

from typing import Any

from ...config.parallel import SHARDINGS
from ...errors import ConfigError
from . import deepspeed, fsdp, parallelism


def sharding_of(args: Any) -> str | None:
    """Return the requested sharding strategy; None if there is none.

    Raises ConfigError for refused values and for contradictions.
    """
    strategy = args.data_parallel_sharding_strategy
    if strategy is not None and strategy not in SHARDINGS:
        remedy = f"Use {' or '.join(SHARDINGS)}"
        raise ConfigError(
            "data_parallel_sharding_strategy",
            repr(strategy),
            "it is not one of the choices",
            remedy,
        )
    if args.fsdp and args.deepspeed:
        raise ConfigError(
            "fsdp", args.fsdp, "deepspeed is set, too, and both say what is sharded", "Set only one"
        )
    by_fsdp = fsdp.strategy_of(args)
    by_stage = deepspeed.strategy_of(args)
    by_framework = by_fsdp or by_stage
    if strategy is not None and by_framework not in (None, strategy):
        setting = f"fsdp {args.fsdp}" if by_fsdp else "the stage of deepspeed's zero_optimization"
        reason = f"{setting} means {by_framework}"
        raise ConfigError(
            "data_parallel_sharding_strategy", strategy, reason, "Set only one of them"
        )
    strategy = strategy or by_framework
    if offloads(args):
        if strategy not in (None, SHARDINGS[-1]):
            reason = f"it is for {SHARDINGS[-1]}, and other arguments request {strategy}"
            raise ConfigError("offload_model_states", True, reason, "Leave out one of the two")
        if args.use_distributed_optimizer:
            reason = "offload_model_states shards weights and gradients, too"
            raise ConfigError("use_distributed_optimizer", True, reason, "Leave it False")
        strategy = SHARDINGS[-1]
    if args.use_distributed_optimizer and strategy == "no_shard":
        reason = "no_shard replicates the optimizer's state"
        raise ConfigError("use_distributed_optimizer", True, reason, "Leave it False, or use optim")
    return parallelism.sharding_with(
        args, strategy or ("optim" if args.use_distributed_optimizer else None)
    )


def offloads(args: Any) -> bool:
    """Whether weights, gradients and optimizer state are requested to be in host memory.

    Raises ConfigError for refused values.
    """
    by_framework = fsdp.offload_of(args) or deepspeed.offload_of(args)
    return bool(args.offload_model_states or by_framework)


def take_degrees(args: Any) -> None:
    """Set tensor and context parallel sizes, if unset, to what ``parallelism_config`` or
    ``deepspeed`` says.

    Raises ConfigError if they contradict it.
    """
    tensor = "tensor_model_parallel_size"
    context = "context_parallel_size"
    of_deepspeed = deepspeed.tensor_parallel_of(args) if args.deepspeed else 1
    degrees = (
        (tensor, "parallelism_config: tp_size", parallelism.tensor_parallel_of(args)),
        (context, "parallelism_config: cp_size", parallelism.context_parallel_of(args)),
        (tensor, "deepspeed: tensor_parallel.autotp_size", of_deepspeed),
    )
    for name, what, size in degrees:
        own = getattr(args, name)
        if size > 1 and own not in (1, size):
            raise ConfigError(what, size, f"{name} is {own}", "Set only one of them")
        if size > 1:
            setattr(args, name, size)
