"""The cost table: profiles by name and by file, and how each mistake in a file is told."""

import dataclasses
import json
import os
from dataclasses import asdict, replace

import pytest

from megatron_merak.cluster import (
    CLUSTERS,
    DEVICES,
    GIB,
    LINKS,
    Cluster,
    Device,
    all_reduce,
    find_cluster,
)
from megatron_merak.errors import ConfigError, PlanError
from megatron_merak.training.plan_file import stored


def test_profiles_are_found_by_name_and_by_device():
    assert find_cluster("dgx-a100").device is DEVICES["A100"]
    assert find_cluster("NVIDIA A100-SXM4-80GB") == find_cluster("A100") == find_cluster("dgx-a100")
    assert find_cluster("NVIDIA GeForce RTX 3090") == CLUSTERS["rtx3090"]
    assert find_cluster("A100 40GB").device.memory == 40 * GIB
    laptop = find_cluster("laptop")
    assert (
        laptop.device is find_cluster("cpu").device and laptop.link([0, 1]) == LINKS["ethernet-1g"]
    )
    for name, cluster in CLUSTERS.items():
        assert cluster.name == name
        assert cluster.link(range(cluster.ranks_per_node)) is cluster.inside
        assert not cluster.crosses(range(cluster.ranks_per_node)) and cluster.crosses(
            range(cluster.ranks_per_node + 1)
        )
    with pytest.raises(
        PlanError, match=r"cluster abacus: there is no such one\. Use one of .*laptop.*json"
    ):
        find_cluster("abacus")


@pytest.mark.parametrize(
    ("device", "cluster", "ranks"),
    [
        ("V100", "dgx-v100", 8),
        ("V100 16GB", "dgx-v100", 8),
        ("H100 PCIe", "h100-pcie", 8),
        ("H100 NVL", "dgx-h100", 8),
        ("GH200", "dgx-gh200", 256),
        ("B200", "dgx-b200", 8),
        ("GB200-NVL72", "gb200-nvl72", 72),
        ("GB300", "gb300-nvl72", 72),
        ("MI300X", "mi300x", 8),
    ],
)
def test_a_device_is_planned_in_its_own_cluster(device, cluster, ranks):
    found = find_cluster(device)
    assert (found.name, found.ranks_per_node) == (cluster, ranks)
    assert not found.crosses(range(ranks)) and found.crosses(range(ranks + 1))


def test_figures_of_gpus_are_of_one_kind():
    """Dense peaks: a 16-bit product is faster than an fp32 one, and both are of tera-FLOPs."""
    for device in DEVICES.values():
        if device.name == "cpu":
            continue
        assert 70e12 <= device.bfloat16_flops <= 2500e12
        assert 1.9 < device.bfloat16_flops / device.float32_flops < 40
        assert 0.5e12 < device.memory_bandwidth <= 8e12
        assert 16 * GIB <= device.memory < 300 * GIB
        practice = device.practice
        assert practice is None or practice.product * device.bfloat16_flops > 80e12


def test_plans_leave_a_part_of_a_devices_memory_to_what_they_do_not_count():
    usable = {
        name: find_cluster(name).device.usable / GIB
        for name in ("cpu", "H100", "A100 40GB", "RTX 3090")
    }
    assert usable == {"cpu": 0, "H100": 76, "A100 40GB": 36, "RTX 3090": 20}
    assert replace(DEVICES["H100"], memory=8 * GIB).usable == 6 * GIB, (
        "never so much that nothing is left"
    )


# By hand, in GB/s: NVLink 240 and eight cards of 23 in a node, or PCIe 12 and one card of 11.
PLACED = [
    ("dgx-a100", [3, 7], 240, 4e-6),
    ("dgx-a100", [7, 8], 23, 10e-6),
    ("dgx-a100", range(0, 64, 8), 23, 10e-6),  # one rank in each of eight nodes
    ("dgx-a100", range(0, 64, 4), 46, (7 * 10e-6 + 8 * 4e-6) / 15),  # two in each
    ("dgx-a100", range(64), 184, (7 * 10e-6 + 56 * 4e-6) / 63),
    # eight cards of 46 are more than NVLink
    ("dgx-h100", range(16), 360, (10e-6 + 14 * 4e-6) / 15),
    ("dgx-a100", range(6, 18), 46, (2 * 10e-6 + 9 * 4e-6) / 11),  # two, eight and two
    ("rtx3090", [0, 8], 11 / 8, 20e-6),  # while the seven others use the card as well
    ("rtx3090", range(16), 11, (20e-6 + 14 * 10e-6) / 15),
    ("cpu", range(128), 1.7, (20e-6 + 126 * 170e-6) / 127),
]


@pytest.mark.parametrize(("name", "ranks", "bandwidth", "latency"), PLACED)
def test_a_group_has_the_network_cards_of_its_ranks(name, ranks, bandwidth, latency):
    link = CLUSTERS[name].link(ranks)
    assert (link.bandwidth, link.latency) == (
        pytest.approx(bandwidth * 1e9),
        pytest.approx(latency),
    )


def test_a_node_may_have_any_number_of_network_cards():
    own = replace(CLUSTERS["dgx-a100"], ranks_per_node=4)
    assert [replace(own, nics=cards).link([0, 4]).bandwidth / 1e9 for cards in (0, 1, 2, 4, 8)] == [
        23,
        5.75,
        11.5,
        23,
        46,
    ]
    plain = asdict(own)
    del plain["nics"]
    assert Cluster.from_dict(plain, "cluster") == replace(own, nics=0), "as files said it before"


def test_an_all_reduce_that_fills_nodes_is_as_fast_as_all_of_their_network_cards():
    """The bus bandwidth, as nccl-tests define it, hardly depends on the number of nodes."""
    for nodes, busy in ((1, 240e9), (2, 184e9), (16, 184e9)):
        ranks, message = 8 * nodes, 8 * 2**30
        seconds = all_reduce(ranks, message, CLUSTERS["dgx-a100"].link(range(ranks)))
        assert 2 * (ranks - 1) / ranks * message / seconds == pytest.approx(busy, rel=0.02)


def test_rtx_3090():
    device = DEVICES["RTX 3090"]
    assert (device.flops("bfloat16"), device.flops("float32")) == (71e12, 35.6e12)
    assert (device.memory_bandwidth, device.memory) == (936e9, 24 * GIB)


def test_a_kernel_takes_the_longer_of_arithmetic_and_traffic():
    device = Device("d", 100.0, 50.0, 10.0, 0, 0.5, 0.25)
    assert device.kernel_time(100, 10, "bfloat16") == 0.25 + 2
    assert device.kernel_time(100, 10, "float32") == 0.25 + 4
    assert device.kernel_time(100, 90, "float32") == 0.25 + 9
    assert device.compute_time(100, 90, "float32") == 4 + 9


@pytest.mark.parametrize("name", CLUSTERS)
def test_files_read_back_what_was_written(name, tmp_path):
    path = tmp_path / "mine.json"
    CLUSTERS[name].to_json(path)
    assert find_cluster(str(path)) == CLUSTERS[name]


def test_a_file_may_name_rows_of_the_table(tmp_path):
    path = tmp_path / "mine.json"
    fast = {"name": "fast", "latency": 0, "bandwidth": 1e12}
    path.write_text(
        json.dumps(
            {"device": "H100", "ranks_per_node": 4, "inside": fast, "between": "ethernet-1g"}
        )
    )
    cluster = Cluster.from_json(path)
    assert (
        cluster.device is DEVICES["H100"]
        and cluster.inside.bandwidth == 1e12
        and cluster.name == "mine"
    )


def _without(key):
    return lambda found: found.pop(key)


def _with(place, key, value):
    return lambda found: (found[place] if place else found).__setitem__(key, value)


MISTAKES = [
    (_without("inside"), "key inside: it is missing"),
    (_with("", "speed", 1), "key speed: it is unknown"),
    (_with("device", "speed", 1), "device: key speed: it is unknown"),
    (
        _with("device", "memory_bandwidth", -1),
        "device: memory_bandwidth -1: it cannot be. Use a finite number above 0",
    ),
    (_with("device", "float32_flops", float("nan")), "NaN is not a number"),
    (_with("device", "matmul_efficiency", 1.5), "matmul_efficiency 1.5: it exceeds 1"),
    (
        _with("between", "latency", -1e-6),
        "between: latency -1e-06: it cannot be. Use a finite number, at least 0",
    ),
    (_with("between", "bandwidth", "fast"), "bandwidth 'fast': it is not a number"),
    (_with("", "ranks_per_node", 2.5), "ranks_per_node 2.5: it is not a whole number"),
    (_with("", "ranks_per_node", True), "ranks_per_node True: it is not a whole number"),
    (_with("", "ranks_per_node", 0), "ranks_per_node 0: it cannot be"),
    (_with("", "nics", -1), "nics -1: it cannot be. Use a finite number, at least 0"),
    (_with("", "nics", 1.5), "nics 1.5: it is not a whole number"),
    (_with("", "inside", "string"), "inside string: it is not in the table"),
    (_with("", "inside", [1]), "inside: it is not an object"),
]


@pytest.mark.parametrize(("change", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_mistakes_in_a_file(change, message, tmp_path):
    found = dataclasses.asdict(CLUSTERS["laptop"])
    change(found)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError) as error:
        find_cluster(str(path))
    assert message in str(error.value) and str(path) in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        find_cluster(str(tmp_path / "none.json"))
    (tmp_path / "torn.json").write_text('{"device": ')
    with pytest.raises(ConfigError, match="it is not JSON"):
        find_cluster(str(tmp_path / "torn.json"))


def test_a_fifo_is_no_cluster_file_and_no_plan(tmp_path):
    os.mkfifo(tmp_path / "fifo.json")
    with pytest.raises(ConfigError, match="not a regular file"):
        Cluster.from_json(tmp_path / "fifo.json")
    with pytest.raises(PlanError, match="not a regular file"):
        stored(str(tmp_path / "fifo.json"))
