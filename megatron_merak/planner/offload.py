"""Activations in host memory: what a stage offloads, how much that is, and how long it waits for it.

A unit's tape is copied to the host while the next units run forward, and back while units behind it
run backward (``runtime/offload.py``), one tape at a time in each direction. What takes longer than
that is waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_merak.cluster import Device
from megatron_merak.plan import StagePlan, Unit
from megatron_merak.planner.cost import UnitCost
from megatron_merak.planner.host import host_bandwidth
from megatron_merak.planner.overlap import times
from megatron_merak.planner.saved import tape_bytes

FLAG = "--cpu-offloading-num-layers"
AUTOMATIC_FLAG = "--cpu-offloading"


@dataclass(frozen=True)
class Offload:
    """What to offload.

    layers:    the first so many of each stage.
    automatic: of each stage what does not fit, as far as that costs less than to recompute it.
    """

    layers: int = 0
    automatic: bool = False

    def __bool__(self) -> bool:
        return self.automatic or self.layers > 0


NOTHING = Offload()


@dataclass(frozen=True)
class UnitSeconds:
    """Times of one micro-batch on a unit: of its forward, and of its backward with its collectives
    but without recomputation, and without weight gradients that are computed in a W.
    """

    forward: float
    backward: float


def unit_seconds(
    costs: Sequence[UnitCost], overlap: str, splits: bool = False
) -> tuple[UnitSeconds, ...]:
    """Return the times of each unit. overlap, splits: see `times`."""
    alone = [times([cost], overlap, splits) for cost in costs]
    return tuple(
        UnitSeconds(each.forward, max(0.0, each.backward - (each.weight if splits else 0.0)))
        for each in alone
    )


@dataclass(frozen=True)
class HostWaits:
    """Seconds that the passes of one micro-batch through a stage wait for the host."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward


def host_waits(
    units: Sequence[Unit],
    stage: StagePlan,
    seconds: Sequence[UnitSeconds],
    device: Device,
    early: bool = False,
) -> HostWaits:
    """Return the waits of a stage.

    seconds: of every unit of the chain.
    early:   whether recomputation is an op of its own, before the backward.
    """
    if not stage.offload:
        return HostWaits()
    bandwidth = host_bandwidth(device)
    copies = [
        tape_bytes(units, stage, unit) / bandwidth if unit in stage.offload else 0.0
        for unit in stage.units
    ]
    own = [seconds[unit] for unit in stage.units]
    again = [
        each.forward if unit in stage.recompute and not early else 0.0
        for unit, each in zip(stage.units, own, strict=True)
    ]
    forward = _forward([each.forward for each in own], copies) - sum(each.forward for each in own)
    behind = [each.backward for each in own]
    backward = _backward(behind, again, copies) - sum(behind) - sum(again)
    return HostWaits(max(0.0, forward), max(0.0, backward))


def _forward(seconds: Sequence[float], copies: Sequence[float]) -> float:
    """Return the end of a forward. A copy begins when its unit has run and the one before it is
    done, which the device waits for.
    """
    now = done = 0.0
    for compute, copy in zip(seconds, copies, strict=True):
        now += compute
        if copy:
            now = max(now, done)
            done = now + copy
    return now


def _backward(seconds: Sequence[float], again: Sequence[float], copies: Sequence[float]) -> float:
    """Return the end of a backward. The first copy begins with the backward, after recomputation, of
    the last unit, every other one with that of the unit whose copy was the one before.
    """
    now = done = 0.0
    coming: int | None = None
    for unit in reversed(range(len(seconds))):
        now += again[unit]
        if copies[unit] and coming is None:  # nothing ran while it comes back
            done = now + copies[unit]
        if copies[unit]:
            now = max(now, done)
            coming = None
        if coming is None:
            coming = next((each for each in reversed(range(unit)) if copies[each]), None)
            done = now + (0.0 if coming is None else copies[coming])
        now += seconds[unit]
    return now


def offload_costs(
    units: Sequence[Unit],
    stage: StagePlan,
    candidates: Sequence[int],
    seconds: Sequence[UnitSeconds],
    device: Device,
) -> dict[int, tuple[float, int]]:
    """Return about what it costs to offload each of some units of a stage, in seconds of a
    micro-batch, and how many bytes that frees.

    It costs nothing for as many units as have copies that fit behind others, the first ones first.
    The last unit of a stage is left out: nothing runs while it comes back.
    """
    bandwidth = host_bandwidth(device)
    costs: dict[int, tuple[float, int]] = {}
    # since the last unit that costs nothing: seconds of forwards and backwards
    forward = backward = last = 0.0
    for unit in stage.units[:-1]:
        forward += seconds[unit].forward
        backward += seconds[unit].backward
        if unit not in candidates:
            continue
        size = tape_bytes(units, stage, unit)
        copy = size / bandwidth
        left = sum(seconds[each].backward for each in range(unit + 1, stage.last))
        if min(forward, backward) >= last and left >= copy:
            costs[unit] = (0.0, size)
            forward = backward = 0.0
            last = copy
        else:
            # it waits for the copy before, and the next one waits for its own
            beside = seconds[unit + 1]
            late = max(0.0, copy - beside.forward) + max(0.0, copy - beside.backward)
            costs[unit] = (2 * late, size)
    return costs
