"""What training reaches of a device's figures: where each constant counts, by hand, and the JSON of
a device that has them.
"""

import json
import math
from dataclasses import asdict, replace

import pytest

from megatron_merak.cluster import (
    CLUSTERS,
    DEVICES,
    GIB,
    PRACTICE,
    Cluster,
    Practice,
    reserving,
)
from megatron_merak.config import ParallelConfig
from megatron_merak.errors import ConfigError
from megatron_merak.plan import Grid, Plan, Unit
from megatron_merak.plan.table import memory_text
from megatron_merak.planner.cost import GAP, unit_costs
from megatron_merak.planner.links import link_along, reached_along
from megatron_merak.planner.make import plan_chain
from megatron_merak.planner.predict import ending, stage_costs, timeline
from tests.requests import request

DGX = CLUSTERS["dgx-h100"]
EVERYTHING = Practice(
    product=1.0,
    attention=1.0,
    attention_drops=0.25,
    passes=1.0,
    inside=1.0,
    between=1.0,
    step=0.0,
    handover=0.0,
    skew=0.0,
    low=1.0,
    high=1.0,
)
UNIT = Unit(
    "u",
    "u",
    parameters=4096**2,
    flops=2 * 4096**3 + 10**9,
    saved_bytes=10**8,
    output_bytes=10**7,
    operations=(10, 20),
    attention_flops=10**9,
    more_flops=(0, 10**9 // 2),
    products=((4096, 4096, 4096),),
)


def with_practice(cluster=DGX, **constants):
    practice = replace(EVERYTHING, **constants)
    return replace(cluster, device=replace(cluster.device, practice=practice))


def cost(unit=UNIT, **constants):
    return unit_costs([unit], with_practice(**constants), "bfloat16", Grid())[0]


def test_passes_and_attention_by_hand():
    one = cost()
    device = DGX.device
    moved = 2 * 10**8 + 10**7
    gradient = 8 * 4096**2
    slower = cost(passes=3.0)
    assert slower.forward - one.forward == pytest.approx(2 * moved / device.memory_bandwidth)
    assert slower.backward - one.backward == pytest.approx(
        2 * (2 * moved + gradient) / device.memory_bandwidth
    )
    scores = 10**9 / device.bfloat16_flops
    assert cost(attention=0.5).forward - one.forward == pytest.approx(scores)
    assert cost(attention=0.5).backward - one.backward == pytest.approx(2.5 * scores)
    dropping = replace(UNIT, attention_drops=True)
    assert cost(dropping).forward - one.forward == pytest.approx(3 * scores)
    launched = cost(replace(UNIT, operations=(110, 220)))
    assert launched.forward - one.forward == pytest.approx(100 * GAP)
    assert launched.backward - one.backward == pytest.approx(200 * GAP)


def test_units_that_differ_by_name_alone_cost_the_same():
    first, second, third = unit_costs(
        [UNIT, replace(UNIT, name="v"), replace(UNIT, saved_bytes=0)], DGX, "bfloat16", Grid()
    )
    assert first == second != third


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_links_have_their_share_and_only_sums_have_more_than_a_card(share):
    grid = Grid(tp=8, dp=8)
    shared = with_practice(inside=share, between=share)
    least = min(share, 1.0)
    for axis, expected in (("tp", share), ("dp", least), ("pp", least)):
        figure = link_along(shared, grid, axis).bandwidth
        assert reached_along(shared, grid, axis).bandwidth == pytest.approx(expected * figure)
    figure = link_along(shared, grid, "dp").bandwidth
    assert reached_along(shared, grid, "dp", summed=True).bandwidth == share * figure


def test_without_constants_links_are_as_the_table_has_them():
    grid = Grid(tp=4, dp=4)
    cpu = CLUSTERS["cpu"]
    assert cpu.device.practice is None
    for axis in ("tp", "dp", "pp"):
        assert reached_along(cpu, grid, axis) == link_along(cpu, grid, axis)


def test_an_emulated_cluster_has_its_figures_whole():
    figures = with_practice(product=0.1, passes=9.0, inside=0.1).by_figures
    device = figures.device
    assert (
        device.practice is None and replace(device, practice=EVERYTHING) == with_practice().device
    )
    (one,) = unit_costs([UNIT], figures, "bfloat16", Grid())
    assert one.forward == pytest.approx(
        device.compute_time(UNIT.flops, 2 * 10**8 + 10**7, "bfloat16")
    )


def step(**constants):
    asked = request(Grid(dp=16, pp=2), microbatches=4)
    return plan_chain([UNIT] * 4, asked, with_practice(**constants))


def test_a_step_by_hand():
    one = step()
    base = timeline(one).makespan + ending(one).total
    assert one.predicted_time == base
    assert step(step=0.5).predicted_time == pytest.approx(base + 4 * 0.5)
    nodes = 32 / DGX.ranks_per_node
    assert step(skew=0.1).predicted_time == pytest.approx(base * (1 + 0.1 * math.log2(nodes)))
    waiting = stage_costs(step(handover=1.0))
    plain = stage_costs(one)
    for name in ("forward", "backward"):
        pairs = zip(getattr(waiting, name), getattr(plain, name), strict=True)
        assert [late - soon for late, soon in pairs] == pytest.approx([1.0, 1.0])


def test_one_stage_hands_nothing_over():
    alone = plan_chain([UNIT] * 4, request(), with_practice(handover=1.0))
    assert alone.predicted_time < 1.0


def test_a_stored_cluster_keeps_its_constants(tmp_path):
    path = tmp_path / "own.json"
    with_practice().to_json(path)
    assert Cluster.from_json(path).device.practice == EVERYTHING
    plain = asdict(DGX)
    del plain["device"]["practice"], plain["device"]["multiprocessors"]
    path.write_text(json.dumps(plain), encoding="utf-8")
    before = Cluster.from_json(path).device
    assert before.practice is None and before.multiprocessors == 0


@pytest.mark.parametrize(
    "bad",
    [
        [],
        {"product": 1.0},
        asdict(EVERYTHING) | {"skew": -1},
        asdict(EVERYTHING) | {"product": 0},
        asdict(EVERYTHING) | {"passes": True},
    ],
)
def test_other_constants_are_refused(bad):
    plain = asdict(DGX)
    plain["device"]["practice"] = bad
    with pytest.raises(ConfigError, match="practice"):
        Cluster.from_dict(plain, "here")


def test_a_reserve_is_left_of_a_device_and_stays_in_its_plan(tmp_path):
    asked = request(parallel=ParallelConfig(memory_reserve_gb=10.5))
    plan = plan_chain([UNIT], asked, DGX)
    usable = 69.5 * GIB
    assert plan.cluster.device.usable == usable and DGX.device.usable == 76 * GIB
    assert Plan.from_json(plan.to_json()).cluster.device.usable == usable
    assert "of the 69.5 GiB of H100 that plans use, " in memory_text(plan)
    assert "GiB left (10.5 GiB are kept for what they do not count)" in memory_text(plan)
    everything = plan_chain([UNIT], request(memory_reserve_gb=0.0), DGX)
    assert everything.cluster.device.usable == 80 * GIB
    shared = CLUSTERS["cpu"]
    assert reserving(shared, 4.0) is shared and reserving(DGX, None) is DGX
    with pytest.raises(ConfigError, match=r"--memory-reserve-gb 80: H100 has 80 GiB"):
        reserving(DGX, 80)


@pytest.mark.parametrize("bad", [-1, 0.5, 81 * 2**30, "1"])
def test_another_reserve_is_refused(bad):
    plain = asdict(DGX)
    plain["device"]["reserve"] = bad
    with pytest.raises(ConfigError, match="reserve"):
        Cluster.from_dict(plain, "here")


def test_the_table_is_of_shares_and_seconds():
    for practice in PRACTICE.values():
        assert 0.3 < practice.product <= 1
        assert practice.low < 1 < practice.high or practice.low == practice.high == 0
    assert DEVICES["H100"].practice is PRACTICE["H100"]
