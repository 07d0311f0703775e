"""How long a unit's matrix products and attention take: by rates measured at their shapes, or by the device's peak."""

from dataclasses import dataclass

from megatron_merak.cluster import Device
from megatron_merak.plan import Unit


@dataclass(frozen=True)
class Arithmetic:
    """Seconds of a micro-batch's (``forward``, ``backward``), ``weight`` of the latter for weight gradients."""

    forward: float
    backward: float
    weight: float


def arithmetic(unit: Unit, device: Device, dtype: str) -> Arithmetic:
    """Without the traffic of what is kept. Where a shape or a type was not measured, by the device's peak."""
    return _measured(unit, device, dtype) or _by_peak(unit, device, dtype)


def _by_peak(unit: Unit, device: Device, dtype: str) -> Arithmetic:
    def seconds(flops: float) -> float:
        return device.compute_time(flops, 0, dtype)

    ahead, behind = unit.more_flops
    of_inputs, of_weights = unit.unneeded_flops
    weight = unit.flops - unit.attention_flops - of_weights
    backward = 2 * unit.flops + behind - of_inputs - of_weights
    return Arithmetic(seconds(unit.flops + ahead), seconds(backward), seconds(weight))


def _measured(unit: Unit, device: Device, dtype: str) -> Arithmetic | None:
    """Each product at the rate of the nearest shape, what of the FLOPs no product accounts for at their mean rate.

    What attention computes more is in its rate; what the rest of a unit does is a forward product again.
    """
    if device.rates is None or not unit.products:
        return None
    rows = [device.rates.product(*sides, dtype) for sides in unit.products]
    attention = device.rates.attend(unit.attention_flops, dtype) if unit.attention_flops else None
    if None in rows or (unit.attention_flops and attention is None):
        return None
    work = [2 * m * n * k for m, n, k in unit.products]
    rest = (unit.flops - unit.attention_flops) / sum(work)
    forward, inputs, weights = (
        rest * sum(flops / getattr(row, way) for flops, row in zip(work, rows, strict=True))
        for way in ("forward", "input_gradient", "weight_gradient")
    )
    products = max(unit.flops - unit.attention_flops, 1)
    of_inputs, of_weights = (1 - left / products for left in unit.unneeded_flops)
    inputs, weights = inputs * of_inputs, weights * of_weights
    if attention is not None:
        scores = unit.attention_flops / attention.forward, 2 * unit.attention_flops / attention.backward
    else:
        scores = tuple(forward * more / unit.flops for more in unit.more_flops)
    return Arithmetic(forward + scores[0], inputs + weights + scores[1], weights)
