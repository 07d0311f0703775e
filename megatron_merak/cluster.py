"""Devices, links and what a collective costs: the one cost table of the planner, the simulator and the emulation.

Rates are bytes and floating-point operations per second, times are seconds. GPU peaks are the vendor's dense figures;
``matmul_efficiency`` is the fraction of the peak that a large matrix product reaches in practice.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from megatron_merak.errors import PlanError

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """What one rank computes with. ``memory`` is in bytes, 0 where it is shared and has no fixed size per rank.

    ``dispatch`` is the seconds that the host takes to start one operation and that no computation hides: 0 on GPUs.
    """

    name: str
    bfloat16_flops: float
    float32_flops: float
    memory_bandwidth: float
    memory: int
    matmul_efficiency: float
    dispatch: float = 0.0

    def flops(self, dtype: str) -> float:
        """The dense matrix-product peak for "float32", or for the 16-bit types."""
        return self.float32_flops if dtype == "float32" else self.bfloat16_flops

    def compute_time(self, flops: float, moved_bytes: float, dtype: str) -> float:
        """Matrix products one after the other with the element-wise work around them."""
        return flops / (self.flops(dtype) * self.matmul_efficiency) + moved_bytes / self.memory_bandwidth


@dataclass(frozen=True)
class Link:
    """A point-to-point connection as one rank sees it: seconds per message, and bytes per second each way."""

    name: str
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of ``ranks_per_node`` devices; ``inside`` joins ranks of one node, ``between`` those of two."""

    device: Device
    ranks_per_node: int
    inside: Link
    between: Link

    def link(self, ranks: Sequence[int]) -> Link:
        """The slowest link among these ranks."""
        nodes = [rank // self.ranks_per_node for rank in ranks]
        return self.inside if min(nodes) == max(nodes) else self.between


# The CPU row is one core of a current server with AVX-512 and its bf16 instructions: measured, so its efficiency is 1.
_DEVICES = (
    Device("cpu", 400e9, 240e9, 10e9, 0, 1.0, 5e-6),
    Device("A100", 312e12, 19.5e12, 2.039e12, 80 * GIB, 0.75),
    Device("A100 40GB", 312e12, 19.5e12, 1.555e12, 40 * GIB, 0.75),
    Device("H100", 989.4e12, 66.9e12, 3.35e12, 80 * GIB, 0.65),
    Device("H100 PCIe", 756.4e12, 51.2e12, 2.04e12, 80 * GIB, 0.65),
    Device("H100 NVL", 835.5e12, 60e12, 3.94e12, 94 * GIB, 0.65),
    Device("H200", 989.4e12, 66.9e12, 4.8e12, 141 * 10**9, 0.65),
)
DEVICES: Mapping[str, Device] = MappingProxyType({device.name: device for device in _DEVICES})

_LINKS = (
    Link("loopback", 170e-6, 1.7e9),  # gloo between two cores, measured
    Link("ethernet-1g", 100e-6, 0.119e9),
    Link("ethernet-100g", 20e-6, 11e9),
    Link("nvlink3", 4e-6, 240e9),
    Link("nvlink4", 4e-6, 360e9),
    Link("infiniband-hdr", 10e-6, 23e9),
    Link("infiniband-ndr", 10e-6, 46e9),
)
LINKS: Mapping[str, Link] = MappingProxyType({link.name: link for link in _LINKS})

_NODES = {  # device word -> ranks in a node, the link inside, the link between
    "cpu": (64, "loopback", "ethernet-100g"),
    "A100": (8, "nvlink3", "infiniband-hdr"),
    "H100": (8, "nvlink4", "infiniband-ndr"),
    "H200": (8, "nvlink4", "infiniband-ndr"),
}


def find_device(name: str) -> Device:
    """The table's row for a name such as "cpu", "H100" or "NVIDIA A100-SXM4-80GB"; PlanError when there is none."""
    words = set(re.findall("[A-Z0-9]+", name.upper()))
    rows = [device for device in _DEVICES if set(device.name.upper().split()) <= words]
    if not rows:
        raise PlanError("device", name, "its rates are unknown", f"Use one of {', '.join(DEVICES)}")
    return max(rows, key=lambda device: len(device.name.split()))


def find_cluster(name: str) -> Cluster:
    """The usual machine around a device: 8 GPUs joined by NVLink and InfiniBand, or the cores of one host."""
    device = find_device(name)
    ranks_per_node, inside, between = _NODES[device.name.split()[0]]
    return Cluster(device, ranks_per_node, LINKS[inside], LINKS[between])


def peak_flops(device_name: str, dtype: str = "bfloat16") -> float:
    """The dense peak (no sparsity) that MFU is measured against; PlanError for a device that is not in the table."""
    return find_device(device_name).flops(dtype)


def all_reduce(ranks: int, message: float, link: Link) -> float:
    """Ring: every rank ends with the sum of ``message`` bytes. Seconds."""
    return 2 * (ranks - 1) * link.latency + 2 * (ranks - 1) / ranks * message / link.bandwidth


def all_gather(ranks: int, shard: float, link: Link) -> float:
    """Ring: every rank contributes ``shard`` bytes and ends with all of them. Seconds."""
    return (ranks - 1) * (link.latency + shard / link.bandwidth)


def reduce_scatter(ranks: int, shard: float, link: Link) -> float:
    """Ring: every rank ends with the sum of one ``shard``. Seconds."""
    return all_gather(ranks, shard, link)


def broadcast(ranks: int, message: float, link: Link) -> float:
    """Pipelined tree; nothing to do for one rank. Seconds."""
    return 0.0 if ranks == 1 else send(message, link)


def send(message: float, link: Link) -> float:
    """One message from one rank to another. Seconds."""
    return link.latency + message / link.bandwidth
