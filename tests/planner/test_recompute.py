"""What each method recomputes: by the published rules, by hand, and against every choice
there is.
"""

import math
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_merak.cluster import CLUSTERS
from megatron_merak.config import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_merak.errors import PlanError
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.plan import Grid, StagePlan, Unit
from megatron_merak.planner import plan, plan_chain
from megatron_merak.planner.memory import Ledger, rank_memory
from megatron_merak.planner.offload import UnitSeconds
from megatron_merak.planner.recompute import Chooser, Recompute
from tests.requests import request

MIB, GIB = 2**20, 2**30


def chain(count, saved=8 * MIB, border=MIB):
    """Layers without weights that keep ``saved`` beside their input, between an embedding and a
    head that keep less.
    """
    layer = Unit("layer", "layer", 0, 10**9, saved, border)
    layers = [replace(layer, name=f"layer.{index}") for index in range(count - 2)]
    return (
        replace(layer, name="embedding", saved_bytes=0),
        *layers,
        replace(layer, name="head", output_bytes=4),
    )


def chooser(
    units, method, ranks=4, memory=0.0, layers=1, schedule="1f1b", seconds=None, microbatches=16
):
    ledger = Ledger(units, build_schedule(schedule, ranks, microbatches), "float32")
    times = [UnitSeconds(second, 2 * second) for second in seconds or [1.0] * len(units)]
    device = CLUSTERS["dgx-a100"].device
    return Chooser(Recompute(method, layers), units, times, ledger, memory=memory, device=device)


def kept(stage):
    return len(stage.units) - len(stage.recompute)


def test_the_flags_name_the_methods():
    assert (
        Recompute.of(None, None, None) == Recompute("none")
        and Recompute.of("full", None, None).method == "full"
    )
    assert Recompute.of("full", "block", 3) == Recompute("block", 3)


def test_uniform_recomputes_all_layers_in_runs_and_block_the_first_of_each_stage():
    units = chain(12)
    uniform = chooser(units, "uniform", ranks=2, layers=2).stages((0, 6, 12))
    assert uniform[0].runs == ((1, 2), (3, 4), (5,)) and uniform[1].runs == ((6, 7), (8, 9), (10,))
    block = chooser(units, "block", ranks=2, layers=2).stages((0, 6, 12))
    assert [stage.recompute for stage in block] == [(1, 2), (6, 7)]


def test_a_layer_of_a_captured_model_is_all_its_units():
    units = [
        replace(unit, name=f"model.layers.{i // 2}.{'mlp' if i % 2 else 'attn'}")
        for i, unit in enumerate(chain(8))
    ]
    units = [replace(unit, saved_bytes=8 * MIB) for unit in units]
    (stage,) = chooser(units, "uniform", ranks=1, layers=2).stages((0, 8))
    assert stage.runs == ((0, 1, 2, 3), (4, 5, 6))
    (stage,) = chooser(units, "block", ranks=1, layers=1).stages((0, 8))
    assert stage.recompute == (0, 1)


def test_the_ratio_rule_of_the_paper():
    """Eight stages of 32 layers, of which the first keeps a quarter: 0.25 0.29 0.35 0.44 0.58 0.88
    1 1.
    """
    units = [replace(chain(3)[1], name=f"layer.{index}") for index in range(8 * 32 + 1)]
    bounds = (*range(0, 256, 32), 257)
    rule = chooser(units, "stage-aware", ranks=8)
    rule.memory = 1 + max(
        _total(rule, [StagePlan(a, b, tuple(range(a, b - keep)))], index)
        for index, (a, b, keep) in enumerate(
            zip(bounds, bounds[1:], (8, 9, 11, 14, 18, 28, 32, 33), strict=False)
        )
    )
    stages = rule.stages(bounds)
    first = kept(stages[0])
    assert first >= 8
    for index, stage in enumerate(stages[:-1]):
        assert kept(stage) == min(32, first * 7 // (7 - index))
    assert stages[-1].recompute == () and max(rule.peaks(stages)) <= rule.memory
    more = [StagePlan(s.first, s.last, s.recompute) for s in stages]
    grown = [min(32, (first + 1) * 7 // (7 - i)) for i in range(7)]
    more = [
        StagePlan(s.first, s.last, tuple(range(s.first, s.last - g)))
        for s, g in zip(stages, grown, strict=False)
    ]
    assert max(rule.peaks([*more, stages[-1]])) > rule.memory


def _total(rule, stages, index):
    return rule.ledger.alone(index, stages[0]).total


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("schedule", ["zb-v", "pipedream"])
def test_a_stage_fits_by_its_own_messages_whatever_stage_was_asked_before(schedule, microbatches):
    """Of equal units with as much in flight; at the turn of a V a stage has one neighbour."""
    units = chain(8, saved=MIB, border=8 * MIB)
    facts = {"ranks": 2, "schedule": schedule, "microbatches": microbatches}
    ledger = chooser(units, "none", **facts).ledger
    needs = {}
    count = ledger.schedule.stages
    for index in range(count):
        share = len(ledger.stages_of[ledger.schedule.rank_of(index)])
        for first in range(index, len(units) if index else 1):
            for last in range(first + 1, len(units) - count + index + 2):
                needs[index, first, last] = (
                    share * ledger.alone(index, StagePlan(first, last)).total
                )
    for memory in sorted(set(needs.values())):
        rule = chooser(units, "none", memory=memory, **facts)
        for place, needed in needs.items():
            assert math.isinf(rule.extra(*place)) == (needed > memory), place


sizes = st.integers(0, 6)


@given(
    st.lists(st.tuples(sizes, st.integers(1, 5), st.integers(1, 4)), min_size=2, max_size=7),
    st.data(),
)
@settings(max_examples=150, deadline=None)
def test_capacity_fits_wherever_anything_does_and_recomputes_nothing_needlessly(drawn, data):
    units = [Unit(f"u{i}", "u", 0, 1, saved, out) for i, (saved, out, _) in enumerate(drawn)]
    seconds = [float(second) for *_, second in drawn]
    index, schedule = (
        data.draw(st.integers(0, 3)),
        data.draw(st.sampled_from(["1f1b", "early-recompute", "gpipe"])),
    )
    memory = data.draw(st.integers(1, 150))
    choose = chooser(units, "capacity", memory=memory, schedule=schedule, seconds=seconds)

    def fits(again):
        return choose.ledger.alone(index, StagePlan(0, len(units), tuple(again))).total <= memory

    every = [
        again for count in range(len(units) + 1) for again in combinations(range(len(units)), count)
    ]
    fitting = [again for again in every if fits(again)]
    extra = choose.extra(index, 0, len(units))
    if not fits([unit for unit in range(len(units)) if units[unit].saved_bytes]):
        return  # recomputing all that keeps anything is what it ends with
    assume(fitting)
    found = choose.stage(index, 0, len(units)).recompute
    assert fits(found) and extra == sum(seconds[unit] for unit in found)
    assert not any(fits([other for other in found if other != unit]) for unit in found)
    if (
        len(set(seconds)) == 1
        and len({(u.saved_bytes, u.output_bytes) for u in units}) == 1
        and schedule == "1f1b"
    ):
        assert len(found) == min(map(len, fitting))


def config(memory_gb, method="capacity", schedule="1f1b", **model):
    shape = {
        "num_layers": 22,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "seq_length": 1024,
        "vocab_size": 8192,
    }
    flags = {"recompute_granularity": None if method is None else "full"}
    flags["recompute_method"] = None if method in (None, "full") else method
    if method == "selective":
        flags = {"recompute_granularity": "selective", "recompute_method": "capacity"}
    return Config(
        model=ModelConfig(**shape | model),
        parallel=ParallelConfig(
            pipeline_model_parallel_size=4,
            pipeline_schedule=schedule,
            device_memory_gb=memory_gb,
            **flags,
        ),
        train=TrainConfig(micro_batch_size=8, global_batch_size=256, bf16=True),
    )


SCHEDULES = ("1f1b", "shifted", "early-recompute", "zb-h1")


@pytest.mark.parametrize(
    ("memory", "schedule"),
    [*((m, s) for m in (5.2, 8.0, 11.0) for s in SCHEDULES), (14.0, "gpipe")],
)
def test_what_later_stages_keep_makes_room_for_more_of_their_layers(memory, schedule):
    full = plan(config(memory, "full", schedule), 4, CLUSTERS["rtx3090"])
    made = plan(config(memory, "capacity", schedule), 4, CLUSTERS["rtx3090"])
    assert max(memory.total for memory in rank_memory(made)) <= memory * GIB
    assert made.predicted_time <= full.predicted_time
    if schedule == "1f1b":
        sizes = [
            sum(unit.kind == "layer" for unit in made.stage_units(stage)) for stage in range(4)
        ]
        shares = [len(stage.recompute) / len(stage.units) for stage in made.stages]
        assert made.predicted_time < full.predicted_time
        assert sizes[:3] == sorted(sizes[:3]) and shares == sorted(shares, reverse=True)


def recomputed(plan):
    """How many units are recomputed."""
    return sum(len(stage.recompute) for stage in plan.stages)


def test_activations_that_are_recomputed_alone_leave_room_for_more_layers():
    """Entire layers are recomputed where that is not enough."""
    made = plan(config(5.2, "selective"), 4, CLUSTERS["rtx3090"])
    whole = plan(config(5.2, "capacity"), 4, CLUSTERS["rtx3090"])
    assert made.recompute_activations and not whole.recompute_activations
    assert 0 < recomputed(made) < recomputed(whole)
    assert max(memory.total for memory in rank_memory(made)) <= 5.2 * GIB
    assert made.predicted_time < whole.predicted_time


def test_stages_balanced_anew_are_faster_than_the_ratio_rule():
    """The ratio rule leaves the first stage the slowest; the fewest units on stages of their own
    size do not.
    """
    for memory in (6.0, 8.0, 10.0):
        aware = plan(config(memory, "stage-aware"), 4, CLUSTERS["rtx3090"])
        exact = plan(config(memory), 4, CLUSTERS["rtx3090"])
        assert exact.predicted_time <= aware.predicted_time
    full = plan(config(8.0, "full"), 4, CLUSTERS["rtx3090"])
    assert plan(config(8.0), 4, CLUSTERS["rtx3090"]).predicted_time < 0.95 * full.predicted_time


def test_no_cut_of_a_small_chain_is_better():
    """Ten units on three stages, every cut with the fewest that fit: none has a cheaper costliest
    stage.
    """
    units, memory = chain(10), 34 * MIB
    made = plan_chain(
        units,
        request(
            Grid(pp=3),
            microbatches=64,
            recompute_granularity="full",
            recompute_method="capacity",
            device_memory_gb=memory / GIB,
        ),
    )
    choose = chooser(units, "capacity", ranks=3, memory=memory, seconds=[1.0] * 10)

    def worst(bounds):
        found = choose.stages(bounds)
        if max(choose.peaks(found)) > memory:
            return float("inf")
        return max(3 * len(stage.units) + len(stage.recompute) for stage in found)

    bounds = (0, *(stage.last for stage in made.stages))
    every = [(0, *inner, 10) for inner in combinations(range(1, 10), 2)]
    assert any(stage.recompute for stage in made.stages) and worst(bounds) == min(map(worst, every))


def test_methods_that_need_to_know_the_memory_say_so():
    for method in ("stage-aware", "capacity"):
        with pytest.raises(PlanError, match="--device-memory-gb"):
            plan_chain(
                chain(8),
                request(
                    Grid(pp=2),
                    microbatches=4,
                    recompute_granularity="full",
                    recompute_method=method,
                ),
            )


def test_what_does_not_fit_is_told():
    with pytest.raises(PlanError, match="no cut into 2 stages fits"):
        plan_chain(
            chain(8),
            request(
                Grid(pp=2),
                microbatches=4,
                recompute_granularity="full",
                recompute_method="capacity",
                device_memory_gb=0.001,
            ),
        )
