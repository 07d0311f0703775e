"""What of a plan's sharding strategy is trained, and how."""

from types import SimpleNamespace

import pytest

from megatron_merak.errors import PlanError
from megatron_merak.plan import Grid, Unit
from megatron_merak.planner import plan_chain
from megatron_merak.stages.native import shard_of


def test_optimizer_state_is_sharded_and_more_is_refused_until_it_can_be_trained():
    def shard(sharding: str, dp: int = 2):
        grid = Grid(dp=dp)
        units = (Unit("layer", "layer", 8, 100, 0, 16),)
        plan = plan_chain(units, grid, microbatches=2, micro_batch_size=1, sharding=sharding)
        return shard_of(plan, SimpleNamespace(grid=grid, dp_rank=1 if dp > 1 else 0))

    assert (shard("no_shard"), shard("optim"), shard("optim", 1)) == ((1, 0), (2, 1), (1, 0))
    for sharding in ("optim_grads", "optim_grads_params"):
        assert shard(sharding, 1) == (1, 0)
        with pytest.raises(PlanError, match=f"--data-parallel-sharding-strategy {sharding}: .* Use optim"):
            shard(sharding)
