"""Devices, links and what a collective costs, by the table, by a file, or as measured on a
device.
"""

from megatron_merak.cluster.device import GIB, Device, Link
from megatron_merak.cluster.nodes import NodeGroup
from megatron_merak.cluster.practice import PRACTICE, Practice
from megatron_merak.cluster.profile import Profile, profiled, read_profile
from megatron_merak.cluster.rates import AttentionRate, ProductRate, Rates
from megatron_merak.cluster.table import (
    CLUSTERS,
    DEVICES,
    LINKS,
    Cluster,
    all_gather,
    all_reduce,
    broadcast,
    find_cluster,
    find_device,
    peak_flops,
    reduce_scatter,
    reserving,
    send,
)

__all__ = [
    "CLUSTERS",
    "DEVICES",
    "GIB",
    "LINKS",
    "PRACTICE",
    "AttentionRate",
    "Cluster",
    "Device",
    "Link",
    "NodeGroup",
    "Practice",
    "ProductRate",
    "Profile",
    "Rates",
    "all_gather",
    "all_reduce",
    "broadcast",
    "find_cluster",
    "find_device",
    "peak_flops",
    "profiled",
    "read_profile",
    "reduce_scatter",
    "reserving",
    "send",
]
