"""The possible numbers of copies of sharded state that data-parallel ranks store."""

from ..errors import ConfigError
from .checks import closest, divisors
from .parallel import ParallelConfig

FLAG = "--num-distributed-optimizer-instances"


def choices_of_instances(replicas: int) -> list[int]:
    """Return the numbers of instances into which so many data-parallel ranks can be grouped, two or
    more in each.
    """
    return [count for count in divisors(replicas) if count < replicas] or [1]


def refused_instances(instances: int, replicas: int, sharding: str) -> tuple[str, str] | None:
    """Return why a strategy cannot group ``replicas`` into ``instances``, and the remedy; None if
    it can.
    """
    if instances == 1:
        return None
    if sharding == "no_shard":
        return (
            "no_shard shards nothing that instances could divide",
            "Choose a sharding strategy, or leave it 1",
        )
    if replicas == 1:
        return "there is one data-parallel rank", "Leave it 1"
    if instances == replicas:
        remedy = (
            f"Use {closest(instances, choices_of_instances(replicas))}, or the strategy no_shard"
        )
        return (
            f"an instance would be one of the {replicas} data-parallel ranks, which shards nothing",
            remedy,
        )
    if instances < 1 or replicas % instances:
        reason = f"does not divide the {replicas} data-parallel ranks"
        return reason, f"Use {closest(instances, choices_of_instances(replicas))}"
    return None


def check_instances(parallel: ParallelConfig, replicas: int) -> None:
    """Raise ConfigError if ``replicas`` data-parallel ranks cannot be grouped into so many
    instances.
    """
    count = parallel.num_distributed_optimizer_instances
    if refused := refused_instances(count, replicas, parallel.sharding):
        raise ConfigError(FLAG, count, *refused)
