"""What a rank computes with, by the names of the planner's table of devices."""

import torch

from ..cluster import CLUSTERS, find_device
from ..errors import PlanError
from ..parallel.launch import World


def device_name(world: World) -> str:
    """The name of what a rank computes with, as its driver gives it; of the cluster that is emulated."""
    if world.cluster is not None:
        return world.cluster.name if world.cluster.name in CLUSTERS else world.cluster.device.name
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"


def known(device: str, otherwise: str | None = "H100") -> str | None:
    """The planner's name for a device or cluster, ``otherwise`` for one that it does not know: the ratios are what
    matters.
    """
    if device in CLUSTERS:
        return device
    try:
        return find_device(device).name
    except PlanError:
        return otherwise
