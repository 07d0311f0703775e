"""The cluster that a run is planned for, and the device that utilisation is measured against."""

from dataclasses import replace

import torch

from ..cluster import CLUSTERS, Cluster, Device, find_cluster, find_device, profiled
from ..errors import ConfigError, PlanError
from ..parallel.launch import World

_UNKNOWN = "H100"  # what a GPU that is not in the table is planned as: the ratios are what matters


def cluster_of(world: World, profile: str | None = None) -> Cluster:
    """The emulated cluster, or the default one for this rank's GPU or CPU, with the rates of
    ``profile``.

    profile: a device profile, see ``cluster.profiled``.

    Raises ConfigError as ``cluster.profiled`` does, and for a profile together with an emulated
    cluster.
    """
    if world.cluster is not None:
        if profile is not None:
            remedy = "Write the profile's device into the file that --emulate names"
            raise ConfigError(
                "--device-profile", profile, "an emulated cluster defines its own device", remedy
            )
        return world.cluster
    if world.device.type != "cuda":
        return profiled(CLUSTERS["cpu"], profile)
    return profiled(find_cluster(_name(world) if _row(world) is not None else _UNKNOWN), profile)


def peak_device(world: World) -> Device | None:
    """The device whose peak rates utilisation is relative to: the emulated one, with the average of
    all ranks' peaks where nodes differ, or this rank's GPU if it is known.
    """
    if world.cluster is not None:
        return _average(world.cluster, world.size)
    return _row(world) if world.device.type == "cuda" else None


def _average(cluster: Cluster, ranks: int) -> Device:
    if not cluster.nodes:
        return cluster.device
    devices = [cluster.device_at(rank) for rank in range(ranks)]
    return replace(
        cluster.device,
        name=cluster.device_names,
        bfloat16_flops=sum(device.bfloat16_flops for device in devices) / ranks,
        float32_flops=sum(device.float32_flops for device in devices) / ranks,
    )


def stand_in(world: World) -> str:
    """A note that this rank's GPU is planned as another since its rates are unknown; "" if they are
    known.
    """
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
