"""What each pipeline rank computes with, given how the rank order places its ranks on nodes."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_merak.cluster import Cluster, Device
from megatron_merak.plan.parts import Grid


@dataclass(frozen=True)
class Hardware:
    """The devices of a pipeline rank: of all its replicas and of the ranks that share its layers. Of
    unequal ones the slowest counts, since all wait for it, and the smallest, since all have the
    same stages.

    devices: the different ones, in the order of ranks.
    nodes:   number of nodes on which it has ranks with each of these; empty where all nodes of the
             cluster are alike.
    """

    devices: tuple[Device, ...]
    nodes: tuple[int, ...] = ()

    @property
    def smallest(self) -> Device:
        """The device with least memory that plans use."""
        return min(self.devices, key=lambda device: device.usable)

    @property
    def slowest_copies(self) -> Device:
        """The device with the slowest link to its host."""
        return min(self.devices, key=lambda device: device.host_bandwidth)

    def passes_time(self, moved_bytes: float) -> float:
        """Return the seconds of element-wise passes, see ``Device.passes_time``."""
        return max(device.passes_time(moved_bytes) for device in self.devices)

    def limit(self, limit: float) -> float:
        """Return the bytes that plans may use of each of its ranks, where none may use more than
        ``limit``; 0: unknown.

        Where all nodes are alike the limit stands as it was given, which may be more than what is
        usable.
        """
        usable = self.smallest.usable
        return min(limit, usable) if self.nodes and usable else limit

    def __str__(self) -> str:
        if not self.nodes:
            return self.devices[0].name
        counts = zip(self.nodes, self.devices, strict=True)
        return " and ".join(f"{count} of {device.name}" for count, device in counts)


@functools.cache
def hardware_of(cluster: Cluster, grid: Grid) -> tuple[Hardware, ...]:
    """Return what each pipeline rank of a grid computes with. Raises PlanError for more ranks than
    the cluster has.
    """
    if not cluster.nodes:
        return (Hardware((cluster.device,)),) * grid.pp
    nodes: list[dict[Device, set[int]]] = [{} for _ in range(grid.pp)]
    for rank in range(grid.size):
        place = grid.coordinates(rank)[3]
        device = cluster.device_at(rank)
        nodes[place].setdefault(device, set()).add(rank // cluster.ranks_per_node)
    return tuple(
        Hardware(tuple(each), tuple(len(of_device) for of_device in each.values()))
        for each in nodes
    )


def limits_of(cluster: Cluster, grid: Grid, limit: float) -> tuple[float, ...]:
    """Return the bytes that plans may use of each pipeline rank, see ``Hardware.limit``."""
    return tuple(hardware.limit(limit) for hardware in hardware_of(cluster, grid))


def exceeding(peaks: Sequence[float], limits: Sequence[float]) -> tuple[int, ...]:
    """Return the pipeline ranks whose peak exceeds their limit, where that is not 0, unknown."""
    pairs = zip(peaks, limits, strict=True)
    return tuple(rank for rank, (peak, limit) in enumerate(pairs) if 0 < limit < peak)
