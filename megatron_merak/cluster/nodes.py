"""Nodes of a cluster that are alike, where those of others differ from them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_merak.cluster.device import Device
from megatron_merak.cluster.practice import Practice
from megatron_merak.cluster.speed import slower


@dataclass(frozen=True)
class NodeGroup:
    """Neighbouring nodes that are alike.

    count:  of the nodes.
    device: of each of their ranks.
    speed:  what they reach of its rates, above 0 and at most 1.
    """

    count: int
    device: Device
    speed: float = 1.0

    @cached_property
    def rated(self) -> Device:
        """The device with the rates that these nodes have, by a name of its own."""
        if self.speed == 1:
            return self.device
        named = replace(self.device, name=f"{self.device.name} at {self.speed:g}")
        return slower(named, 1 / self.speed)

    def __str__(self) -> str:
        return f"{self.count} of {self.rated.name}"


def joined(groups: Iterable[NodeGroup]) -> tuple[NodeGroup, ...]:
    """Return the same nodes, in as few groups as there can be."""
    found: list[NodeGroup] = []
    for group in groups:
        if found and found[-1].rated == group.rated:
            found[-1] = replace(found[-1], count=found[-1].count + group.count)
        else:
            found.append(group)
    return tuple(found)


def of_all(practices: Iterable[Practice | None]) -> Practice | None:
    """Return what training reaches of links between unlike devices, and what their ranks wait: of
    each constant the worst; None where no device has any.

    No step was compared with measurements but those of one family of devices.
    """
    different = list(dict.fromkeys(practices))
    if len(different) == 1:
        return different[0]
    known = [practice for practice in different if practice is not None]
    shares = [1.0] if None in different else []
    return replace(
        known[0],
        inside=min(shares + [each.inside for each in known]),
        between=min(shares + [each.between for each in known]),
        step=max(each.step for each in known),
        handover=max(each.handover for each in known),
        skew=max(each.skew for each in known),
        low=0.0,
        high=0.0,
    )
