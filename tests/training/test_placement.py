"""Layouts whose busiest groups leave their host are told at the start."""

import pytest
import torch

from megatron_merak.config import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_merak.parallel.launch import World
from megatron_merak.parallel.nodes import Nodes
from megatron_merak.planner import plan
from megatron_merak.training.job import opening

CONFIG = Config(
    model=ModelConfig(
        num_layers=2, hidden_size=64, num_attention_heads=8, seq_length=32, vocab_size=100
    ),
    parallel=ParallelConfig(tensor_model_parallel_size=8, pipeline_model_parallel_size=2),
    train=TrainConfig(micro_batch_size=1, global_batch_size=4),
)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ((4,) * 8, "4"),
        ((12, 12, 8), "12 and 8"),
        ((8,) * 4, None),
        ((16, 16), None),
        ((32,), None),
        ((), None),
    ],
)
def test_tensor_parallel_groups_that_reach_over_hosts_are_told(sizes, told):
    world = World(0, 32, torch.device("cpu"), collectives="merak_shm")
    found = opening(CONFIG, plan(CONFIG, 32), world, Nodes(sizes))
    assert ("Tensor-parallel groups of 8 ranks reach over hosts of" in found) == (told is not None)
    assert told is None or f"reach over hosts of {told}: collectives" in found
