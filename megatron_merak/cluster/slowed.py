"""A cluster of which every rate is lower by one factor: that by which steps take longer than
predicted.
"""

from dataclasses import replace
from typing import TypeVar

from megatron_merak.cluster.rates import AttentionRate, ProductRate, Rates
from megatron_merak.cluster.table import Cluster, Device, Link

_RowT = TypeVar("_RowT", ProductRate, AttentionRate)
_PRODUCTS = ("forward", "input_gradient", "weight_gradient")
_ATTENTION = ("forward", "backward")


def slowed(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with which a plan predicts a step of ``factor`` times the seconds."""
    if factor == 1:
        return cluster
    return replace(
        cluster,
        device=_device(cluster.device, factor),
        inside=_link(cluster.inside, factor),
        between=_link(cluster.between, factor),
    )


def _device(device: Device, factor: float) -> Device:
    practice = device.practice
    if practice is not None:
        practice = replace(
            practice, step=practice.step * factor, handover=practice.handover * factor
        )
    return replace(
        device,
        bfloat16_flops=device.bfloat16_flops / factor,
        float32_flops=device.float32_flops / factor,
        memory_bandwidth=device.memory_bandwidth / factor,
        dispatch=device.dispatch * factor,
        fp8_flops=device.fp8_flops / factor,
        host_bandwidth=device.host_bandwidth / factor,
        rates=None if device.rates is None else _rates(device.rates, factor),
        practice=practice,
        step_factor=device.step_factor * factor,
    )


def _rates(rates: Rates, factor: float) -> Rates:
    return replace(
        rates,
        products=tuple(_row(row, _PRODUCTS, factor) for row in rates.products),
        attention=tuple(_row(row, _ATTENTION, factor) for row in rates.attention),
    )


def _row(row: _RowT, names: tuple[str, ...], factor: float) -> _RowT:
    return replace(row, **{name: getattr(row, name) / factor for name in names})


def _link(link: Link, factor: float) -> Link:
    return replace(link, latency=link.latency * factor, bandwidth=link.bandwidth / factor)
