"""A cluster of which every rate is lower by one factor: that by which steps take longer than
predicted.
"""

from dataclasses import replace

from megatron_merak.cluster.device import Device, Link
from megatron_merak.cluster.speed import slower
from megatron_merak.cluster.table import Cluster


def slowed(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with which a plan predicts a step of ``factor`` times the seconds."""
    if factor == 1:
        return cluster
    return replace(
        cluster,
        device=_device(cluster.device, factor),
        inside=_link(cluster.inside, factor),
        between=_link(cluster.between, factor),
        nodes=tuple(
            replace(group, device=_device(group.device, factor)) for group in cluster.nodes
        ),
    )


def _device(device: Device, factor: float) -> Device:
    practice = device.practice
    if practice is not None:
        practice = replace(
            practice, step=practice.step * factor, handover=practice.handover * factor
        )
    return replace(
        slower(device, factor), practice=practice, step_factor=device.step_factor * factor
    )


def _link(link: Link, factor: float) -> Link:
    return replace(link, latency=link.latency * factor, bandwidth=link.bandwidth / factor)
