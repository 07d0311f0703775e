"""Measured rates: nearest shapes, the file that holds them and what it refuses, and what plans make
of them.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_merak import MerakArguments
from megatron_merak.cluster import (
    CLUSTERS,
    AttentionRate,
    Cluster,
    Device,
    ProductRate,
    Profile,
    Rates,
    all_gather,
    all_reduce,
    find_cluster,
    profiled,
    read_profile,
    reduce_scatter,
    send,
)
from megatron_merak.cluster.link_times import LinkTime, fitted
from megatron_merak.config import Config, ParallelConfig
from megatron_merak.errors import ConfigError
from megatron_merak.hf_trainer.engine import wishes
from megatron_merak.parallel.launch import World
from megatron_merak.plan import Grid, Plan, Unit
from megatron_merak.planner.cost import unit_costs
from megatron_merak.planner.make import plan_chain
from megatron_merak.stages.devices import cluster_of
from megatron_merak.training.planned import configured, parser, planned
from tests.requests import request

# FLOP/s of round numbers, so that times can be added by hand; copies take no time that shows.
RATES = Rates(
    (
        ProductRate(8, 16, 4, "float32", 1e3, 2e3, 4e3),
        ProductRate(800, 1600, 400, "float32", 1e6, 1e6, 1e6),
        ProductRate(8, 16, 4, "bfloat16", 1.0, 1.0, 1.0),
    ),
    (
        AttentionRate(1e3, 16, 32, "float32", 100.0, 50.0),
        AttentionRate(1e6, 16, 32, "float32", 1e5, 1e5),
        AttentionRate(1e6, 256, 32, "float32", 7.0, 7.0),
        AttentionRate(1e6, 16, 128, "float32", 8.0, 8.0),
    ),
    "by hand",
)
DEVICE = Device("cpu", 400e9, 240e9, 1e30, 0, 1.0, rates=RATES)
HERE = replace(CLUSTERS["cpu"], device=DEVICE)
# by a link of 1 ms and 1 MB/s: what each sends, and how often
TIMES = (
    LinkTime("inside", "all-reduce", 4, 1000, 6 * (1e-3 + 250e-6)),
    LinkTime("inside", "all-gather", 4, 1000, 3 * (1e-3 + 1e-3)),
    LinkTime("inside", "reduce-scatter", 4, 8000, 3 * (1e-3 + 8e-3)),
    LinkTime("inside", "message", 2, 5000, 1e-3 + 5e-3),
)


def profile_of(device=DEVICE, links=()):
    return Profile(device, links, 1, 0.0, "cpu", "2026-11-23", "2.11")


LINEAR = Unit(
    "u", "u", parameters=64, flops=1024, saved_bytes=0, output_bytes=1, products=((8, 16, 4),)
)


def cost(unit, cluster=HERE, dtype="float32"):
    return unit_costs([unit], cluster, dtype, Grid())[0]


def test_the_nearest_shape_and_size_count():
    assert RATES.product(9, 17, 4, "float32").forward == 1e3
    assert RATES.product(100, 1600, 400, "float32").forward == 1e6
    assert RATES.product(8, 16, 4, "float16") is None
    assert (
        RATES.attend(2e3, "float32").backward == 50.0
        and RATES.attend(1e9, "float32").backward == 1e5
    )
    # heads count first, then size
    assert RATES.attend(1e3, "float32", (200, 40)).forward == 7.0
    assert RATES.attend(1e3, "float32", (20, 100)).forward == 8.0
    assert RATES.attend(1e6, "float32", (20, 32)).forward == 1e5


def test_links_are_fitted_by_hand():
    link = profile_of(links=TIMES).link("inside")
    assert (link.latency, link.bandwidth) == pytest.approx((1e-3, 1e6))
    for time in TIMES:  # the cost table's own formulas
        shares = {
            "all-reduce": all_reduce,
            "all-gather": all_gather,
            "reduce-scatter": reduce_scatter,
        }
        if time.what in shares:
            assert shares[time.what](4, time.size, link) == pytest.approx(time.seconds)
    assert send(5000, link) == pytest.approx(TIMES[-1].seconds)
    assert profile_of(links=TIMES).link("between") is None
    # errors of both signs are even: a time twice and one half of what the link says
    uneven = [
        replace(TIMES[3], size=size, seconds=size / 1e6 * far)
        for size, far in ((1e6, 2), (1e6, 0.5))
    ]
    assert fitted(uneven, "inside").bandwidth == pytest.approx(1e6)


def test_measured_links_take_the_place_of_the_tables(tmp_path):
    path = tmp_path / "profile.json"
    h100 = replace(find_cluster("H100").device, rates=RATES)
    path.write_text(replace(profile_of(h100, TIMES), measured_on="NVIDIA H100").to_json())
    found = profiled(find_cluster("H100"), str(path))
    assert found.inside.bandwidth == pytest.approx(1e6) and found.between.bandwidth == 46e9
    # what was measured is not multiplied by what training reaches of a figure
    assert found.device.practice.inside == 1.0 and found.device.practice.between == 1.91


def test_times_of_a_unit_add_up_by_hand():
    linear = cost(LINEAR)
    assert (linear.forward, linear.backward) == pytest.approx((1.024, 0.512 + 0.256))
    assert linear.weight == pytest.approx(0.256)
    attentive = cost(replace(LINEAR, flops=2024, attention_flops=1000, more_flops=(0, 500)))
    assert (attentive.forward, attentive.backward) == pytest.approx((1.024 + 10, 0.768 + 40))
    # eight chunks of one measured shape, whose products are made once more in the backward
    chunked = cost(replace(LINEAR, flops=8 * 1024, more_flops=(0, 8 * 1024)))
    assert (chunked.forward, chunked.backward) == pytest.approx((8 * 1.024, 8 * (0.768 + 1.024)))


def test_what_was_not_measured_counts_by_the_peak():
    bare = replace(HERE, device=replace(DEVICE, rates=None))
    for unit, dtype in ((replace(LINEAR, products=()), "float32"), (LINEAR, "float16")):
        assert cost(unit, dtype=dtype) == cost(unit, bare, dtype)
    assert cost(LINEAR) != cost(LINEAR, bare)


def test_a_stored_plan_predicts_the_same_with_its_rates():
    plan = plan_chain([LINEAR, replace(LINEAR, name="v")], request(microbatches=2), HERE)
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.cluster.device.rates == RATES
    assert plan.predicted_time == pytest.approx(2 * 2 * (1.024 + 0.768))


def test_a_profile_is_read_back_and_takes_the_place_of_the_tables_device(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(profile_of().to_json())
    assert read_profile(path) == profile_of()
    path.write_text(profile_of(links=TIMES).to_json())
    assert read_profile(path).links == TIMES
    path.write_text(profile_of().to_json())
    assert read_profile(path).device == DEVICE and profiled(CLUSTERS["cpu"], str(path)) == HERE
    assert profiled(CLUSTERS["laptop"], None) is CLUSTERS["laptop"]
    HERE.to_json(tmp_path / "cluster.json")  # what --emulate reads
    assert Cluster.from_json(tmp_path / "cluster.json") == HERE
    with pytest.raises(
        ConfigError, match=r"--device-profile .*it was measured on cpu, and this plan is for H100"
    ):
        profiled(find_cluster("H100"), str(path))


def test_runs_and_tools_plan_with_it(tmp_path):
    path = str(tmp_path / "profile.json")
    Path(path).write_text(profile_of().to_json())
    assert cluster_of(World(0, 1, torch.device("cpu")), path) == HERE
    with pytest.raises(
        ConfigError, match=r"--device-profile .*an emulated cluster defines its own device"
    ):
        cluster_of(World(0, 1, torch.device("cpu"), CLUSTERS["dgx-a100"]), path)

    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --vocab-size 9"
    config, own = configured(
        parser("", "", Config)[0], [*shape.split(), "--world-size", "1", "--device-profile", path]
    )
    (found, _), (usual, _) = (
        planned(config, own),
        planned(replace(config, parallel=ParallelConfig()), own),
    )
    assert (
        found.cluster == HERE
        and usual.cluster == CLUSTERS["cpu"]
        and found.predicted_time > usual.predicted_time
    )

    arguments = MerakArguments(str(tmp_path), use_cpu=True, report_to="none", device_profile=path)
    assert wishes(arguments)["cluster"] == HERE


def _change(*path, to):
    def change(found):
        for key in path[:-1]:
            found = found[key]
        found[path[-1]] = to

    return change


MISTAKES = [
    (_change("version", to=1), "it is of version 1, and this library reads version 2"),
    (_change("links", to={}), "links {}: it is not a list"),
    (_change("links", 0, "size", to=None), "links: row 0: size None: it is not a finite number"),
    (
        _change("links", 1, "ranks", to=1.5),
        "row 1: ranks 1.5: it is not a whole number of at least",
    ),
    (_change("links", 2, "what", to="gather"), "row 2: what 'gather': it is none of all-reduce"),
    (lambda found: found["links"][3].pop("where"), "links: row 3"),
    (_change("ranks", to="8"), "ranks '8': it is not a number of at least 1"),
    (_change("host_copy", to=-1), "host_copy -1: it is not a number of at least 0"),
    (_change("device", "rates", "attention", 1, "length", to=0), "row 1: length 0: it is not a"),
    (_change("speed", to=2), "the key speed is unknown"),
    (lambda found: found.pop("date"), "the key date is missing"),
    (_change("device", "rates", to=None), "it holds no measured product"),
    (_change("device", "rates", "products", to=[]), "it holds no measured product"),
    (
        _change("device", "rates", to=[1]),
        "device: rates (keys): it is not an object of products, attention and source",
    ),
    (_change("device", "rates", "products", to=3), "device: rates: products 3: it is not a list"),
    (
        _change("device", "rates", "products", 0, "m", to=-1),
        "products: row 0: m -1: it is not a finite number above 0",
    ),
    (
        _change("device", "rates", "products", 1, "dtype", to=1),
        "products: row 1: dtype 1: it is not text",
    ),
    (_change("device", "rates", "attention", 0, "more", to=1), "attention: row 0"),
    (_change("device", "memory_bandwidth", to=0), "device: memory_bandwidth 0: it cannot be"),
]


@pytest.mark.parametrize(("change", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_broken_profile_is_refused_by_name(change, message, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(profile_of(links=TIMES).to_json())
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError) as error:
        read_profile(path)
    assert message in str(error.value) and str(path) in str(error.value)


def test_a_file_that_is_no_profile_is_refused(tmp_path):
    path = tmp_path / "profile.json"
    for text, message in (("{", "it is not JSON"), ("[]", "it is no profile of a device")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_profile(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_profile(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_profile(tmp_path)
