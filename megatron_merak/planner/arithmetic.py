"""Time of a unit's matrix products and attention: from rates measured at their shapes, by their
tiles on the device, or from its peak.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_merak.cluster import Device, Practice
from megatron_merak.plan import DTYPE_BYTES, Unit
from megatron_merak.planner.tiles import product_seconds


@dataclass(frozen=True)
class Arithmetic:
    """Seconds per micro-batch; ``weight`` is the part of ``backward`` that computes weight
    gradients.
    """

    forward: float
    backward: float
    weight: float


@dataclass(frozen=True)
class _Products:
    """Seconds of a unit's products without attention: forward, gradients of inputs, of weights."""

    forward: float
    inputs: float
    weights: float

    @classmethod
    def of(cls, unit: Unit, seconds: Callable[[int, str], float], share: float) -> "_Products":
        """Return the times of all products of a unit that lists some; gradients that are not needed
        take none.

        seconds: of a listed product, by its place and "forward", "input_gradient" or
                 "weight_gradient".
        share:   of these times that is left.
        """
        work = sum(2 * m * n * k for m, n, k in unit.products)
        products = unit.flops - unit.attention_flops
        rest = share * products / work
        of_inputs, of_weights = (1 - left / max(products, 1) for left in unit.unneeded_flops)

        def together(way: str) -> float:
            return rest * sum(seconds(place, way) for place in range(len(unit.products)))

        return cls(
            together("forward"),
            together("input_gradient") * of_inputs,
            together("weight_gradient") * of_weights,
        )


def arithmetic(unit: Unit, device: Device, dtype: str) -> Arithmetic:
    """Return the compute time of a unit, without memory traffic of saved activations.

    Where its shape or dtype was not measured, products are priced by their tiles if the device has
    ``practice``, else by its peak.
    """
    found = _measured(unit, device, dtype)
    if found is None and device.practice is not None and unit.products:
        found = _by_tiles(unit, device, dtype, device.practice)
    if found is None:
        found = _by_peak(unit, device, dtype)
    return found if unit.backward else Arithmetic(found.forward, 0.0, 0.0)


def _share(unit: Unit, device: Device, dtype: str) -> float:
    """Return what operands in fp8 leave of the time of a unit's products, attention's aside: each of
    theirs takes as much less as the peaks are apart.
    """
    if not unit.fp8_flops or device.fp8_flops <= device.flops(dtype):
        return 1.0
    less = 1 - device.flops(dtype) / device.fp8_flops
    return 1 - less * unit.fp8_flops / (unit.flops - unit.attention_flops)


def _by_peak(unit: Unit, device: Device, dtype: str) -> Arithmetic:
    def seconds(flops: float) -> float:
        return device.compute_time(flops, 0, dtype)

    forward_extra, backward_extra = unit.more_flops
    of_inputs, of_weights = unit.unneeded_flops
    share = _share(unit, device, dtype)
    scores = unit.attention_flops
    products = unit.flops - scores
    forward = share * products + scores + forward_extra
    backward = share * (2 * products - of_inputs - of_weights) + 2 * scores + backward_extra
    return Arithmetic(seconds(forward), seconds(backward), seconds(share * (products - of_weights)))


def _by_tiles(unit: Unit, device: Device, dtype: str, practice: Practice) -> Arithmetic:
    """Return the time of each product by its shape, and of attention by its own rate.

    FLOPs in no listed product take the mean rate of the products; where a unit has no attention,
    its extra FLOPs take the rate of the forward products.
    """
    size = DTYPE_BYTES[dtype]

    def seconds(place: int, way: str) -> float:
        m, n, k = unit.products[place]
        shapes = {
            "forward": (m, n, k),
            "input_gradient": (m, k, n),
            "weight_gradient": (n, k, m),
        }
        return product_seconds(shapes[way], dtype, size, device)

    products = _Products.of(unit, seconds, _share(unit, device, dtype))
    share = practice.attention_drops if unit.attention_drops else practice.attention
    rate = device.flops(dtype) * share
    more = tuple(
        extra / rate if unit.attention_flops else products.forward * extra / unit.flops
        for extra in unit.more_flops
    )
    scores = unit.attention_flops / rate
    return Arithmetic(
        products.forward + scores + more[0],
        products.inputs + products.weights + 2 * scores + more[1],
        products.weights,
    )


def _measured(unit: Unit, device: Device, dtype: str) -> Arithmetic | None:
    """Return the time by measured rates: each product at the rate of the nearest shape; None if not
    measured.

    FLOPs in no listed product take the mean rate of the products. The rate of attention includes
    its extra FLOPs; where a unit has no attention, its extra FLOPs take the rate of the forward
    products.
    """
    if device.rates is None or not unit.products:
        return None
    rows = [device.rates.product(*sides, dtype) for sides in unit.products]
    attention = None
    if unit.attention_flops:
        attention = device.rates.attend(unit.attention_flops, dtype, unit.attention_heads)
    if None in rows or (unit.attention_flops and attention is None):
        return None

    def seconds(place: int, way: str) -> float:
        m, n, k = unit.products[place]
        return 2 * m * n * k / getattr(rows[place], way)

    products = _Products.of(unit, seconds, _share(unit, device, dtype))
    if attention is not None:
        scores = (
            unit.attention_flops / attention.forward,
            2 * unit.attention_flops / attention.backward,
        )
    else:
        ahead, behind = (products.forward * more / unit.flops for more in unit.more_flops)
        scores = (ahead, behind)
    return Arithmetic(
        products.forward + scores[0],
        products.inputs + products.weights + scores[1],
        products.weights,
    )
