"""Plans for clusters whose nodes differ, against every cut of small chains."""

from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

import pytest

from megatron_merak.cluster import CLUSTERS, DEVICES, GIB, Cluster, Device, Link, NodeGroup
from megatron_merak.config import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_merak.errors import PlanError
from megatron_merak.plan import Grid, Plan, StagePlan, Unit, hardware_of, limits_of, plan_table
from megatron_merak.planner import plan
from megatron_merak.planner.cost import UnitCost
from megatron_merak.planner.make import plan_chain
from megatron_merak.planner.memory import overflowing_ranks, predicted_peaks
from megatron_merak.planner.overlap import times
from megatron_merak.planner.predict import priced, stage_costs
from megatron_merak.planner.rank_costs import fastest, slowest
from megatron_merak.planner.remedies import misfits
from megatron_merak.planner.request import Request
from megatron_merak.training.plan_file import check_memory

MIB = 2**20
FREE = Link("free", 0.0, 1e18)
FLOPS = 1e9
CARD = Device("card", FLOPS, FLOPS, 1e18, 0, 1.0, reserve=0)
COUNT = 64  # micro-batches


def cluster_of(speeds, memories=None) -> Cluster:
    """One rank on each node."""
    sizes = memories or [0] * len(speeds)
    groups = tuple(
        NodeGroup(1, replace(CARD, name=f"card of {size}", memory=size), speed)
        for speed, size in zip(speeds, sizes, strict=True)
    )
    return Cluster(CARD, 1, FREE, FREE, nodes=groups)


def chain(flops, saved=0):
    return [Unit(f"layer.{i}", "layer", 0, each, saved, 0) for i, each in enumerate(flops)]


def asked(stages: int, **parallel) -> Request:
    parallel = ParallelConfig(pipeline_model_parallel_size=stages, **parallel)
    return Request(parallel=parallel, microbatches=COUNT)


def every_cut(units: int, stages: int):
    return [(0, *inner, units) for inner in combinations(range(1, units), stages - 1)]


def seconds(flops, speeds, cut):
    """Of a micro-batch on each stage: the backward computes twice what the forward does."""
    return [3 * sum(flops[cut[k] : cut[k + 1]]) / FLOPS / speed for k, speed in enumerate(speeds)]


def bounds(made: Plan):
    return (0, *(stage.last for stage in made.stages))


@pytest.mark.parametrize("seed", range(8))
def test_no_cut_is_better(seed):
    draw = Random(seed)
    flops = [draw.choice([1, 2, 3, 7]) * 1e6 for _ in range(9)]
    speeds = [1.0, *(draw.choice([1.0, 0.85, 0.5, 0.3]) for _ in range(2)), 0.7]
    draw.shuffle(speeds)
    made = plan_chain(chain(flops), asked(4), cluster_of(speeds))

    def rank(cut):
        found = seconds(flops, speeds, cut)
        return max(found), sum(each * each for each in found)

    least = min(map(rank, every_cut(9, 4)))
    assert rank(bounds(made)) == pytest.approx(least, rel=1e-9)
    assert made.predicted_time >= COUNT * least[0] * (1 - 1e-9)


def test_stages_take_the_times_of_their_own_nodes():
    flops = [1e6] * 8
    speeds = [1.0, 0.5, 0.25]
    made = plan_chain(chain(flops), asked(3), cluster_of(speeds))
    assert bounds(made) == (0, 5, 7, 8)
    costs = stage_costs(made)
    found = seconds(flops, speeds, bounds(made))
    assert costs.forward == pytest.approx([each / 3 for each in found])
    assert costs.backward == pytest.approx([each / 1.5 for each in found])
    alike = plan_chain(chain(flops), asked(3), cluster_of([0.5] * 3))
    assert made.predicted_time < alike.predicted_time


CAPACITY = {"recompute_granularity": "full", "recompute_method": "capacity"}


def of_cuts(made: Plan, stages: int):
    """(bounds, plan) of every cut that fits, without recomputation."""
    for cut in every_cut(len(made.units), stages):
        plans = tuple(StagePlan(*ends) for ends in pairwise(cut))
        other = priced(replace(made, stages=plans))
        if not overflowing_ranks(other, made.cluster.most_usable):
            yield cut, other


@pytest.mark.parametrize(("method", "sizes"), [({}, [40, 200, 8]), (CAPACITY, [22, 200, 5])])
def test_each_rank_keeps_within_its_own_memory(method, sizes):
    flops = [1e6] * 10
    sizes = [size * MIB for size in sizes]
    units = [replace(unit, output_bytes=MIB // 8) for unit in chain(flops, saved=3 * MIB)]
    made = plan_chain(units, asked(3, **method), cluster_of([1.0] * 3, sizes))
    assert limits_of(made.cluster, made.grid, made.cluster.most_usable) == tuple(sizes)
    assert all(peak <= size for peak, size in zip(predicted_peaks(made), sizes, strict=True))
    fitting = list(of_cuts(made, 3))
    best = min(max(seconds(flops, [1.0] * 3, cut)) for cut, _ in fitting)
    if not any(stage.recompute for stage in made.stages):
        assert sizes[0] == 40 * MIB
        assert max(seconds(flops, [1.0] * 3, bounds(made))) == best
    else:
        assert made.predicted_time < min(other.predicted_time for _, other in fitting)
    # with the memory of the largest on all, the smallest node gets more than it has
    even = plan_chain(units, asked(3, **method), cluster_of([1.0] * 3, [200 * MIB] * 3))
    assert predicted_peaks(even)[2] > sizes[2]


def test_recomputation_is_chosen_where_memory_is_short():
    sizes = [22 * MIB, 200 * MIB, 200 * MIB]
    units = [replace(unit, output_bytes=MIB // 8) for unit in chain([1e6] * 9, saved=3 * MIB)]
    made = plan_chain(units, asked(3, **CAPACITY), cluster_of([1.0] * 3, sizes))
    assert made.stages[0].recompute and not made.stages[1].recompute + made.stages[2].recompute


@pytest.mark.parametrize("seed", range(40))
def test_no_stage_is_faster_than_one_of_the_least_times(seed):
    draw = Random(seed)

    def drawn(reduces, share):
        backward = draw.uniform(1, 4)
        weight = draw.uniform(0, backward)
        behind = tuple(draw.uniform(0, share * each) for each in reduces)
        return UnitCost(
            draw.uniform(1, 2),
            backward,
            weight=weight,
            hiding=draw.choice([0.0, 0.5, 1.0]) * weight,
            behind=behind,
            behind_weights=draw.uniform(0, behind[1]),
            halving=(draw.uniform(0, 1), draw.uniform(0, 1)),
            **links,
        )

    units = []
    for _ in range(3):
        reduces = (draw.uniform(0, 3), draw.uniform(0, 9))
        hidden = draw.choice([0.0, 0.3])
        gathers = draw.choice([0.0, hidden]) * reduces[1]
        links = {
            "reduces": reduces,
            "half_reduces": reduces,
            "last_reduces": (reduces[0] / 4, reduces[1] / 4),
            "bare": reduces[1] / 4,
            "regathers": gathers,
        }
        units.append([drawn(reduces, hidden) for _ in range(2)])
    least = [fastest(each) for each in units]
    most = [slowest(each) for each in units]
    for overlap in ("none", "weight-gradient", "sub-pipeline"):
        for splits in (False, True):
            bound = times(least, overlap, splits)
            for device in range(2):
                own = times([each[device] for each in units], overlap, splits)
                assert bound.forward <= own.forward + 1e-12
                assert bound.backward <= own.backward + 1e-12
    assert times(most, "none").backward >= max(
        times([each[device] for each in units], "none").backward for device in range(2)
    )


def test_what_does_not_fit_names_the_node():
    cluster = cluster_of([1.0, 1.0], [100 * MIB, 2 * MIB])
    units = chain([1e6] * 4, saved=3 * MIB)
    with pytest.raises(PlanError, match="on 1 of card of 2097152"):
        plan_chain(units, asked(2, device_memory_gb=1.0), cluster)
    made = plan_chain(units, asked(2), cluster)
    lines = misfits(made, made.cluster.most_usable)
    assert lines[0].startswith("pipeline rank 1 does not fit into the 0 GiB of card of 2097152")


SHAPE = {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8}


def config(**parallel) -> Config:
    model = ModelConfig(**SHAPE, seq_length=512, vocab_size=1000)
    train = TrainConfig(micro_batch_size=1, global_batch_size=32, bf16=True)
    return Config(model=model, train=train, parallel=ParallelConfig(**parallel))


A100 = CLUSTERS["dgx-a100"]
MIXED = replace(
    A100, nodes=(NodeGroup(1, DEVICES["A100"]), NodeGroup(1, DEVICES["A100 40GB"], 0.5))
)
LAYOUTS = [
    {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim_grads_params"},
    {
        "pipeline_model_parallel_size": 2,
        "pipeline_schedule": "interleaved",
        "num_virtual_stages_per_pipeline_rank": 2,
    },
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_groups_have_the_plan_of_a_cluster_without_groups(layout):
    groups = (NodeGroup(1, DEVICES["A100"]), NodeGroup(5, DEVICES["A100"]))
    made = plan(config(**layout), 16, replace(A100, nodes=groups))
    assert made.to_json() == plan(config(**layout), 16, A100).to_json()
    first = plan(config(**layout), 8, MIXED)
    assert first.to_json() == plan(config(**layout), 8, A100).to_json()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_unequal_nodes_in_a_pipeline_rank_the_slowest_counts(layout):
    """With pipelines inside nodes each has ranks on both."""
    made = plan(config(**layout, rank_order="tp-pp-dp"), 16, MIXED)
    both = "1 of A100 and 1 of A100 40GB at 0.5"
    assert {str(each) for each in hardware_of(made.cluster, made.grid)} == {both}
    slow = plan(
        config(**layout, rank_order="tp-pp-dp"), 16, replace(MIXED, nodes=(MIXED.nodes[1],) * 2)
    )
    assert (made.stages, made.predicted_time) == (slow.stages, slow.predicted_time)


def test_the_slow_half_gets_less_and_the_table_says_it():
    made = plan(config(**LAYOUTS[0]), 16, MIXED)
    assert Plan.from_json(made.to_json()) == made and priced(made) == made
    sizes = [len(stage.units) for stage in made.stages]
    assert sum(sizes[:2]) > sum(sizes[2:])
    table = plan_table(made)
    assert "node 0: A100, node 1: A100 40GB at 0.5" in table
    rows = [line for line in table.splitlines() if ".." in line and " of " in line]
    nodes = [line.rpartition("  ")[2] for line in rows[:4]]
    assert nodes == ["1 of A100"] * 2 + ["1 of A100 40GB at 0.5"] * 2
    even = plan(config(**LAYOUTS[0]), 16, A100)
    forced = priced(replace(even, cluster=MIXED))
    assert made.predicted_time < forced.predicted_time


def test_a_run_checks_the_memory_of_its_own_device():
    made = plan(config(**LAYOUTS[0]), 16, MIXED)
    most = max(predicted_peaks(made)[:2])
    least = max(predicted_peaks(made)[2:])
    assert least < most
    between = replace(A100, device=replace(DEVICES["A100 40GB"], memory=(least + most) // 2))
    for rank in range(16):
        place = Grid.coordinates(made.grid, rank)[3]
        if predicted_peaks(made)[place] <= between.device.memory:
            check_memory(made, between, rank)
            continue
        with pytest.raises(PlanError, match=f"pipeline rank {place} does not fit .* A100 40GB"):
            check_memory(made, between, rank)
    with pytest.raises(PlanError, match="priced for A100 and A100 40GB at 0.5"):
        check_memory(made, between)
    check_memory(made, MIXED)


def test_more_ranks_than_the_nodes_have_are_refused():
    with pytest.raises(PlanError, match="ranks 32: the cluster dgx-a100 has 2 nodes of 8"):
        plan(config(**LAYOUTS[0]), 32, MIXED)


def test_the_memory_of_a_gib_is_stated_for_all():
    made = plan(config(**LAYOUTS[0], device_memory_gb=50.0), 16, MIXED)
    limits = limits_of(made.cluster, made.grid, 50 * GIB)
    assert limits == (50 * GIB, 50 * GIB, 36 * GIB, 36 * GIB)
