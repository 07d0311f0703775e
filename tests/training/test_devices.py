"""What a rank computes with, as drivers call it, is what the planner's table calls it."""

import pytest
import torch

from megatron_merak.cluster import find_device
from megatron_merak.parallel.launch import World
from megatron_merak.training.devices import device_name, known


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "Some GPU 9000"])
def test_a_gpu_is_known_or_planned_as_another(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    world = World(0, 1, torch.device("cuda", 0))
    assert device_name(world) == name and find_device(known(device_name(world))).memory > 2**34


def test_a_trainer_on_a_gpu_plans_for_it(monkeypatch, tmp_path):
    """The device's type is no name of the table: a run on a GPU ended before its first step."""
    from megatron_merak import MerakArguments, MerakTrainer
    from tests.training.merak_stand_in import tiny_llama

    trainer = MerakTrainer(tiny_llama(), MerakArguments(str(tmp_path), report_to="none", use_cpu=True))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setitem(vars(trainer.args), "world", World(0, 1, torch.device("cuda", 0)))
    assert find_device(trainer.settings().device).name == "H200"
