"""The named schedules are valid at every size, take the time their formula says, and look like their figures."""

import pytest

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.check import check, peak_in_flight
from megatron_merak.pipeline_parallel.draw import draw_text
from megatron_merak.pipeline_parallel.ops import Kind, Op
from megatron_merak.pipeline_parallel.passes import add_communication
from megatron_merak.pipeline_parallel.simulate import StageCosts, simulate

SIZES = [(s, m) for s in (1, 2, 3, 4, 7, 8, 16) for m in (1, 2, 3, 5, 8, 17)] + [(32, 1), (32, 31), (32, 256)]


@pytest.mark.parametrize("stages,microbatches", SIZES)
@pytest.mark.parametrize("name", BUILDERS)
def test_valid_with_and_without_communication(name, stages, microbatches):
    schedule = build_schedule(name, stages, microbatches)
    assert (schedule.stages, schedule.microbatches, len(schedule.ranks)) == (stages, microbatches, stages)
    held = {
        "naive": [1] * stages,
        "gpipe": [microbatches] * stages,
        "1f1b": [min(stages - stage, microbatches) for stage in range(stages)],
    }[name]
    check(schedule, in_flight=held)
    check(add_communication(schedule), in_flight=held)
    assert list(peak_in_flight(schedule)) == held


@pytest.mark.parametrize("forward,backward", [(1, 1), (1, 2), (5, 3)])
@pytest.mark.parametrize("stages,microbatches", [(1, 1), (1, 9), (2, 1), (4, 2), (4, 8), (5, 7), (16, 64), (32, 33)])
@pytest.mark.parametrize("name", BUILDERS)
def test_makespan_is_the_formula(name, stages, microbatches, forward, backward):
    timeline = simulate(build_schedule(name, stages, microbatches), StageCosts.uniform(stages, forward, backward))
    slots = microbatches * stages if name == "naive" else microbatches + stages - 1
    assert timeline.makespan == slots * (forward + backward)
    assert timeline.bubbles == pytest.approx([1 - microbatches / slots] * stages)
    assert timeline.bubble == pytest.approx(1 - microbatches / slots)


@pytest.mark.parametrize("name", BUILDERS)
def test_backwards_run_in_microbatch_order(name):
    for stage, program in enumerate(build_schedule(name, 4, 9).ranks):
        assert [op for op in program if op.kind is Kind.B] == [Op(stage, Kind.B, k) for k in range(9)]


@pytest.mark.parametrize("name,stages,microbatches", [("naive", 3, 2), ("gpipe", 4, 4), ("1f1b", 4, 6)])
def test_figure_is_what_the_simulator_draws(name, stages, microbatches):
    figure = [line.strip() for line in BUILDERS[name].make.__doc__.splitlines() if line.strip().startswith("rank ")]
    assert (
        figure
        == draw_text(simulate(build_schedule(name, stages, microbatches), StageCosts.uniform(stages))).splitlines()
    )


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("stages,microbatches", [(0, 1), (1, 0)])
def test_nothing_to_schedule_is_refused(name, stages, microbatches):
    with pytest.raises(ScheduleError, match="at least one"):
        build_schedule(name, stages, microbatches)
