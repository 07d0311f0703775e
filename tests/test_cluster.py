"""The cost table: profiles by name and by file, and how each mistake in a file is told."""

import dataclasses
import json
import os

import pytest

from megatron_merak.cluster import CLUSTERS, DEVICES, GIB, LINKS, Cluster, Device, find_cluster
from megatron_merak.errors import ConfigError, PlanError
from megatron_merak.training.plan_file import stored


def test_profiles_are_found_by_name_and_by_device():
    assert find_cluster("dgx-a100").device is DEVICES["A100"]
    assert find_cluster("NVIDIA A100-SXM4-80GB") == find_cluster("A100") == find_cluster("dgx-a100")
    assert find_cluster("NVIDIA GeForce RTX 3090") == CLUSTERS["rtx3090"]
    assert find_cluster("A100 40GB").device.memory == 40 * GIB
    laptop = find_cluster("laptop")
    assert laptop.device is find_cluster("cpu").device and laptop.link([0, 1]) is LINKS["ethernet-1g"]
    for name, cluster in CLUSTERS.items():
        assert cluster.name == name
        assert cluster.link(range(cluster.ranks_per_node)) is cluster.inside
        assert cluster.link(range(cluster.ranks_per_node + 1)) is cluster.between
    with pytest.raises(PlanError, match=r"cluster abacus: there is no such one\. Use one of .*laptop.*json"):
        find_cluster("abacus")


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
    path.write_text(json.dumps({"device": "H100", "ranks_per_node": 4, "inside": fast, "between": "ethernet-1g"}))
    cluster = Cluster.from_json(path)
    assert cluster.device is DEVICES["H100"] and cluster.inside.bandwidth == 1e12 and cluster.name == "mine"


def _without(key):
    return lambda found: found.pop(key)


def _with(place, key, value):
    return lambda found: (found[place] if place else found).__setitem__(key, value)


MISTAKES = [
    (_without("inside"), "key inside: it is missing"),
    (_with("", "speed", 1), "key speed: it is unknown"),
    (_with("device", "speed", 1), "device: key speed: it is unknown"),
    (_with("device", "memory_bandwidth", -1), "device: memory_bandwidth -1: it cannot be. Use a finite number above 0"),
    (_with("device", "float32_flops", float("nan")), "float32_flops nan: it cannot be"),
    (_with("device", "matmul_efficiency", 1.5), "matmul_efficiency 1.5: it exceeds 1"),
    (_with("between", "latency", -1e-6), "between: latency -1e-06: it cannot be. Use a finite number, at least 0"),
    (_with("between", "bandwidth", "fast"), "bandwidth 'fast': it is not a number"),
    (_with("", "ranks_per_node", 2.5), "ranks_per_node 2.5: it is not a whole number"),
    (_with("", "ranks_per_node", True), "ranks_per_node True: it is not a whole number"),
    (_with("", "ranks_per_node", 0), "ranks_per_node 0: it cannot be"),
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
