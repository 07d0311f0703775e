"""Which ranks of a job share a host, from what launchers tell each rank, and which groups span
several hosts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from ..cluster import Cluster
from ..config import flag_name
from ..plan import Grid
from .agree import gather_json
from .launch import World


@dataclass(frozen=True)
class Nodes:
    """The hosts of a job.

    sizes: number of ranks of each host, in the order of ranks; empty where unknown.
    doubt: why the sizes are unknown, where launchers told ranks contradictory numbers.
    """

    sizes: tuple[int, ...] = ()
    doubt: str = ""

    @property
    def of(self) -> list[int]:
        """The host of each rank."""
        return [host for host, size in enumerate(self.sizes) for _ in range(size)]

    @property
    def alike(self) -> bool:
        """Whether all hosts have the same number of ranks, except the last, which may have
        fewer.
        """
        *others, last = self.sizes or (0,)
        return not others or (len(set(others)) == 1 and last <= others[0])

    def __str__(self) -> str:
        """Return the sizes, as "8" or "8 and 4"."""
        return " and ".join(map(str, dict.fromkeys(self.sizes)))


def find_nodes(world: World, control: dist.ProcessGroup | None) -> Nodes:
    """Return the hosts of a job, or the nodes that it emulates. Collective.

    control: group of all ranks.
    """
    if world.team is not None:
        return Nodes()  # it may have only some of a host's ranks
    if world.cluster is not None:
        full, rest = divmod(world.size, world.cluster.ranks_per_node)
        sizes = [world.cluster.ranks_per_node] * full
        if rest:
            sizes.append(rest)
        return Nodes(tuple(sizes))
    return nodes_of(gather_json([world.ranks_here, world.local_rank], control, "cpu"))


def nodes_of(reports: Sequence[Sequence[int]]) -> Nodes:
    """Return the hosts, given (ranks on its host, local rank) of each rank; (0, -1) where these are
    unknown.
    """
    if not any(size for size, _ in reports):
        return Nodes()
    sizes: list[int] = []
    while (first := sum(sizes)) < len(reports):
        size = reports[first][0]
        here = reports[first : first + max(size, 1)]
        odd = [
            rank
            for rank, (other, place) in enumerate(here)
            if other != size or place not in (-1, rank)
        ]
        if size == 0:
            return Nodes(
                doubt=f"rank {first} was not told how many ranks its host has, and others were"
            )
        if odd:
            other, place = here[odd[0]]
            seen = f"as {place} of {other}" if place >= 0 else f"among {other}"
            reason = (
                f"rank {first + odd[0]} should be rank {odd[0]} of {size} on its host, and "
                f"was started {seen}"
            )
            return Nodes(doubt=reason)
        if len(here) < size:
            last = len(reports) - 1
            reason = (
                f"rank {first} was told that its host has {size} ranks, and the job ends "
                f"with rank {last}"
            )
            return Nodes(doubt=reason)
        sizes.append(size)
    return Nodes(tuple(sizes))


def located(cluster: Cluster, nodes: Nodes) -> Cluster:
    """Return the cluster with the job's number of ranks per host, where it has several hosts of
    equal size.
    """
    several = len(nodes.sizes) > 1 and nodes.alike
    return replace(cluster, ranks_per_node=nodes.sizes[0]) if several else cluster


def notices(grid: Grid, nodes: Nodes, named: Callable[[str], str] = flag_name) -> tuple[str, ...]:
    """Return messages to the user about hosts and groups that span several of them.

    named: setting -> the name under which the user knows it.
    """
    if nodes.doubt:
        return (
            f"Which ranks share a host is unclear: {nodes.doubt}. Groups that leave their host "
            "are not told.",
        )
    if len(nodes.sizes) < 2:
        return ()
    messages = []
    if reaches(grid, nodes, "tp"):
        messages.append(far_apart(grid, nodes, named))
    if not nodes.alike:
        messages.append(
            f"Hosts have {nodes} ranks: step times are predicted as if all had as many."
        )
    return tuple(messages)


def reaches(grid: Grid, nodes: Nodes, axis: str) -> bool:
    """Whether a group along an axis spans several hosts."""
    host = nodes.of
    return any(len({host[rank] for rank in group}) > 1 for group in grid.groups(axis))


def far_apart(grid: Grid, nodes: Nodes, named: Callable[[str], str]) -> str:
    """Return the message about tensor-parallel groups that span several hosts, with the remedy."""
    text = (
        f"Tensor-parallel groups of {grid.tp} ranks reach over hosts of {nodes}: collectives "
        "of every layer go "
    )
    text += "through the network. "
    inside = "-".join(["tp", *(axis for axis in grid.order.split("-") if axis not in ("tp", "cp"))])
    if not reaches(replace(grid, order=inside), nodes, "tp"):
        return text + f"{named('rank_order')} {inside} keeps them inside."
    return (
        text
        + f"A {named('tensor_model_parallel_size')} that divides {math.gcd(*nodes.sizes)} keeps "
        "them inside"
        + ("." if grid.order.startswith("tp-") else f", with {named('rank_order')} {inside}.")
    )
