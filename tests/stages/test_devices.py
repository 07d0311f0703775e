"""What a rank computes with, as drivers call it, is what a run is planned for."""

from dataclasses import replace

import pytest
import torch

from megatron_merak.cluster import CLUSTERS, DEVICES, NodeGroup
from megatron_merak.errors import PlanError
from megatron_merak.parallel.launch import World, _emulation
from megatron_merak.stages.devices import cluster_of, peak_device, stand_in

GPU = World(0, 1, torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA H200", "dgx-h200"),
        ("NVIDIA H100 80GB HBM3", "dgx-h100"),
        ("NVIDIA A100-SXM4-80GB", "dgx-a100"),
    ],
)
def test_a_gpu_is_planned_by_its_name(monkeypatch, name, profile):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert cluster_of(GPU) == CLUSTERS[profile] and peak_device(GPU) == CLUSTERS[profile].device
    assert stand_in(GPU) == ""


def test_an_unknown_gpu_is_planned_as_another_and_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU 9000")
    assert cluster_of(GPU) == CLUSTERS["dgx-h100"] and peak_device(GPU) is None
    assert stand_in(GPU) == "Some GPU 9000 is not in the table of devices: planned as H100"


def test_an_emulated_cluster_is_planned_for_itself():
    own = replace(
        CLUSTERS["dgx-a100"],
        device=replace(DEVICES["A100"], name="mine", memory_bandwidth=1e9),
        name="own",
    )
    world = World(0, 1, torch.device("cpu"), own)
    assert cluster_of(world) is own and peak_device(world) is own.device and stand_in(world) == ""
    assert cluster_of(World(0, 1, torch.device("cpu"))) is CLUSTERS["cpu"]


def test_utilisation_of_unlike_nodes_is_of_the_average_peak():
    nodes = (NodeGroup(1, DEVICES["A100"]), NodeGroup(1, DEVICES["A100"], 0.5))
    own = replace(CLUSTERS["dgx-a100"], ranks_per_node=2, nodes=nodes)
    for ranks, share in ((2, 1.0), (3, 2.5 / 3), (4, 0.75)):
        peak = peak_device(World(0, ranks, torch.device("cpu"), own)).flops("bfloat16")
        assert peak == pytest.approx(share * DEVICES["A100"].bfloat16_flops)


def test_an_emulated_rank_has_the_device_of_its_node(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_merak.parallel.emulated.register", lambda clock: None)
    nodes = (NodeGroup(1, DEVICES["A100"]), NodeGroup(2, DEVICES["A100"], 0.5))
    replace(CLUSTERS["dgx-a100"], ranks_per_node=1, nodes=nodes).to_json(tmp_path / "own.json")
    emulate = str(tmp_path / "own.json")
    clocks = [_emulation("emu", emulate, rank, 2)[1] for rank in (0, 1)]
    assert [clock.device.name for clock in clocks] == ["A100", "A100 at 0.5"]
    assert all(clock.device.practice is None for clock in clocks)
    with pytest.raises(PlanError, match="ranks 4: the cluster dgx-a100 has 3 nodes of 1"):
        _emulation("emu", emulate, 0, 4)


def test_a_trainer_on_a_gpu_plans_for_it(monkeypatch, tmp_path):
    """The device's type is no name of the table: a run on a GPU ended before its first step."""
    from megatron_merak import MerakArguments, MerakTrainer
    from megatron_merak.hf_trainer.engine import wishes
    from tests.hf_trainer.stand_in import tiny_llama

    trainer = MerakTrainer(
        tiny_llama(), MerakArguments(str(tmp_path), report_to="none", use_cpu=True)
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setitem(vars(trainer.args), "world", GPU)
    assert wishes(trainer.args)["cluster"].device is DEVICES["H200"]
