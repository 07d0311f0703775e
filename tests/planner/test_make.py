"""Whole plans: from a configuration, from a command line, and what they predict."""

from dataclasses import replace

import pytest

from megatron_merak.cluster import (
    CLUSTERS,
    DEVICES,
    GIB,
    Cluster,
    Device,
    Link,
    all_gather,
    all_reduce,
    find_cluster,
    reduce_scatter,
)
from megatron_merak.config import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_merak.errors import ConfigError
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.plan import Grid, Plan, StagePlan, Unit
from megatron_merak.plan.table import memory_text
from megatron_merak.planner import plan
from megatron_merak.planner.make import plan_chain
from megatron_merak.planner.memory import overflowing_ranks, rank_memory, stage_memory
from megatron_merak.planner.predict import stage_costs, step_time, timeline
from megatron_merak.planner.remedies import limit_of, misfits
from megatron_merak.planner.request import default_bucket_size
from tests.requests import request


def config(tp=1, pp=1, layers=6, gbs=16, vocabulary=500, schedule="1f1b", recompute=None) -> Config:
    return Config(
        model=ModelConfig(
            num_layers=layers,
            hidden_size=64,
            num_attention_heads=4,
            seq_length=32,
            vocab_size=vocabulary,
        ),
        parallel=ParallelConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            pipeline_schedule=schedule,
            recompute_granularity=recompute,
        ),
        train=TrainConfig(micro_batch_size=2, global_batch_size=gbs),
    )


def test_a_plan_follows_its_configuration():
    made = plan(config(tp=2, pp=2), 8)
    assert made.grid == Grid(tp=2, dp=2, pp=2)
    assert (made.global_batch_size, made.num_microbatches, made.micro_batch_size) == (16, 4, 2)
    assert (
        made.schedule == build_schedule("1f1b", 2, 4)
        and made.sequence_length == 32
        and made.dtype == "float32"
    )
    assert (
        made.predicted_time > 0
        and 0 < made.predicted_bubble < 1
        and made.cluster is CLUSTERS["cpu"]
    )
    assert Plan.from_json(made.to_json()) == made


@pytest.mark.parametrize("stages", range(1, 9))
def test_any_number_of_stages_up_to_one_unit_each(stages):
    made = plan(config(pp=stages), stages)
    assert [unit for stage in made.stages for unit in stage.units] == list(range(8))


def test_a_large_vocabulary_moves_layers_away_from_the_head():
    small, large = (plan(config(pp=2, vocabulary=size), 2).stages[1] for size in (128, 32768))
    assert large.last - large.first < small.last - small.first


def test_the_cut_is_by_cost_not_by_count():
    """No other cut of the same chain has a cheaper costliest stage."""
    made = plan(config(pp=2, vocabulary=2000, gbs=64), 2)

    def costliest(cut: int) -> float:
        other = replace(made, stages=(StagePlan(0, cut), StagePlan(cut, 8)))
        costs = stage_costs(other)
        return max(f + b for f, b in zip(costs.forward, costs.backward, strict=True))

    # the optimizer's share differs
    assert costliest(made.stages[0].last) <= min(map(costliest, range(1, 8))) * 1.05


def test_full_recomputation_takes_layers_only_and_trades_memory_for_time():
    kept, recomputed = plan(config(pp=2), 2), plan(config(pp=2, recompute="full"), 2)
    assert [unit for stage in recomputed.stages for unit in stage.recompute] == list(range(1, 7))
    assert recomputed.predicted_bytes[0] < kept.predicted_bytes[0]
    assert recomputed.predicted_time > kept.predicted_time


def test_gpipe_holds_every_micro_batch():
    made = {name: plan(config(pp=2, schedule=name), 2) for name in ("1f1b", "gpipe")}
    last = {name: stage_memory(each)[1].activations for name, each in made.items()}
    assert last["gpipe"] == 8 * last["1f1b"]


def test_memory_adds_up():
    units = (
        Unit("embedding", "embedding", 4, 0, 7, 64, (("wte", 96),)),
        Unit("layer.0", "layer", 40, 1000, 256, 64),
        Unit("layer.1", "layer", 40, 1000, 256, 64),
        Unit("head", "head", 8, 2000, 128, 4, (("wte", 96),), transient_bytes=512),
    )
    stages = (StagePlan(0, 2, (1,)), StagePlan(2, 4))
    made = Plan(
        Grid(pp=2),
        units,
        stages,
        build_schedule("1f1b", 2, 4),
        1,
        16,
        "bfloat16",
        predicted_bytes=(900, 2000),
    )
    first, last = stage_memory(made)
    assert (first.weights, first.gradients, first.optimizer) == (140 * 2, 140 * 4, 140 * 12)
    assert (
        first.activations == 2 * (64 + 7) + 256 and first.working == 0 and first.transfers == 3 * 64
    )
    assert (last.weights, last.activations, last.working) == (144 * 2, 64 + 64 + 256 + 128, 512)
    assert last.total == 144 * 18 + 512 + 512 + 3 * 64
    assert overflowing_ranks(made, 0) == () and overflowing_ranks(made, 1000) == (1,)


def test_the_step_time_adds_up():
    """Two stages and two micro-batches by hand, on a device of 1 FLOP/s with a memory of 1000
    bytes/s.
    """
    device, link = Device("toy", 1.0, 1.0, 1000.0, 0, 1.0), Link("toy", 1.0, 8.0)
    units = (Unit("a", "layer", 0, 3, 0, 16), Unit("b", "layer", 0, 3, 0, 16))
    made = Plan(
        Grid(pp=2), units, (StagePlan(0, 1), StagePlan(1, 2)), build_schedule("gpipe", 2, 2), 1, 1
    )
    made = replace(made, cluster=Cluster(device, 8, link, link))
    costs = stage_costs(made)
    assert costs.forward == pytest.approx((3.016, 3.016)) and costs.backward == pytest.approx(
        (6.032, 6.032)
    )
    assert costs.transfer == (2.0,) and costs.latency == (1.0,)
    pipeline = timeline(made)
    assert pipeline.makespan == pytest.approx(3 * (3.016 + 6.032) + 2 * 3)
    assert step_time(made, pipeline) == pipeline.makespan
    owned = replace(made, grid=Grid(dp=2, pp=2), units=(replace(units[0], parameters=8), units[1]))
    reduce, optimizer = all_reduce(2, 32, link), 8 * 32 / 1000
    late = replace(owned, overlap_grad_reduce=False)
    assert step_time(late, pipeline) == pytest.approx(pipeline.makespan + reduce + optimizer)
    # One bucket is full when all is; of two, the first is on its way during the second half of the
    # backward.
    assert step_time(owned, pipeline) == pytest.approx(pipeline.makespan + reduce + optimizer)
    halves = replace(owned, bucket_size=4)
    behind = 2 * all_reduce(2, 16, link) - stage_costs(owned).backward[0] / 2
    assert step_time(halves, pipeline) == pytest.approx(pipeline.makespan + behind + optimizer)
    fast = replace(halves, cluster=replace(halves.cluster, inside=Link("fast", 0.0, 16.0)))
    assert step_time(fast, pipeline) == pytest.approx(pipeline.makespan + 1 + optimizer)
    # Sharded: half of the optimizer's work, and what was updated travels back while the first
    # forward would run.
    zero = replace(owned, sharding="optim", overlap_param_gather=False)
    scattered, gathered = reduce_scatter(2, 16, link), all_gather(2, 16, link)
    assert step_time(zero, pipeline) == pytest.approx(
        pipeline.makespan + scattered + gathered + optimizer / 2
    )
    early = replace(zero, overlap_param_gather=True)
    assert step_time(early, pipeline) == pytest.approx(step_time(zero, pipeline)), (
        "one unit has all parameters"
    )
    memory, shared = (rank_memory(each)[0] for each in (owned, zero))
    assert (memory.optimizer, shared.optimizer) == (64, 32) and memory.total - shared.total == 32


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        (lambda: plan(config(pp=9), 9), ConfigError),
        (lambda: plan(config(tp=2), 3), ConfigError),
        (lambda: plan(config(tp=3), 3), ConfigError),
        (lambda: plan(config(vocabulary=None), 1), ConfigError),
    ],
)
def test_impossible_requests_are_told(mistake, error):
    with pytest.raises(error):
        mistake()


def test_sixteen_thousand_ranks():
    model = ModelConfig(
        num_layers=126,
        hidden_size=16384,
        ffn_hidden_size=53248,
        num_attention_heads=128,
        group_query_attention=True,
        num_query_groups=8,
        seq_length=8192,
        vocab_size=128256,
        position_embedding_type="rope",
        swiglu=True,
        normalization="RMSNorm",
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0,
        attention_dropout=0,
    )
    parallel = ParallelConfig(tensor_model_parallel_size=8, pipeline_model_parallel_size=16)
    train = TrainConfig(micro_batch_size=1, global_batch_size=2048, bf16=True)
    made = plan(Config(model=model, parallel=parallel, train=train), 16384, CLUSTERS["dgx-h100"])
    assert made.grid == Grid(tp=8, dp=128, pp=16) and made.num_microbatches == 16
    layers = [
        sum(made.units[unit].kind == "layer" for unit in stage.units) for stage in made.stages
    ]
    assert sum(layers) == 126 and max(layers) == 8
    assert overflowing_ranks(made, find_cluster("H100").device.usable)


def test_a_plan_that_fills_the_device_does_not_fit():
    """Between what plans use of the memory and all of it; what --device-memory-gb grants is used in
    full.
    """
    units = [Unit(f"unit.{index}", "layer", 10**6, 10**9, 64, 64) for index in range(4)]
    needs = plan_chain(units, request()).predicted_bytes[0]
    tight = replace(CLUSTERS["dgx-h100"], device=replace(DEVICES["H100"], memory=needs + 1000))
    made = plan_chain(units, request(), tight)
    assert needs < tight.device.memory and overflowing_ranks(made, tight.device.memory) == ()
    told = misfits(made, limit_of(tight.device, None))
    assert (
        "pipeline rank 0 does not fit into the" in told[0]
        and "of H100 that plans use (it has" in told[0]
    )
    assert ", more than the" in memory_text(made)
    assert misfits(made, limit_of(tight.device, tight.device.memory / GIB)) == []
    assert (
        limit_of(tight.device, 500.0) == tight.device.memory
        and limit_of(DEVICES["cpu"], 2.0) == 2 * GIB
    )


def test_buckets_grow_with_the_replicas_as_megatrons_do():
    assert default_bucket_size(1) == 40_000_000 and default_bucket_size(64) == 64_000_000
