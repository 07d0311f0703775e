"""What a plan knows of the host of a rank: how fast copies from and to its memory are, and the
optimizer that runs there.
"""

from megatron_merak.cluster import Device
from megatron_merak.errors import PlanError
from megatron_merak.plan import Hardware, Plan
from megatron_merak.planner.cost import optimizer_bytes


def host_bandwidth(device: Device) -> float:
    """Return the bytes per second between a device and its host, in each direction. Raises
    PlanError where they are unknown.
    """
    if not device.host_bandwidth:
        reason = "the bandwidth between it and its host's memory is unknown"
        remedy = "Give its host_bandwidth, or offload nothing"
        raise PlanError("device", device.name, reason, remedy)
    return device.host_bandwidth


def update_time(plan: Plan, hardware: Hardware) -> float:
    """Return the seconds in which the optimizer steps a parameter, or a rank's share of it.

    hardware: of its pipeline rank.

    On a host, whose memory is taken to be as fast as the link to it, where its state is there.
    """
    moved = optimizer_bytes(plan.dtype, plan.state_bytes)
    if plan.offload_model_states:
        return moved / host_bandwidth(hardware.slowest_copies) / plan.optimizer_shards
    return hardware.passes_time(moved) / plan.optimizer_shards
