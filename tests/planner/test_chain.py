"""Plans of any chain of units: stages within a memory cap, tensors tied between any units."""

from dataclasses import replace

import pytest

from megatron_merak.cluster import all_reduce, find_cluster
from megatron_merak.errors import PlanError
from megatron_merak.plan import Grid, Plan, StagePlan, Unit
from megatron_merak.planner import plan_chain
from megatron_merak.planner.predict import step_time, timeline
from megatron_merak.planner.recompute import recomputed_units
from megatron_merak.planner.saved import footprint
from tests.requests import request

MIB = 2**20


def chain(count: int = 12, parameters: int = MIB, saved: int = 8 * MIB) -> tuple[Unit, ...]:
    return tuple(Unit(f"unit.{i}", "unit", parameters, 10**9, saved, MIB) for i in range(count))


def cap(made: Plan, memory_gb: float, **options) -> Plan:
    asked = request(
        made.grid, microbatches=made.num_microbatches, device_memory_gb=memory_gb, **options
    )
    return plan_chain(made.units, asked)


def test_stages_are_cut_so_that_each_fits():
    """1F1B keeps four micro-batches in flight on the first of four stages and one on the last."""
    free = plan_chain(chain(), request(Grid(pp=4), microbatches=8))
    assert [len(stage.units) for stage in free.stages] == [3, 3, 3, 3]
    needed = max(free.predicted_bytes) / 2**30
    tight = cap(free, needed * 0.9)
    assert max(tight.predicted_bytes) <= needed * 0.9 * 2**30
    assert len(tight.stages[0].units) < 3 and tight.predicted_time > free.predicted_time
    assert cap(free, needed * 1.01) == free


def test_a_stage_that_does_not_fit_is_named():
    free = plan_chain(chain(), request(Grid(pp=2), microbatches=8))
    with pytest.raises(PlanError) as caught:
        cap(free, 0.1)
    assert str(caught.value) == (
        "--device-memory-gb 0.1: no cut into 2 stages fits; cut by cost, stage 0 (unit.0 .. unit.5) needs 205.0 MiB. "
        "Use more tensor- or pipeline-parallel ranks, a smaller micro-batch or full recomputation."
    )
    assert max(cap(free, 0.12, recompute_granularity="full").predicted_bytes) <= 0.12 * 2**30


def test_the_memory_of_a_known_device_is_respected_where_a_cut_does():
    """Units of 5 GiB of activations on devices of 80 GiB: even stages do not fit, uneven ones do,
    fewer never do.
    """
    units = chain(18, saved=5 * 2**30)
    made = plan_chain(units, request(Grid(pp=4), microbatches=8), find_cluster("H100"))
    assert max(made.predicted_bytes) <= 80 * 2**30 and len(made.stages[0].units) < len(
        made.stages[3].units
    )
    full = plan_chain(units, request(microbatches=8), find_cluster("A100 40GB"))
    assert max(full.predicted_bytes) > 40 * 2**30


def test_a_value_that_passes_through_units_is_kept_once():
    passing = [
        replace(unit, output_bytes=3, passed_bytes=passed)
        for unit, passed in zip(chain(4), (0, 2, 2, 0), strict=True)
    ]
    assert footprint(passing, StagePlan(0, 4, (0, 1, 2, 3))).kept == 3 + 1 + 1
    assert footprint(passing, StagePlan(2, 4, (2, 3))).kept == 3 + 1


def test_tensors_may_be_tied_between_any_units():
    units = list(chain(8, parameters=10))
    for index in (1, 2, 6):
        units[index] = replace(units[index], tied=(("shared.weight", 1000),))
    made = plan_chain(units, request(Grid(pp=4), microbatches=4))
    assert [len(stage.units) for stage in made.stages] == [2, 2, 2, 2]
    assert [made.stage_parameters(stage) for stage in range(4)] == [1020, 1020, 20, 1020]
    alone = replace(made, units=tuple(replace(unit, tied=()) for unit in units))
    pipeline, quiet = timeline(made), timeline(alone)
    more = step_time(made, pipeline) - pipeline.makespan
    less = step_time(alone, quiet) - quiet.makespan
    update = 1000 * 32 / made.cluster.device.memory_bandwidth
    assert more - less == pytest.approx(all_reduce(3, 4000, made.cluster.inside) + update)


def test_one_weight_of_all_units_is_updated_once_per_stage():
    """As in ALBERT. Every stage bears the update, so only what else the units cost moves
    the cuts.
    """
    units = [replace(unit, flops=0, tied=(("layer", 10**9),)) for unit in chain(12, parameters=0)]
    units[5] = replace(units[5], saved_bytes=6 * units[5].saved_bytes)
    made = plan_chain(units, request(Grid(pp=3)))
    assert [stage.units for stage in made.stages] == [range(0, 5), range(5, 6), range(6, 12)]


def test_full_recomputation_leaves_out_what_saves_little_and_the_last():
    units = [
        replace(unit, saved_bytes=saved)
        for unit, saved in zip(chain(4), (MIB, MIB + 1, 9 * MIB, 9 * MIB), strict=True)
    ]
    assert recomputed_units(units) == (1, 2)
