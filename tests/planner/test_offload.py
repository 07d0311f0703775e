"""Activations in host memory, planned: waits by hand, what is chosen, and what it is worth."""

from dataclasses import replace

import pytest

from megatron_merak.cluster import CLUSTERS, GIB
from megatron_merak.config import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_merak.config.checks import check_offloading
from megatron_merak.errors import ConfigError, PlanError
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.plan import Plan, StagePlan, Unit, plan_table
from megatron_merak.planner import plan
from megatron_merak.planner.memory import rank_memory
from megatron_merak.planner.offload import HostWaits, UnitSeconds, host_waits, offload_costs
from megatron_merak.planner.predict import priced

H100 = CLUSTERS["dgx-h100"]
GH200 = CLUSTERS["dgx-gh200"]
# keeps 1.5 s of copies beside no input: nothing else is known of it
UNIT = Unit("u", "u", 0, 1, saved_bytes=int(1.5 * H100.device.host_bandwidth), output_bytes=0)
CAPACITY = {"recompute_granularity": "full", "recompute_method": "capacity"}


def waits(offload, recompute=(), forward=1.0, backward=2.0):
    seconds = [UnitSeconds(forward, backward)] * 4
    stage = StagePlan(0, 4, tuple(recompute), offload=tuple(offload))
    return host_waits([UNIT] * 4, stage, seconds, H100.device)


def test_waits_by_hand():
    assert waits(()) == HostWaits()
    # two units run forward while a copy leaves, and two backward while it comes
    assert waits((0, 2)) == HostWaits()
    # forward    |0   |1   |..|2   |..|3   |
    # to host         |0 1.5  |1 1.5  |2 ...
    assert waits((0, 1, 2)) == HostWaits(forward=1.0)
    # nothing hides that of the last unit; it was sent while the next op runs
    assert waits((3,)) == HostWaits(backward=1.5)
    # a backward of 1 s hides 1 s of 1.5
    assert waits((0, 1, 2), backward=1.0) == HostWaits(forward=1.0, backward=1.5)
    # unit 1 is recomputed while the copy of unit 0 is under way
    assert waits((0, 2), recompute=(1,), backward=0.5).backward == 1.0


def test_units_whose_copies_are_hidden_cost_nothing_and_the_last_of_a_stage_is_left_out():
    seconds = [UnitSeconds(1.0, 2.0)] * 6
    stage = StagePlan(0, 6)
    costs = offload_costs([UNIT] * 6, stage, range(6), seconds, device=H100.device)
    assert [*costs] == [0, 1, 2, 3, 4]
    assert [unit for unit, (cost, _) in costs.items() if not cost] == [0, 2, 4]
    assert all(freed == UNIT.saved_bytes for _, freed in costs.values())
    free = StagePlan(0, 6, offload=(0, 2, 4))
    assert host_waits([UNIT] * 6, free, seconds, H100.device) == HostWaits()


def test_a_device_whose_link_to_the_host_is_unknown_is_named():
    device = replace(H100.device, name="X1", host_bandwidth=0.0)
    stage = StagePlan(0, 1, offload=(0,))
    with pytest.raises(PlanError, match=r"device X1: the bandwidth .* Give its host_bandwidth"):
        host_waits([UNIT], stage, [UnitSeconds(1.0, 2.0)], device)


def llama(samples=4, pp=2, **parallel):
    shape = ModelConfig(
        num_layers=16,
        hidden_size=4096,
        num_attention_heads=32,
        seq_length=4096,
        vocab_size=32000,
        ffn_hidden_size=11008,
        swiglu=True,
        normalization="RMSNorm",
        position_embedding_type="rope",
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    train = TrainConfig(micro_batch_size=samples, global_batch_size=8 * samples, bf16=True)
    layout = ParallelConfig(pipeline_model_parallel_size=pp, **parallel)
    return Config(model=shape, parallel=layout, train=train)


def peak(made):
    return max(memory.total for memory in rank_memory(made))


@pytest.mark.parametrize("cluster", [H100, GH200], ids=str)
@pytest.mark.parametrize("gib", [44, 50, 56])
def test_what_does_not_fit_is_offloaded_beside_recomputation_and_never_costs_time(cluster, gib):
    limit = {"device_memory_gb": float(gib)}
    recomputed = plan(llama(**limit, **CAPACITY), 2, cluster)
    both = plan(llama(**limit, **CAPACITY, cpu_offloading=True), 2, cluster)
    assert peak(both) <= gib * GIB
    assert both.predicted_time <= recomputed.predicted_time
    assert recomputed.stages[0].recompute
    if cluster is GH200:
        # its link is so fast that nothing is waited for
        assert both.stages[0].offload and not both.stages[0].recompute
        everything = plan(llama(), 2, replace(cluster, device=replace(cluster.device, memory=0)))
        assert both.predicted_time <= everything.predicted_time * 1.02


def test_offloading_alone_makes_a_plan_fit_and_nothing_is_offloaded_that_fits():
    limit = {"device_memory_gb": 48.0}
    with pytest.raises(PlanError, match="no cut into 2 stages fits"):
        plan(llama(**limit), 2, GH200)
    made = plan(llama(**limit, cpu_offloading=True), 2, GH200)
    assert made.offloads and not any(stage.recompute for stage in made.stages)
    assert peak(made) <= 48 * GIB
    roomy = llama(samples=1, cpu_offloading=True)
    assert plan(roomy, 2, GH200) == plan(llama(samples=1), 2, GH200)


def test_the_first_layers_of_each_stage_by_number_and_what_others_do():
    made = plan(llama(cpu_offloading_num_layers=3), 2, H100)
    assert [stage.offload for stage in made.stages] == [
        tuple(unit for unit in stage.units if made.units[unit].kind == "layer")[:3]
        for stage in made.stages
    ]
    full = plan(llama(cpu_offloading_num_layers=3, recompute_granularity="full"), 2, H100)
    for stage in full.stages:
        layers = [unit for unit in stage.units if made.units[unit].kind == "layer"]
        assert [*stage.offload, *stage.recompute] == layers and len(stage.offload) == 3
    # what is offloaded is in host memory, two tapes at most beside
    plain = plan(llama(), 2, H100)
    stages = tuple(
        replace(stage, offload=each.offload)
        for stage, each in zip(plain.stages, made.stages, strict=True)
    )
    moved = priced(replace(plain, stages=stages))
    assert moved.predicted_host_bytes and not plain.predicted_host_bytes
    assert peak(moved) < peak(plain)
    assert moved.predicted_time > plain.predicted_time  # neighbours, over PCIe


def test_more_layers_than_there_are_are_refused():
    layers = llama().model.num_layers
    plan(llama(cpu_offloading_num_layers=layers), 2, H100)
    with pytest.raises(PlanError, match=f"-num-layers {layers + 1}: the model has {layers} layers"):
        plan(llama(cpu_offloading_num_layers=layers + 1), 2, H100)


def test_a_plan_shows_it_and_survives_json():
    made = plan(llama(cpu_offloading_num_layers=2), 2, GH200)
    assert Plan.from_json(made.to_json()) == made
    text = plan_table(made)
    assert "recomputed  offloaded" in text and "2 of 9" in text
    assert "host memory of offloaded activations: " in text
    assert "offloaded" not in plan_table(plan(llama(), 2, GH200))


def test_stages_and_plans_refuse_what_cannot_be_together():
    with pytest.raises(PlanError, match=r"offload \[1\]: what is recomputed is not kept"):
        StagePlan(0, 2, recompute=(1,), offload=(1,))
    with pytest.raises(PlanError, match=r"offload \[2\]: the stage holds units \[0, 2\)"):
        StagePlan(0, 2, offload=(2,))
    made = plan(llama(cpu_offloading_num_layers=2), 2, GH200)
    with pytest.raises(PlanError, match="with schedule pipedream weights change"):
        replace(made, schedule=build_schedule("pipedream", 2, made.num_microbatches))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"cpu_offloading": True, "recompute_granularity": "full"},
            "--cpu-offloading .given.: it offloads what does not fit, and .* recomputes all. "
            "Add --recompute-method capacity",
        ),
        (
            {"cpu_offloading_num_layers": 2, **CAPACITY},
            "--cpu-offloading-num-layers 2: --recompute-method capacity chooses among all",
        ),
        (
            {"cpu_offloading_num_layers": 2, "pipeline_schedule": "pipedream"},
            "--cpu-offloading-num-layers 2: pipedream changes weights",
        ),
    ],
)
def test_flags_that_contradict_each_other_are_named(flags, message):
    with pytest.raises(ConfigError, match=message):
        check_offloading(ParallelConfig(**flags))


def test_the_memory_of_a_rank_must_be_known():
    with pytest.raises(PlanError, match="--cpu-offloading .given.: it offloads what does not fit"):
        plan(llama(cpu_offloading=True), 2, CLUSTERS["cpu"])
