"""What operands in fp8 are priced at: products at the rate of the device, and passes that round."""

from dataclasses import replace

import pytest

from megatron_merak.cluster import CLUSTERS, DEVICES
from megatron_merak.plan import Grid, Unit
from megatron_merak.planner.arithmetic import arithmetic
from megatron_merak.planner.cost import ROUNDED_BYTES, unit_costs

WIDE = Unit(
    name="layer",
    kind="layer",
    parameters=4096 * 4096,
    flops=2 * 8192 * 4096 * 4096,
    saved_bytes=0,
    output_bytes=0,
    products=((8192, 4096, 4096),),
)
NARROW = replace(WIDE, fp8_flops=WIDE.flops)


@pytest.mark.parametrize("practice", [True, False])
def test_products_take_the_rate_of_the_device(practice):
    device = DEVICES["H100"]
    device = device if practice else replace(device, practice=None)
    wide, narrow = (arithmetic(unit, device, "bfloat16") for unit in (WIDE, NARROW))
    assert narrow.forward == pytest.approx(wide.forward / 2)
    assert narrow.backward == pytest.approx(wide.backward / 2)
    assert narrow.weight == pytest.approx(wide.weight / 2)
    half = replace(WIDE, fp8_flops=WIDE.flops // 2)
    assert arithmetic(half, device, "bfloat16").forward == pytest.approx(0.75 * wide.forward)


@pytest.mark.parametrize("name", ["cpu", "A100"])
def test_a_device_without_such_products_takes_its_usual_time(name):
    one, other = (arithmetic(unit, DEVICES[name], "bfloat16") for unit in (WIDE, NARROW))
    assert one == other


def test_rounding_moves_bytes():
    cluster = CLUSTERS["dgx-h100"]
    rounds = replace(NARROW, rounded_values=(10**6, 2 * 10**6))
    one, other = unit_costs((NARROW, rounds), cluster, "bfloat16", Grid())
    each = cluster.device.passes_time(ROUNDED_BYTES * 10**6)
    assert other.forward - one.forward == pytest.approx(each)
    assert other.backward - one.backward == pytest.approx(2 * each)


def test_rates_are_those_of_data_sheets():
    """Dense: half of what is printed with sparsity."""
    assert DEVICES["H100"].fp8_flops == pytest.approx(3958e12 / 2, rel=1e-3)
    assert DEVICES["MI300X"].fp8_flops == pytest.approx(2614.9e12, rel=1e-3)
    assert not DEVICES["A100"].fp8_flops and not DEVICES["V100"].fp8_flops
