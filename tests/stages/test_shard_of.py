"""How replicas share what the plan says that they share."""

import pytest
import torch

from megatron_merak.config.parallel import SHARDINGS
from megatron_merak.errors import PlanError
from megatron_merak.parallel.buffers import ParameterBuffer, ShardedState
from megatron_merak.parallel.mesh import Mesh
from megatron_merak.plan import Grid, Unit
from megatron_merak.planner import plan_chain
from megatron_merak.stages.sharing import shard_of
from tests.requests import request


@pytest.mark.parametrize("sharding, kept", [*zip(SHARDINGS, ShardedState, strict=True)])
def test_a_strategy_is_what_the_buffer_shards_where_there_are_replicas(sharding, kept):
    for dp in (1, 2):
        grid, units = Grid(dp=dp), (Unit("layer", "layer", 8, 100, 0, 16),)
        plan = plan_chain(
            units, request(grid, microbatches=2, data_parallel_sharding_strategy=sharding)
        )
        place = shard_of(plan, Mesh(grid, dp - 1, torch.device("cpu")))
        assert place == (dp, dp - 1, kept)
        buffer = ParameterBuffer([], torch.float32, "cpu", None, *place)
        assert buffer.sharding == (kept if dp > 1 else ShardedState.NOTHING)
        assert buffer.sharding or (buffer.places, len(buffer.owned)) == ((0, 0), 1)


def test_replicas_of_an_instance_share_and_its_mesh_must_know_it():
    grid, units = Grid(tp=2, dp=6), (Unit("layer", "layer", 8, 100, 0, 16),)
    asked = request(
        grid, microbatches=2, use_distributed_optimizer=True, num_distributed_optimizer_instances=2
    )
    plan = plan_chain(units, asked)
    for rank in range(grid.size):
        mesh = Mesh(grid, rank, torch.device("cpu"), instances=2)
        assert shard_of(plan, mesh) == (3, mesh.dp_rank % 3, ShardedState.OPTIMIZER)
    with pytest.raises(
        PlanError, match="sharding_instances 2: the groups of ranks were made for 1"
    ):
        shard_of(plan, Mesh(grid, 0, torch.device("cpu")))
