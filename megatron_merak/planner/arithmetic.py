"""Time of a unit's matrix products and attention, from rates measured at their shapes or from the device's peak."""

from dataclasses import dataclass

from megatron_merak.cluster import Device
from megatron_merak.plan import Unit


@dataclass(frozen=True)
class Arithmetic:
    """Seconds per micro-batch; ``weight`` is the part of ``backward`` that computes weight gradients."""

    forward: float
    backward: float
    weight: float


def arithmetic(unit: Unit, device: Device, dtype: str) -> Arithmetic:
    """Return the compute time of a unit, without memory traffic of saved activations.

    Uses the device's peak where its shape or dtype was not measured.
    """
    return _measured(unit, device, dtype) or _by_peak(unit, device, dtype)


def _by_peak(unit: Unit, device: Device, dtype: str) -> Arithmetic:
    def seconds(flops: float) -> float:
        return device.compute_time(flops, 0, dtype)

    forward_extra, backward_extra = unit.more_flops
    of_inputs, of_weights = unit.unneeded_flops
    weight = unit.flops - unit.attention_flops - of_weights
    backward = 2 * unit.flops + backward_extra - of_inputs - of_weights
    return Arithmetic(seconds(unit.flops + forward_extra), seconds(backward), seconds(weight))


def _measured(unit: Unit, device: Device, dtype: str) -> Arithmetic | None:
    """Return the time by measured rates: each product at the rate of the nearest shape; None if not measured.

    FLOPs in no listed product take the mean rate of the products. The rate of attention includes its extra FLOPs; where
    a unit has no attention, its extra FLOPs take the rate of the forward products.
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
    inputs = inputs * of_inputs
    weights = weights * of_weights
    if attention is not None:
        scores = unit.attention_flops / attention.forward, 2 * unit.attention_flops / attention.backward
    else:
        scores = tuple(forward * more / unit.flops for more in unit.more_flops)
    return Arithmetic(forward + scores[0], inputs + weights + scores[1], weights)
