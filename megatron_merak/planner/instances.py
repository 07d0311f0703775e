"""What the instances of hybrid sharding add to the reduction of gradients: a rank's shards are summed inside its
instance, then over the ranks that own the same ones in the other instances."""

from megatron_merak.cluster import Link, all_reduce
from megatron_merak.plan import Plan
from megatron_merak.planner.links import link_along, worst


def link_inside(plan: Plan) -> Link:
    """What the replicas of an instance are connected by; of the only one, all replicas."""
    ranks = plan.shard_ranks
    instances = [tuple(range(first, first + ranks)) for first in range(0, plan.grid.dp, ranks)]
    return worst(link_along(plan.cluster, plan.grid, "dp", places) for places in instances)


def link_across(plan: Plan) -> Link:
    """What the ranks that own the same shards are connected by."""
    owners = [tuple(range(place, plan.grid.dp, plan.shard_ranks)) for place in range(plan.shard_ranks)]
    return worst(link_along(plan.cluster, plan.grid, "dp", places) for places in owners)


class Across:
    """The sums over instances of a rank's shards of a plan, one at a time and in turns with what an instance sends
    where both go by the same links; they take no time where there is one instance.

    free: when those that were sent are through, in seconds of the caller's clock.
    """

    def __init__(self, plan: Plan):
        self._count, self._shards, self._link = plan.sharding_instances, plan.shard_ranks, link_across(plan)
        self._each = plan.gradient_bytes
        self._apart = self._link != link_inside(plan)
        self.free = float("-inf")

    def seconds(self, values: float) -> float:
        """Of the shard of so many gradient values."""
        return all_reduce(self._count, self._each * values / self._shards, self._link) if self._count > 1 else 0.0

    def send(self, values: float, ready: float, inside: float) -> float:
        """Sum the shard of ``values``, which the instance has at ``ready``. inside: when the links of the instance are
        free. Returns when they are free behind this."""
        if self._count == 1:
            return inside
        self.free = max(ready, self.free if self._apart else inside) + self.seconds(values)
        return inside if self._apart else self.free
