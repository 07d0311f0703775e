"""How many copies of what a sharding strategy shards the data-parallel ranks may keep."""

from ..errors import ConfigError
from .checks import closest, divisors
from .parallel import ParallelConfig

FLAG = "--num-distributed-optimizer-instances"


def choices_of_instances(replicas: int) -> list[int]:
    """The numbers of instances that so many data-parallel ranks can be divided into, two ranks or more in each."""
    return [count for count in divisors(replicas) if count < replicas] or [1]


def refused_instances(instances: int, replicas: int, sharding: str) -> tuple[str, str] | None:
    """Why ``replicas`` data-parallel ranks cannot be divided into ``instances`` under a strategy, and the remedy; None
    where they can."""
    if instances == 1:
        return None
    if sharding == "no_shard":
        return "no_shard shards nothing that instances could divide", "Choose a sharding strategy, or leave it 1"
    if replicas == 1:
        return "there is one data-parallel rank", "Leave it 1"
    if instances == replicas:
        remedy = f"Use {closest(instances, choices_of_instances(replicas))}, or the strategy no_shard"
        return f"an instance would be one of the {replicas} data-parallel ranks, which shards nothing", remedy
    if instances < 1 or replicas % instances:
        reason = f"does not divide the {replicas} data-parallel ranks"
        return reason, f"Use {closest(instances, choices_of_instances(replicas))}"
    return None


def check_instances(parallel: ParallelConfig, replicas: int) -> None:
    """Raises ConfigError for a number of instances that ``replicas`` data-parallel ranks cannot be divided into."""
    count = parallel.num_distributed_optimizer_instances
    if refused := refused_instances(count, replicas, parallel.sharding):
        raise ConfigError(FLAG, count, *refused)
