"""The time of reducing gradients across the instances of hybrid sharding (HSDP).

A rank's shards are reduce-scattered inside its instance, then all-reduced over the ranks of the
other instances that own the same ones.
"""

from megatron_merak.cluster import Link, all_reduce
from megatron_merak.plan import Plan
from megatron_merak.planner.links import reached_along, worst


def link_inside(plan: Plan) -> Link:
    """Return the slowest link between the replicas of an instance; of all replicas where there is
    one instance.
    """
    ranks = plan.shard_ranks
    instances = [tuple(range(first, first + ranks)) for first in range(0, plan.grid.copies, ranks)]
    summed = plan.sharding == "no_shard"
    return worst(
        reached_along(plan.cluster, plan.grid, "cp-dp", replicas, summed=summed)
        for replicas in instances
    )


def link_across(plan: Plan) -> Link:
    """Return the slowest link between ranks that own the same shards."""
    owners = [
        tuple(range(first, plan.grid.copies, plan.shard_ranks)) for first in range(plan.shard_ranks)
    ]
    return worst(
        reached_along(plan.cluster, plan.grid, "cp-dp", replicas, summed=True)
        for replicas in owners
    )


def share_of_experts(plan: Plan) -> float:
    """Return how long it takes to reduce a gradient of experts, 1 being that of a weight that all
    copies of a layer have: fewer ranks, which are farther apart, have the same experts.
    """
    divided = plan.expert_copies
    copies = plan.grid.copies
    same = copies // divided
    if divided == 1:
        return 1.0
    if same == 1:
        return 0.0
    places = tuple(range(0, copies, divided))
    link = reached_along(plan.cluster, plan.grid, "cp-dp", places, summed=False)
    every = (copies - 1) / copies / link_inside(plan).bandwidth
    return (same - 1) / same / link.bandwidth / every


class CrossInstanceReduction:
    """Models the all-reduces of a rank's shards across instances, one at a time; no time with a
    single instance.

    Where they use the same links as the communication inside an instance, they take turns with it.

    free: when all of them have finished, in seconds of the caller's clock.
    """

    def __init__(self, plan: Plan):
        self._count = plan.sharding_instances
        self._shards = plan.shard_ranks
        self._link = link_across(plan)
        self._value_bytes = plan.gradient_bytes
        self._separate_links = self._link != link_inside(plan)
        self.free = float("-inf")

    def seconds(self, values: float) -> float:
        """Return the time of all-reducing the shard of a bucket of that many gradient values."""
        shard_bytes = self._value_bytes * values / self._shards
        return all_reduce(self._count, shard_bytes, self._link) if self._count > 1 else 0.0

    def send(self, values: float, ready: float, inside: float) -> float:
        """All-reduce the shard of a bucket. Return when the links of the instance are free again.

        values: number of gradient values of the bucket.
        ready:  when its shard is reduced inside the instance.
        inside: when the links of the instance are free.
        """
        if self._count == 1:
            return inside
        self.free = max(ready, self.free if self._separate_links else inside) + self.seconds(values)
        return inside if self._separate_links else self.free
