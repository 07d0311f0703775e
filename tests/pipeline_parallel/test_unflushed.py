"""Schedules that update weights on their way: which versions of them they hold, how stale gradients
are, and that nothing waits between updates.
"""

from dataclasses import replace

import pytest

from benchmarks import EVIDENCE
from benchmarks.schedules import unflushed as page
from megatron_merak.config import ParallelConfig
from megatron_merak.config.parallel import UNFLUSHED
from megatron_merak.errors import ConfigError, ScheduleError
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.pipeline_parallel.check import check, peak_in_flight
from megatron_merak.pipeline_parallel.ops import Kind, Schedule, Updates, ops_of
from megatron_merak.pipeline_parallel.passes import add_communication, forward_only, resize
from megatron_merak.pipeline_parallel.simulate import StageCosts, simulate
from megatron_merak.pipeline_parallel.unflushed import (
    held_versions,
    ops_of_stage,
    updates_after,
    updates_text,
)
from megatron_merak.planner.written import written

SIZES = [(2, 4), (3, 9), (4, 16), (8, 32)]


def newest_at(schedule: Schedule, stage: int) -> dict[int, int]:
    """By micro-batch, how many updates a stage has done at its forward: counted op by op."""
    done = 0
    found = {}
    for op in ops_of_stage(schedule, stage):
        if op.kind is Kind.F:
            found[op.microbatch] = done
        done += updates_after(schedule, op)
    return found


@pytest.mark.parametrize("ranks, microbatches", SIZES)
def test_pipedream_computes_with_the_weights_of_its_forwards(ranks, microbatches):
    schedule = build_schedule("pipedream", ranks, microbatches)
    for each in (schedule, add_communication(schedule)):
        check(each)
    for stage in range(ranks):
        newest = newest_at(schedule, stage)
        ops = ops_of_stage(schedule, stage)
        assert all(schedule.updates.version(op) == newest[op.microbatch] for op in ops)
        assert schedule.updates.staleness(ops[-1]) == ranks - 1 - stage
    assert held_versions(schedule) == peak_in_flight(schedule) == tuple(range(ranks, 0, -1))


@pytest.mark.parametrize("ranks, microbatches", SIZES)
def test_2bw_holds_two_versions_and_is_one_update_late_everywhere(ranks, microbatches):
    every = ranks if microbatches % ranks == 0 else microbatches
    schedule = build_schedule("pipedream-2bw", ranks, microbatches)
    for each in (schedule, add_communication(schedule)):
        check(each)
    ops = [op for entry in schedule.entries() for op in ops_of(entry)]
    stale = {schedule.updates.staleness(op) for op in ops if op.microbatch >= every}
    assert stale == {1} and held_versions(schedule) == (2,) * ranks
    assert {schedule.updates.staleness(op) for op in ops if op.microbatch < every} == {0}


@pytest.mark.parametrize("name", UNFLUSHED)
def test_an_update_takes_no_longer_than_its_ops_once_the_pipeline_is_full(name):
    for ranks in (2, 4, 8):
        costs = StageCosts.uniform(ranks)
        few, many = (
            simulate(build_schedule(name, ranks, count * ranks), costs).makespan for count in (2, 5)
        )
        assert many - few == 3 * ranks * (1 + 2)
        flushed = simulate(build_schedule("1f1b", ranks, ranks), costs).makespan
        assert flushed == (2 * ranks - 1) * 3 > ranks * 3


@pytest.mark.parametrize("name", UNFLUSHED)
def test_they_survive_text_and_json_and_lose_updates_in_an_evaluation(name):
    schedule = build_schedule(name, 3, 6)
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.from_dict(schedule.to_dict()) == schedule
    evaluated = forward_only(schedule)
    assert evaluated.updates is None and resize(evaluated, 2).microbatches == 2
    assert resize(schedule, 6) == schedule
    with pytest.raises(ScheduleError, match="this step has 5. Let all steps have as many"):
        resize(schedule, 5)


def test_what_updates_do_not_allow_is_refused():
    schedule = build_schedule("pipedream-2bw", 2, 4)
    for changed, reason in (
        (replace(schedule, updates=Updates(2, (0, 0))), "0F2 needs weights of 1 update, and its"),
        (replace(schedule, updates=Updates(3, (1, 1))), "4 micro-batches are not updates of 3"),
        (replace(schedule, updates=Updates(2, (1,))), "it has 2 stages, and delays of 1"),
        (replace(build_schedule("zb-h1", 2, 4), updates=Updates(2, (1, 1))), "weight gradients"),
        (
            replace(build_schedule("interleaved", 2, 4), updates=Updates(2, (1,) * 4)),
            "its ranks have several stages each",
        ),
        (replace(schedule, ordered_sums=False), "its backwards have any order"),
    ):
        with pytest.raises(ScheduleError, match=reason):
            check(changed)
    for arguments in (("pipedream", 2, 4, 2), ("pipedream-2bw", 4, 8, 3), ("pipedream-2bw", 2, 5)):
        with pytest.raises(ScheduleError, match="--pipeline-update-interval"):
            build_schedule(*arguments[:3], every=[*arguments, None][3])
    with pytest.raises(TypeError, match="updates are"):
        Schedule.from_dict(schedule.to_dict() | {"updates": {"every": 2, "delays": [1, -1]}})


def test_a_schedule_file_cannot_ask_for_updates(tmp_path):
    path = tmp_path / "schedule.txt"
    path.write_text(str(build_schedule("pipedream", 2, 4)))
    parallel = ParallelConfig(pipeline_model_parallel_size=2, schedule_file=str(path))
    with pytest.raises(ConfigError, match="which a file cannot ask for. Use --pipeline-schedule"):
        written(parallel, 4)


def test_what_is_printed_says_how_stale_gradients_are():
    assert updates_text(build_schedule("1f1b", 2, 4)) == ""
    text = updates_text(build_schedule("pipedream", 3, 6))
    assert text == (
        "updates weights every 1 micro-batch, without a flush; by stage, updates that gradients are "
        "late: 2 1 0, versions of the weights held: 3 2 1"
    )


def test_the_page_has_the_section():
    text = (EVIDENCE / "schedules.md").read_text(encoding="utf-8")
    found = page.BEGIN + text.partition(page.BEGIN)[2].partition(page.END)[0] + page.END
    assert found == page.section()
