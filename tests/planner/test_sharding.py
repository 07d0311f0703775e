"""What replicas share: bytes by hand, how long passes wait for gathers and reductions, what is
refused and advised.
"""

from dataclasses import replace

import pytest

from megatron_merak.cluster import (
    CLUSTERS,
    Cluster,
    Device,
    Link,
    all_gather,
    all_reduce,
    reduce_scatter,
)
from megatron_merak.config.parallel import SHARDINGS
from megatron_merak.errors import PlanError
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.pipeline_parallel.pairs import pair
from megatron_merak.plan import Grid, Plan, StagePlan, Unit, plan_table
from megatron_merak.plan.replicas import instances_by_node
from megatron_merak.planner import plan_chain
from megatron_merak.planner.cost import unit_costs
from megatron_merak.planner.instances import CrossInstanceReduction
from megatron_merak.planner.memory import stage_memory
from megatron_merak.planner.predict import ending, priced, stage_costs
from megatron_merak.planner.reduction import exposed_gather, exposed_reduction
from megatron_merak.planner.remedies import misfits
from megatron_merak.planner.waits import UnitTimes, durations, stage_waits
from tests.requests import request

UNITS = (
    Unit("embedding", "embedding", 4, 0, 0, 64, (("wte", 96),)),
    Unit("layer.0", "layer", 40, 1000, 256, 64),
    Unit("layer.1", "layer", 40, 1000, 256, 64),
    Unit("head", "head", 8, 2000, 128, 4, (("wte", 96),), transient_bytes=512),
)
SLOW, FAST = Link("slow", 0.0, 8.0), Link("fast", 0.0, 1e9)
LAYERS = tuple(Unit(f"layer.{index}", "layer", 8, 100, 0, 16) for index in range(3))


def made(
    sharding: str,
    units=UNITS,
    dp=4,
    pp=1,
    schedule="1f1b",
    link=FAST,
    dtype="bfloat16",
    instances=1,
    node=64,
    out=None,
) -> Plan:
    """A plan for a device of 100 FLOP/s, and memory that costs nothing."""
    cut = len(units) // pp
    stages = tuple(StagePlan(cut * stage, cut * (stage + 1)) for stage in range(pp))
    device = Device("toy", 100.0, 100.0, 1e12, 0, 1.0)
    ways = {"sharding": sharding, "sharding_instances": instances}
    plan = Plan(
        Grid(dp=dp, pp=pp), units, stages, build_schedule(schedule, pp, 4), 2, 16, dtype, **ways
    )
    return replace(plan, cluster=Cluster(device, node, link, out or link))


def test_the_bytes_of_each_strategy_by_hand():
    memory = {sharding: stage_memory(made(sharding))[0] for sharding in SHARDINGS}
    held = {
        name: (one.weights, one.gradients, one.optimizer, one.working)
        for name, one in memory.items()
    }
    assert held["no_shard"] == (188 * 2, 188 * 4, 188 * 12, 512)
    assert held["optim"] == (188 * 2, 188 * 4, 188 * 3, 512)
    # The head, with the tied table, has its whole gradient; in front of it nothing is on its way.
    assert held["optim_grads"] == (188 * 2, 188, 188 * 3, 512 + 4 * 104)
    assert held["optim_grads_params"] == (188 // 2, 188, 188 * 3, 512 + 4 * 104 + 2 * (104 + 40))
    plain = UNITS[:3] + (replace(UNITS[3], transient_bytes=0),)
    working = [stage_memory(made(sharding, plain))[0].working for sharding in SHARDINGS[2:]]
    # The last layer while the head's gradient is on its way; the embedding, whose weights are the
    # last to be gathered.
    assert working == [4 * (40 + 104), 4 * (100 + 40) + 2 * 100]
    assert len({stage_memory(made(sharding, dp=1)) for sharding in SHARDINGS}) == 1


def test_weight_gradients_apart_from_the_backward_need_no_weights():
    together, apart = (
        stage_memory(made("optim_grads_params", LAYERS * 2, pp=2, schedule=name))[0].working
        for name in ("1f1b", "zb-h1")
    )
    assert together == (2 + 4) * 16 and apart == 4 * 16


def test_passes_by_hand():
    forward = [UnitTimes(0, 2.0, 5.0, 0.0), UnitTimes(1, 2.0, 5.0, 0.0)]
    backward = [UnitTimes(1, 2.0, 10.0, 3.0), UnitTimes(0, 2.0, 10.0, 3.0)]
    # The first gather is waited for; a unit that was used last is there; what is left to reduce
    # travels behind the end.
    assert durations([forward, backward, forward, backward]) == ([12.0, 20.0, 10.0, 20.0], 3.0)
    # A forward behind a forward starts with a unit that is gone, gathered while the last one
    # computed.
    assert durations([forward, forward]) == ([12.0, 10.0], 0.0)
    slow = [replace(visit, gather=7.0) for visit in forward]
    assert durations([slow, slow]) == ([19.0, 14.0], 0.0)
    # The gradients of two units exist at a time: the third waits until the first is reduced, 40
    # seconds in.
    assert durations([[UnitTimes(unit, 0.0, 10.0, 30.0) for unit in range(3)]]) == ([50.0], 50.0)


def test_passes_wait_for_slow_links_alone():
    for sharding in ("optim_grads", "optim_grads_params"):
        fast, slow = (
            stage_waits(made(sharding, link=link), _costs(link))[0] for link in (FAST, SLOW)
        )
        assert 0 <= fast.forward + fast.backward < 1e-6 < slow.backward
        assert (slow.forward > 1e-6) == (sharding == "optim_grads_params")
        assert (
            priced(made(sharding, link=SLOW)).predicted_time > priced(made(sharding)).predicted_time
        )
    times = {sharding: priced(made(sharding, link=SLOW)).predicted_time for sharding in SHARDINGS}
    assert times["optim"] < times["optim_grads"] < times["optim_grads_params"]
    assert len({priced(made(sharding, dp=1)).predicted_time for sharding in SHARDINGS}) == 1


def _costs(link):
    plan = made("optim", link=link)
    return unit_costs(plan.units, plan.cluster, plan.dtype, plan.grid)


def test_what_follows_the_pipeline_by_hand():
    """One unit of 8 parameters in fp32 on two replicas: 16 bytes of each shard take two seconds."""
    unit, link = (replace(LAYERS[0], flops=10_000),), SLOW
    seconds = all_gather(2, 16, link)
    assert seconds == reduce_scatter(2, 16, link) == 2.0
    whole, shared = (made(name, unit, dp=2, link=link, dtype="float32") for name in SHARDINGS[2:])
    assert stage_costs(shared) == stage_costs(made("optim", unit, dp=2, link=link, dtype="float32"))
    assert ending(shared).reductions == pytest.approx(2.0 + 2.0), (
        "the last reduction, and the first gather of a step"
    )
    assert ending(whole).reductions == pytest.approx(
        2.0 + exposed_gather(whole, [0], _costs(link)[:1])
    )


def test_gradients_sent_in_bf16_take_half_the_time():
    """Seconds saved on one unit of 8 parameters, of which a shard of 16 bytes takes two; weights
    travel as before.
    """
    unit, found = (replace(LAYERS[0], flops=1),), {}
    for sharding in SHARDINGS:
        plan = made(sharding, unit, dp=2, link=SLOW)
        half = replace(plan, grad_reduce_in_bf16=True)
        found[sharding] = priced(plan).predicted_time - priced(half).predicted_time
        assert ending(half).reductions < ending(plan).reductions
    saved = {"no_shard": 2.0, "optim": 1.0, "optim_grads": 2.0, "optim_grads_params": 2.0}
    assert found == pytest.approx(saved), (
        "all-reduced: twice; sharded gradients: a micro-batch too waits for one before"
    )


def test_copies_of_gradients_that_travel_in_bf16_by_hand():
    """What is sent and what comes of a bucket; of the one before it what is sent, where every rank
    needs the sum.
    """
    for sharding, copies in zip(
        SHARDINGS, (4 * 150 + 2 * 38, 4 * 150, 4 * 104, 4 * 104), strict=True
    ):
        plan = replace(made(sharding), bucket_size=150)
        half = replace(plan, grad_reduce_in_bf16=True)
        (whole,), (more,) = stage_memory(plan), stage_memory(half)
        assert more == replace(whole, working=whole.working + copies)
        alone = replace(half, grid=Grid())
        assert stage_memory(alone) == stage_memory(replace(plan, grid=Grid()))


def test_a_schedule_that_runs_forwards_in_a_row_gathers_more():
    plans = [
        made("optim_grads_params", LAYERS * 2, pp=2, schedule=name, link=SLOW)
        for name in ("1f1b", "gpipe")
    ]
    alternating, in_a_row = (stage_costs(plan) for plan in plans)
    assert (
        alternating.forward[1] + alternating.backward[1]
        < in_a_row.forward[1] + in_a_row.backward[1]
    )


@pytest.mark.parametrize("sharding", ["optim_grads", "optim_grads_params"])
def test_two_passes_in_turns_are_refused_and_not_chosen(sharding):
    units = tuple(replace(unit, reduces=(2, 2), reduced_bytes=(10**6, 10**6)) for unit in LAYERS)
    grid = Grid(tp=2, dp=2)

    def planned(grid: Grid, **more) -> Plan:
        asked = request(
            grid,
            microbatches=4,
            micro_batch_size=2,
            data_parallel_sharding_strategy=sharding,
            **more,
        )
        return plan_chain(units, asked, CLUSTERS["dgx-h100"])

    for overlap in ("pair", "sub-pipeline"):
        with pytest.raises(
            PlanError,
            match=f"--tp-comm-overlap {overlap}: .*{sharding} .*Use weight-gradient or none",
        ):
            planned(grid, tp_comm_overlap=overlap)
        assert planned(Grid(tp=2), tp_comm_overlap=overlap).overlap == overlap, (
            "there is one replica"
        )
        with pytest.raises(PlanError, match="runs two passes in turns"):
            replace(made(sharding), overlap=overlap)
    assert planned(grid, tp_comm_overlap="auto").overlap in ("weight-gradient", "none")
    with pytest.raises(PlanError, match=r"schedule \(with pairs\): it runs two passes in turns"):
        planned(Grid(dp=2), schedule=pair(build_schedule("1f1b", 1, 4)))


def test_advice_goes_from_strategy_to_strategy_until_one_fits():
    plan = priced(made("no_shard", tuple(replace(unit, parameters=1000) for unit in LAYERS)))
    needs = {
        sharding: stage_memory(replace(plan, sharding=sharding))[0].total for sharding in SHARDINGS
    }
    assert sorted(needs.values(), reverse=True) == list(needs.values())

    def advised(memory: int) -> list[str]:
        told = misfits(plan, memory)
        return [
            line.partition("with ")[2].partition(" the largest")[0]
            for line in told[1:]
            if "recompute" not in line
        ]

    strategies = [f"--data-parallel-sharding-strategy {sharding}" for sharding in SHARDINGS[2:]]
    assert advised(needs["optim"]) == ["--use-distributed-optimizer"]
    assert advised(needs["optim_grads"]) == ["--use-distributed-optimizer", strategies[0]]
    assert advised(needs["optim_grads_params"] - 1) == ["--use-distributed-optimizer", *strategies]


def test_instances_keep_as_much_as_so_many_replicas_would():
    for sharding in SHARDINGS[1:]:
        divided, two = (
            stage_memory(made(sharding, dp=4, instances=2)),
            stage_memory(made(sharding, dp=2)),
        )
        assert divided == two != stage_memory(made(sharding, dp=4))
    plan = made("optim_grads", dp=4, instances=2)
    assert (
        "optimizer state and gradients: sharded over 2 replicas, in each of 2 instances"
        in plan_table(plan)
    )
    assert "sharded over 4 replicas\n" in plan_table(made("optim_grads"))
    assert Plan.from_json(plan.to_json()) == plan


def test_instances_of_nodes():
    for dp, tp, pp, node, count in (
        (8, 1, 1, 4, 2),
        (8, 2, 1, 4, 4),
        (8, 4, 1, 4, 8),
        (6, 1, 2, 4, 3),
        (8, 1, 1, 8, 1),
    ):
        assert instances_by_node(Grid(tp=tp, dp=dp, pp=pp), node) == count


def test_sums_over_instances_by_hand():
    """One unit of 8 parameters in fp32 on two nodes of two: 16 bytes of a shard take 2 seconds
    inside, and a sum over the nodes sends them once, over a link of half the rate."""
    unit, out = (replace(LAYERS[0], flops=10_000),), Link("out", 0.0, 4.0)
    for sharding in SHARDINGS[1:]:
        plans = [
            made(sharding, unit, dp=4, link=SLOW, dtype="float32", instances=2, node=2, out=link)
            for link in (out, Link("none", 0.0, 1e12))
        ]
        slow, fast = (ending(plan).reductions for plan in plans)
        assert (
            slow - fast == pytest.approx(all_reduce(2, 16, out)) and all_reduce(2, 16, out) == 4.0
        )
        inside = ending(made(sharding, unit, dp=2, link=SLOW, dtype="float32")).reductions
        assert fast == pytest.approx(inside)


def test_sums_over_instances_run_beside_those_inside_them_on_other_links():
    """Two buckets are ready at once: 2 seconds inside each, 4 across each."""
    units = tuple(replace(unit, flops=1) for unit in LAYERS[:2])
    ways = {"dp": 4, "dtype": "float32", "instances": 2}
    out = Link("out", 0.0, 4.0)
    apart = replace(made("optim", units, link=SLOW, node=2, out=out, **ways), bucket_size=8)
    one = replace(made("optim", units, link=SLOW, node=64, **ways), bucket_size=8)
    costs = unit_costs(apart.units, apart.cluster, apart.dtype, apart.grid)
    assert exposed_reduction(apart, [0, 1], costs) == pytest.approx(2 + 4 + 4, rel=0.05)
    assert exposed_reduction(one, [0, 1], costs) == pytest.approx(2 + 2 + 2 + 2, rel=0.05)
    visits = [[UnitTimes(unit, 0.0, 10.0, 2.0) for unit in (1, 0)]]
    # The first sum is launched when the next unit has computed, the second one behind it.
    assert durations(visits, CrossInstanceReduction(apart), {0: 8, 1: 8}) == ([20.0], 4.0 + 4.0)
    assert durations([[UnitTimes(0, 0.0, 10.0, 2.0)]], CrossInstanceReduction(one), {0: 8}) == (
        [10.0],
        2.0 + 2.0,
    )
    single = CrossInstanceReduction(made("optim", units))
    assert durations(visits, single, {0: 8, 1: 8}) == durations(visits) == ([20.0], 2.0)
