"""``parallelism_config`` of transformers, accelerate's ``ParallelismConfig``: degrees and instances of this library.

    dp_replicate_size x dp_shard_size   replicas, in as many instances as the former, each of which shards among its own
    tp_size                             tensor_model_parallel_size
    cp_size, sp_size                    context_parallel_size; see cp_comm_type

It is read through its attributes: accelerate is not needed.
"""

from typing import Any

from ...errors import ConfigError

_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
FULL = "optim_grads_params"


def sizes_of(args: Any) -> dict[str, int] | None:
    """Return the sizes by name; None if none are set. Raises ConfigError for unsupported ones."""
    config = args.parallelism_config
    if config is None:
        return None
    if not all(hasattr(config, name) for name in ("dp_replicate_size", "dp_shard_size", "tp_size")):
        remedy = (
            "Pass accelerate's class, or set tensor_model_parallel_size and "
            "data_parallel_sharding_strategy"
        )
        raise ConfigError(
            "parallelism_config", repr(config), "it is not a ParallelismConfig", remedy
        )
    sizes = {name: getattr(config, name, None) or 1 for name in _SIZES}
    if sizes["cp_size"] > 1 and sizes["sp_size"] > 1:
        reason = f"cp_size is {sizes['cp_size']}, and both divide sequences"
        raise ConfigError(
            "parallelism_config: sp_size", sizes["sp_size"], reason, "Set only one of them"
        )
    return sizes if max(sizes.values()) > 1 else None


def tensor_parallel_of(args: Any) -> int:
    """Return ``tp_size``; 1 if unset."""
    return (sizes_of(args) or {}).get("tp_size", 1)


def context_parallel_of(args: Any) -> int:
    """Return ``cp_size`` or ``sp_size``; 1 if unset."""
    sizes = sizes_of(args) or {}
    return max(sizes.get("cp_size", 1), sizes.get("sp_size", 1))


def sharding_with(args: Any, strategy: str | None) -> str | None:
    """Return the sharding strategy.

    strategy: requested by other arguments; if None, replicas that shard use full sharding.

    Raises ConfigError if the two contradict each other.
    """
    if (sizes := sizes_of(args)) is None:
        return strategy
    shards = sizes["dp_shard_size"]
    what = "parallelism_config: dp_shard_size"
    if shards > 1 and strategy == "no_shard":
        raise ConfigError(
            what, shards, "other arguments disable sharding", "Leave out one of the two"
        )
    if shards == 1 and sizes["dp_replicate_size"] > 1 and strategy not in (None, "no_shard"):
        reason = f"other arguments request {strategy}, which shards over replicas"
        raise ConfigError(
            what,
            shards,
            reason,
            "Give the number of replicas to shard over, or leave out one of the two",
        )
    return FULL if strategy is None and shards > 1 else strategy


def instances_of(args: Any) -> int | None:
    """Return the number of groups of replicas that shard among their own; None if not set."""
    sizes = sizes_of(args)
    return sizes["dp_replicate_size"] if sizes is not None and sizes["dp_shard_size"] > 1 else None


def check_world(args: Any) -> None:
    """Raise ConfigError unless the sizes and the pipeline stages multiply to the ranks of
    the job.
    """
    if (sizes := sizes_of(args)) is None:
        return
    stages = args.pipeline_model_parallel_size
    product = 1
    for size in sizes.values():
        product *= size
    if product * stages != args.world_size:
        listed = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        reason = (
            f"{listed}{f' x {stages} stages' if stages > 1 else ''} is not the "
            f"{args.world_size} ranks of the job"
        )
        raise ConfigError(
            "parallelism_config", product, reason, "Change a size, or start as many ranks"
        )
