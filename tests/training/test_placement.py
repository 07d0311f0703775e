"""Layouts whose busiest groups leave their host are told at the start."""

import pytest
import torch

from megatron_merak.config import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_merak.parallel.launch import World
from megatron_merak.planner import plan
from megatron_merak.training.job import opening

CONFIG = Config(
    model=ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=8, seq_length=32, vocab_size=100),
    parallel=ParallelConfig(tensor_model_parallel_size=8, pipeline_model_parallel_size=2),
    train=TrainConfig(micro_batch_size=1, global_batch_size=4),
)


@pytest.mark.parametrize(("ranks_here", "told"), [(4, True), (12, True), (8, False), (16, False), (0, False)])
def test_tensor_parallel_groups_that_reach_over_hosts_are_told(ranks_here, told):
    world = World(0, 32, torch.device("cpu"), collectives="merak_shm", ranks_here=ranks_here)
    found = opening(CONFIG, plan(CONFIG, 32), world)
    assert (f"Tensor-parallel groups of 8 ranks reach over hosts of {ranks_here}:" in found) == told
