"""Pairs of forward and backward: valid, as many as the pipe allows, and never slower than 1F1B."""

import pytest

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.check import check, peak_in_flight
from megatron_merak.pipeline_parallel.ops import Kind, ops_of
from megatron_merak.pipeline_parallel.pairs import pair
from megatron_merak.pipeline_parallel.passes import add_communication
from megatron_merak.pipeline_parallel.simulate import StageCosts, simulate


def pairs(schedule):
    return [entry for entry in schedule.entries() if len(ops_of(entry)) > 1]


def test_by_hand():
    assert str(pair(build_schedule("1f1b", 2, 5))).splitlines()[1:] == [
        "rank 0: 0F0 0F1 0F2 0F3|0B0 0F4|0B1 0B2 0B3 0B4",
        "rank 1: 1F0 1F1|1B0 1F2|1B1 1F3|1B2 1F4|1B3 1B4",
    ]


def test_one_rank_pairs_every_forward_but_the_first():
    """Where there is no pipeline: the micro-batches of gradient accumulation overlap."""
    assert (
        str(pair(build_schedule("1f1b", 1, 3))).splitlines()[1] == "rank 0: 0F0 0F1|0B0 0F2|0B1 0B2"
    )


@pytest.mark.parametrize(
    "ranks,microbatches", [(1, 1), (1, 4), (2, 1), (2, 8), (3, 7), (4, 8), (8, 16)]
)
@pytest.mark.parametrize("name", BUILDERS)
def test_valid(name, ranks, microbatches):
    if name == "shifted" and (ranks < 2 or microbatches < 4):
        return
    schedule = build_schedule(name, ranks, microbatches)
    paired = pair(schedule)
    check(paired)
    check(add_communication(paired))
    for entry in pairs(paired):
        forward, backward = entry
        assert (forward.kind, backward.kind) == (
            Kind.F,
            Kind.B,
        ) and forward.microbatch != backward.microbatch
    for rank, program in enumerate(schedule.ranks):
        for kinds in ("F", "BRW"):  # each in its old order
            ops = [op for entry in paired.ranks[rank] for op in ops_of(entry) if op.kind in kinds]
            assert ops == [op for op in program if op.kind in kinds]


@pytest.mark.parametrize("ranks,microbatches", [(1, 8), (2, 8), (4, 16), (8, 32)])
def test_costs_nothing_and_gains_what_overlaps(ranks, microbatches):
    """Stage s pairs all but the 2 (S - s) - 1 forwards that run ahead, and as many backwards of the
    drain.
    """
    schedule, costs = build_schedule("1f1b", ranks, microbatches), StageCosts.uniform(ranks, 1, 2)
    paired = pair(schedule)
    steps = microbatches - (2 * ranks - 1)
    assert [sum(op.stage == stage for op, _ in pairs(paired)) for stage in range(ranks)] == [
        steps + 2 * stage for stage in range(ranks)
    ]
    assert simulate(paired, costs).makespan == simulate(schedule, costs).makespan
    hidden = simulate(schedule, costs).makespan - simulate(paired, costs, overlap=1.0).makespan
    # a forward for every pair that follows another
    assert hidden == pytest.approx(microbatches - 1)
    assert peak_in_flight(paired) == tuple(2 * (ranks - stage) for stage in range(ranks))


def test_an_interleaved_pipe_pairs_within_its_memory():
    schedule, costs = build_schedule("interleaved", 4, 16), StageCosts.uniform(8)
    paired = pair(schedule)
    assert len(pairs(paired)) == 96
    assert simulate(paired, costs).makespan == simulate(schedule, costs).makespan
    assert simulate(paired, costs, overlap=0.5).makespan < 0.88 * simulate(schedule, costs).makespan
    assert sum(peak_in_flight(paired)) <= sum(peak_in_flight(schedule)) + 8


def test_bounds_of_memory_leave_fewer_pairs():
    schedule = build_schedule("1f1b", 4, 8)
    found = {}
    for limits in ((1, 1, 1, 1), (4, 3, 2, 1), (5, 4, 3, 2), (8, 6, 4, 2)):
        paired = pair(schedule, limits)
        check(paired, limits)
        found[limits] = len(pairs(paired))
    assert list(found.values()) == [0, 0, 10, 16]
    assert len(pairs(pair(schedule))) == 16


def test_refusals():
    with pytest.raises(ScheduleError, match="has communication ops already"):
        pair(add_communication(build_schedule("1f1b", 2, 2)))
    with pytest.raises(ScheduleError, match="leave no order of it. Allow more memory"):
        pair(build_schedule("interleaved", 2, 4), [1, 1, 1, 1])
