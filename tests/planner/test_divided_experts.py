"""What plans say of experts that replicas divide: what each rank stores, sends and waits for."""

from dataclasses import replace

import pytest

from megatron_merak.cluster import CLUSTERS, Cluster, Device, Link
from megatron_merak.errors import ConfigError, PlanError
from megatron_merak.plan import Grid, Plan, plan_table
from megatron_merak.planner.instances import share_of_experts
from megatron_merak.planner.memory import stage_memory
from megatron_merak.planner.predict import priced
from megatron_merak.stages.traced import Traced
from tests.engines import blueprint_of
from tests.hf_trainer.stand_in import collate, samples
from tests.hf_trainer.test_experts import mixture
from tests.runtime.test_behind import LENGTH, batch, qwen2_moe

REPLICAS = Grid(dp=4)


@pytest.fixture(scope="module")
def traced():
    return Traced(mixture(False), collate(samples(2, ragged=False)), "bfloat16")


def planned(traced, experts, sharding="no_shard", shards=None, grid=REPLICAS, **asked) -> Plan:
    return blueprint_of(
        traced,
        grid,
        expert_model_parallel_size=experts,
        expert_tensor_parallel_size=shards,
        sequence_parallel=grid.tp > 1,
        data_parallel_sharding_strategy=sharding,
        **asked,
    ).plan


def divided(plan):
    return sum(unit.experts for unit in plan.units)


def test_a_rank_has_its_experts(traced):
    whole = planned(traced, 1)
    halves = planned(traced, 2)
    experts = 2 * 4 * (2 * 32 * 32 + 32 * 32)  # layers, experts, and three matrices of each
    assert (divided(whole), divided(halves)) == (0, experts // 2)
    assert whole.stage_parameters(0) - halves.stage_parameters(0) == experts // 2
    ((before,), (after,)) = stage_memory(whole), stage_memory(halves)
    assert before.weights - after.weights == experts
    assert before.gradients - after.gradients == 2 * experts
    assert before.optimizer - after.optimizer == 6 * experts


@pytest.mark.parametrize("grid", [REPLICAS, Grid(tp=2, dp=2), Grid(tp=4)])
def test_a_rank_has_its_shards_of_its_experts(traced, grid):
    """Two ranks compute with each expert, half of it each, and get the rows of both."""
    whole = planned(traced, 4, grid=grid)
    shards = planned(traced, 2, shards=2, grid=grid)
    assert shards.expert_ranks == whole.expert_ranks == 4
    assert shards.stage_parameters(0) == whole.stage_parameters(0)
    assert sum(unit.flops for unit in shards.units) == sum(unit.flops for unit in whole.units)
    sent = max(unit.routed_bytes for unit in shards.units)[0]
    assert grid.tp == 4 or sent > 1.9 * max(unit.routed_bytes for unit in whole.units)[0]
    slow = replace(CLUSTERS["dgx-h100"], ranks_per_node=1)
    near = priced(replace(shards, cluster=CLUSTERS["dgx-h100"]))
    assert priced(replace(shards, cluster=slow)).predicted_time > near.predicted_time


@pytest.mark.parametrize("sharding", ["optim", "optim_grads", "optim_grads_params"])
def test_what_all_ranks_shard_is_the_same_however_experts_are_divided(traced, sharding):
    """Four ranks shard everything, or two each half of the experts."""
    ((whole,), (halves,), (alone,)) = (
        stage_memory(planned(traced, experts, sharding)) for experts in (1, 2, 4)
    )
    assert whole.optimizer == pytest.approx(halves.optimizer, abs=16)
    assert whole.optimizer == pytest.approx(alone.optimizer, abs=16)
    if sharding != "optim":
        assert whole.gradients == pytest.approx(halves.gradients, abs=16)
    if sharding == "optim_grads_params":
        assert whole.weights == pytest.approx(halves.weights, abs=16)


def test_rows_travel_where_the_copies_are(traced):
    """Rows go to and fro in each pass, of each layer; between nodes they take longer."""
    plan = planned(traced, 4)
    rows = 2 * 8 * 2  # samples, tokens, experts of a token
    sizes = {unit.routed_bytes for unit in plan.units}
    assert max(sizes)[0] >= 2 * rows * 32 * 2 and len(sizes) == 2
    near = priced(replace(plan, cluster=CLUSTERS["dgx-h100"]))
    far = priced(replace(plan, cluster=replace(CLUSTERS["dgx-h100"], ranks_per_node=1)))
    assert far.predicted_time > near.predicted_time


def test_gradients_of_experts_are_those_of_fewer_ranks(traced):
    assert share_of_experts(planned(traced, 1)) == 1.0
    assert share_of_experts(planned(traced, 4)) == 0.0
    assert 0 < share_of_experts(planned(traced, 2)) < 1


CARD = Device("card", 1e9, 1e9, 1e15, 0, 1.0)


@pytest.mark.parametrize("bandwidth", [1e5, 1e12])
def test_what_a_shared_expert_hides_is_not_waited_for(bandwidth):
    """The shorter one of its products and of an exchange, in each pass of each of two layers."""
    plan = planned(Traced(qwen2_moe(), batch(), "float32"), 2, grid=Grid(dp=2))
    units = [unit for unit in plan.units if any(unit.meanwhile_bytes)]
    assert len(units) == 2
    rows = 2 * LENGTH * 2
    for unit in units:
        shared = 2 * (2 * LENGTH) * 32 * (3 * 64)  # tokens, features, and three matrices
        assert unit.meanwhile_flops == (shared, shared, shared, 0)
        # a row of two experts of each token, once in each direction
        assert unit.meanwhile_bytes == (rows * 32 * 4,) * 2
    link = Link("wire", 0.0, bandwidth)
    plan = replace(plan, cluster=Cluster(CARD, 2, link, link))
    exposed = [replace(unit, meanwhile_bytes=(0, 0)) for unit in plan.units]
    more = priced(replace(plan, units=tuple(exposed))).predicted_time - priced(plan).predicted_time
    exchange = rows * 32 * 4 / 2 / bandwidth
    hidden = min(exchange, shared / 1e9) + min(exchange, 2 * shared / 1e9)
    assert more == pytest.approx(plan.num_microbatches * 2 * hidden)


def test_what_overlaps_is_decided_where_replicas_exchange_rows(traced):
    asked = {"microbatches": 4, "micro_batch_size": 2}
    for overlap in ("none", "pair", "sub-pipeline"):
        assert planned(traced, 1, tp_comm_overlap=overlap, **asked).overlap == "weight-gradient"
        made = planned(traced, 2, tp_comm_overlap=overlap, **asked)
        assert made.overlap == overlap
        assert f"overlap of expert-parallel collectives: {overlap}" in plan_table(made)
    with pytest.raises(PlanError, match="--tp-comm-overlap pair: it runs two passes in turns"):
        planned(traced, 2, "optim_grads_params", tp_comm_overlap="pair", **asked)
    with pytest.raises(ConfigError, match="sub-pipeline: losses of routers are of whole"):
        whole = {"couples_samples": "losses of routers", "tp_comm_overlap": "sub-pipeline"}
        planned(traced, 2, **whole, **asked)
