"""What model states in host memory can be combined with."""

from ..errors import ConfigError
from .parallel import SHARDINGS, UNFLUSHED, ParallelConfig

FLAG = "--offload-model-states"


def refused_on_host(
    sharding: str, instances: int, experts: int, fp8: bool, updates: bool
) -> tuple[str, str] | None:
    """Return why model states cannot be in host memory, and what to do; None if they can be.

    sharding:  the strategy, one of ``SHARDINGS``.
    instances: groups of replicas that shard among themselves.
    experts:   ranks that divide the experts of a layer.
    fp8:       whether linear layers compute in fp8.
    updates:   whether the schedule updates weights on its way.
    """
    whole = SHARDINGS[-1]
    if sharding != whole:
        return (
            f"weights are copied as --data-parallel-sharding-strategy {whole} gathers them, and it is "
            f"{sharding}",
            f"Use {whole}, or leave the strategy out",
        )
    if instances > 1:
        reason = f"the {instances} instances of --num-distributed-optimizer-instances add up shards"
        return f"{reason} on their devices", "Use one instance"
    if experts > 1:
        return f"{experts} ranks divide experts", "Leave --expert-model-parallel-size out"
    if fp8:
        return "weights are rounded to fp8 where they stay on the device", "Leave fp8 out"
    if updates:
        return "the schedule updates weights while micro-batches are in flight", "Use 1f1b"
    return None


def check_model_states(parallel: ParallelConfig, fp8: bool) -> None:
    """Check what --offload-model-states can be combined with. Raises ConfigError."""
    if not parallel.offload_model_states:
        return
    refused = refused_on_host(
        parallel.sharding,
        parallel.num_distributed_optimizer_instances,
        parallel.expert_ranks,
        fp8=fp8,
        updates=parallel.pipeline_schedule in UNFLUSHED,
    )
    if refused is None and parallel.use_distributed_optimizer:
        reason = f"{FLAG} shards weights and gradients, too"
        raise ConfigError("--use-distributed-optimizer", True, reason, "Leave it out")
    if refused is None and parallel.served:
        strategy = f"--data-parallel-strategy {parallel.data_parallel_strategy}"
        refused = (f"{strategy} keeps the optimizer's state on servers", "Leave one of them out")
    if refused is not None:
        raise ConfigError(FLAG, True, *refused)
