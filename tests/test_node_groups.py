"""Groups of unlike nodes in a cluster's file: what they say of ranks, and how each mistake is told."""

import json
from dataclasses import replace

import pytest

from megatron_merak.cluster import (
    CLUSTERS,
    DEVICES,
    GIB,
    PRACTICE,
    Cluster,
    NodeGroup,
    profiled,
    reserving,
)
from megatron_merak.cluster.slowed import slowed
from megatron_merak.errors import ConfigError, PlanError

FILE = {
    "device": "A100",
    "ranks_per_node": 8,
    "inside": "nvlink3",
    "between": "infiniband-hdr",
    "nodes": [{"count": 2}, {"count": 1, "device": "A100 40GB"}, {"count": 1, "speed": 0.5}],
}


def read(tmp_path, **changes) -> Cluster:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(FILE | changes))
    return Cluster.from_json(path)


def test_a_rank_has_the_device_of_its_node(tmp_path):
    cluster = read(tmp_path)
    names = [cluster.device_at(rank).name for rank in (0, 15, 16, 23, 24, 31)]
    assert names == ["A100", "A100", "A100 40GB", "A100 40GB", "A100 at 0.5", "A100 at 0.5"]
    slow = cluster.device_at(24)
    assert slow.bfloat16_flops == DEVICES["A100"].bfloat16_flops / 2
    assert slow.memory_bandwidth == DEVICES["A100"].memory_bandwidth / 2
    assert slow.host_bandwidth == DEVICES["A100"].host_bandwidth / 2
    assert (slow.memory, slow.practice) == (80 * GIB, PRACTICE["A100"])
    assert str(cluster) == "A100, A100 40GB and A100 at 0.5 (mine)"


def test_files_read_back_what_was_written(tmp_path):
    cluster = read(tmp_path)
    cluster.to_json(tmp_path / "copy.json")
    assert replace(Cluster.from_json(tmp_path / "copy.json"), name="mine") == cluster
    assert "nodes" not in CLUSTERS["dgx-a100"].to_dict()


def test_a_job_has_the_first_nodes(tmp_path):
    cluster = read(tmp_path)
    plain = replace(CLUSTERS["dgx-a100"], name="mine")
    assert cluster.used_by(16) == cluster.used_by(3) == plain
    assert [str(group) for group in cluster.used_by(17).nodes] == ["2 of A100", "1 of A100 40GB"]
    assert cluster.used_by(32) == cluster
    with pytest.raises(PlanError) as error:
        cluster.used_by(33)
    assert str(error.value).startswith(
        "ranks 33: the cluster mine has 4 nodes of 8. Use at most 32"
    )


def test_groups_that_are_alike_are_a_cluster_without_groups(tmp_path):
    plain = replace(CLUSTERS["dgx-a100"], name="mine")
    alike = [{"count": 1}, {"count": 2, "device": "A100"}, {"count": 1, "speed": 1}]
    assert read(tmp_path, nodes=alike).used_by(32) == plain
    assert read(tmp_path, nodes=[]) == plain
    slow = read(tmp_path, nodes=[{"count": 1, "speed": 0.5}, {"count": 3, "speed": 0.5}])
    assert slow.used_by(32).nodes == () and slow.used_by(32).device.name == "A100 at 0.5"


def test_links_of_unlike_devices_have_the_worst_that_training_reaches():
    groups = (NodeGroup(1, DEVICES["A100"]), NodeGroup(1, DEVICES["H100"]))
    practice = replace(CLUSTERS["dgx-a100"], nodes=groups).practice
    one, other = PRACTICE["A100"], PRACTICE["H100"]
    assert practice.inside == min(one.inside, other.inside)
    assert practice.between == min(one.between, other.between)
    assert practice.step == max(one.step, other.step)
    assert (practice.low, practice.high) == (0, 0)


def test_all_devices_of_a_cluster_are_changed_together(tmp_path):
    cluster = read(tmp_path)
    assert all(device.practice is None for device in cluster.by_figures.devices)
    kept = reserving(cluster, 10.0)
    assert [device.usable / GIB for device in kept.devices] == [70, 30, 70]
    with pytest.raises(ConfigError, match="A100 40GB has 40 GiB"):
        reserving(cluster, 50.0)
    twice = slowed(cluster, 2.0)
    rates = [device.bfloat16_flops for device in cluster.devices]
    assert [device.bfloat16_flops for device in twice.devices] == [rate / 2 for rate in rates]
    assert {device.step_factor for device in twice.devices} == {2.0}


MISTAKES = [
    ({"count": 2}, "nodes {'count': 2}: it is not a list of groups"),
    ([3], "nodes: group 0: it is not an object. Give count, device, speed"),
    ([{"speed": 0.5}], "nodes: group 0: key count: it is missing"),
    ([{"count": 1, "memory": 40}], "nodes: group 0: key memory: it is unknown"),
    ([{"count": 0}], "nodes: group 0: count 0: it cannot be"),
    ([{"count": 1.5}], "nodes: group 0: count 1.5: it is not a whole number"),
    ([{"count": 1}, {"count": 1, "speed": 0}], "nodes: group 1: speed 0: it cannot be"),
    ([{"count": 1, "speed": 1.15}], "nodes: group 0: speed 1.15: it is above 1"),
    ([{"count": 1, "speed": "slow"}], "nodes: group 0: speed 'slow': it is not a number"),
    ([{"count": 1, "device": "a100-40g"}], "nodes: group 0: device a100-40g: it is not in the table"),
    (
        [{"count": 1}, {"count": 1, "device": {**vars(DEVICES["A100"]), "memory": 40 * GIB,
                                               "practice": None}}],
        "nodes: group 1: device A100: group 0 has another device of that name. Give each",
    ),
    (
        [{"count": 1}, {"count": 1, "device": "cpu"}],
        "nodes: group 1: device cpu: the memory of cpu is not known, and that of A100 is",
    ),
    (
        [{"count": 1}, {"count": 1, "device": {**vars(DEVICES["A100"]), "fused_attention": False,
                                               "practice": None, "name": "parts"}}],
        "nodes: group 1: device parts: attention is one kernel on A100, and several on parts",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_mistakes_in_a_file(nodes, message, tmp_path):
    with pytest.raises(ConfigError) as error:
        read(tmp_path, nodes=nodes)
    assert message in str(error.value) and str(tmp_path / "mine.json") in str(error.value)
    assert "\n" not in str(error.value)


def test_a_profile_of_one_device_says_nothing_of_another(tmp_path, monkeypatch):
    device = replace(DEVICES["A100"], bfloat16_flops=1e12)
    profile = type("Profile", (), {"device": device, "links": (), "step_factor": 1.0})
    profile.link = lambda self, where: None
    monkeypatch.setattr("megatron_merak.cluster.profile.read_profile", lambda path: profile())
    with pytest.raises(ConfigError, match="and this plan is for A100 and A100 40GB"):
        profiled(read(tmp_path), "profile.json")
    slow = read(tmp_path, nodes=[{"count": 1}, {"count": 1, "speed": 0.5}])
    rates = [each.bfloat16_flops for each in profiled(slow, "profile.json").devices]
    assert rates == [1e12, 0.5e12]
