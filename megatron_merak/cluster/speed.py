"""A device of which every rate is lower by one factor."""

from dataclasses import replace
from typing import TypeVar

from megatron_merak.cluster.device import Device
from megatron_merak.cluster.rates import AttentionRate, ProductRate, Rates

_RowT = TypeVar("_RowT", ProductRate, AttentionRate)
_PRODUCTS = ("forward", "input_gradient", "weight_gradient")
_ATTENTION = ("forward", "backward")


def slower(device: Device, factor: float) -> Device:
    """Return the device with which every operation, and every copy from or to its host, takes
    ``factor`` times the seconds. Its memory stays, and what training reaches of its figures.
    """
    return replace(
        device,
        bfloat16_flops=device.bfloat16_flops / factor,
        float32_flops=device.float32_flops / factor,
        memory_bandwidth=device.memory_bandwidth / factor,
        dispatch=device.dispatch * factor,
        fp8_flops=device.fp8_flops / factor,
        host_bandwidth=device.host_bandwidth / factor,
        rates=None if device.rates is None else _rates(device.rates, factor),
    )


def _rates(rates: Rates, factor: float) -> Rates:
    return replace(
        rates,
        products=tuple(_row(row, _PRODUCTS, factor) for row in rates.products),
        attention=tuple(_row(row, _ATTENTION, factor) for row in rates.attention),
    )


def _row(row: _RowT, names: tuple[str, ...], factor: float) -> _RowT:
    return replace(row, **{name: getattr(row, name) / factor for name in names})
