"""What a rank computes with: the cluster that a run is planned for."""

import torch

from ..cluster import CLUSTERS, Cluster, Device, find_cluster, find_device, profiled
from ..errors import ConfigError, PlanError
from ..parallel.launch import World

_UNKNOWN = "H100"  # what a GPU that is not in the table is planned as: the ratios are what matters


def cluster_of(world: World, profile: str | None = None) -> Cluster:
    """The cluster that is emulated, or the usual one around this rank's GPU or CPU, with the rates of ``profile``.

    Raises ConfigError as ``cluster.profiled`` does, and for a profile beside an emulated cluster.
    """
    if world.cluster is not None:
        if profile is not None:
            remedy = "Write the profile's device into the file that --emulate names"
            raise ConfigError("--device-profile", profile, "an emulated cluster defines its own device", remedy)
        return world.cluster
    if world.device.type != "cuda":
        return profiled(CLUSTERS["cpu"], profile)
    return profiled(find_cluster(_name(world) if _row(world) is not None else _UNKNOWN), profile)


def peak_device(world: World) -> Device | None:
    """What utilisation is measured against: the emulated device, or this rank's GPU where its rates are known."""
    if world.cluster is not None:
        return world.cluster.device
    return _row(world) if world.device.type == "cuda" else None


def stand_in(world: World) -> str:
    """A sentence on a GPU that is planned as another, since its rates are unknown; empty where there is none."""
    if world.cluster is not None or world.device.type != "cuda" or _row(world) is not None:
        return ""
    return f"{_name(world)} is not in the table of devices: planned as {_UNKNOWN}"


def _name(world: World) -> str:
    return torch.cuda.get_device_name(world.device)


def _row(world: World) -> Device | None:
    try:
        return find_device(_name(world))
    except PlanError:
        return None
