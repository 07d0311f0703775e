"""add_communication: where transfers stand, that any runnable schedule stays runnable, and what torch would place."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.check import check
from megatron_merak.pipeline_parallel.ops import RECEIVES, SENDS, Kind, Op, Schedule, ops_of
from megatron_merak.pipeline_parallel.order import execution_order, needs
from megatron_merak.pipeline_parallel.passes import add_communication
from megatron_merak.pipeline_parallel.simulate import StageCosts, simulate


def test_one_forward_one_backward_by_hand():
    assert str(add_communication(build_schedule("1f1b", 2, 3))).splitlines()[1:] == [
        "rank 0: 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 0B2",
        "rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
    ]


@pytest.mark.parametrize("name", BUILDERS)
def test_a_receive_is_posted_one_entry_ahead_and_a_send_follows_its_producer(name):
    for program in add_communication(build_schedule(name, 5, 7)).ranks:
        compute = [entry for entry in program if entry.kind.is_compute]
        for index, op in enumerate(program):
            before = [entry for entry in program[:index] if entry.kind.is_compute]
            kind = Kind.F if op.kind in (Kind.SEND_F, Kind.RECV_F) else Kind.B
            partner = Op(op.stage, kind, op.microbatch)
            if op.kind in SENDS:
                assert before[-1] == partner
            elif op.kind in RECEIVES:
                assert len(before) == max(compute.index(partner) - 1, 0)


@st.composite
def runnable_schedules(draw) -> Schedule:
    """A random order in which every op finds what it needs, over any number of ranks, with or without R and W."""
    stages, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    ranks = draw(st.integers(1, stages))
    kinds = [Kind.F, Kind.B, *draw(st.sets(st.sampled_from([Kind.W, Kind.R])).map(sorted))]
    empty = Schedule("random", stages, microbatches, ((),) * ranks)
    left = [Op(s, kind, k) for s in range(stages) for kind in kinds for k in range(microbatches)]
    done, programs = set(), [[] for _ in range(ranks)]
    while left:
        ready = [
            op
            for op in left
            if done.issuperset(needs(empty, op))
            and not (op.kind is Kind.B and Kind.R in kinds and Op(op.stage, Kind.R, op.microbatch) not in done)
        ]
        op = draw(st.sampled_from(ready))
        left.remove(op)
        done.add(op)
        programs[empty.rank_of(op.stage)].append(op)
    return Schedule("random", stages, microbatches, tuple(map(tuple, programs)))


@settings(max_examples=150, deadline=None)
@given(runnable_schedules())
def test_any_runnable_schedule_stays_valid(schedule):
    check(schedule)
    communicating = add_communication(schedule)
    check(communicating)
    computes = [[entry for entry in program if entry.kind.is_compute] for program in communicating.ranks]
    assert computes == [list(program) for program in schedule.ranks]
    assert Schedule.parse(str(communicating)) == communicating


@settings(max_examples=50, deadline=None)
@given(runnable_schedules())
def test_simulated_time_respects_every_need(schedule):
    timeline = simulate(schedule, StageCosts.uniform(schedule.stages, 1, 2, 1, 1, transfer=0.5, latency=0.25))
    start = {event.op: event.start for event in timeline.events}
    end = {event.op: event.end for event in timeline.events}
    for op in start:
        for need in needs(schedule, op):
            wait = 0.0 if schedule.rank_of(need.stage) == schedule.rank_of(op.stage) else 0.75
            assert start[op] >= end[need] + wait
    assert len(start) == sum(len(program) for program in schedule.ranks)


def test_a_group_receives_before_and_sends_after_it():
    text = "g stages=2 microbatches=2\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1|1B0 1B1"
    program = add_communication(Schedule.parse(text)).ranks[1]
    assert list(map(str, map(lambda entry: "|".join(map(str, ops_of(entry))), program))) == [
        *("1RECV_F0", "1RECV_F1", "1F0", "1F1|1B0", "1SEND_B0", "1B1", "1SEND_B1")
    ]


def test_receives_take_the_order_of_the_sends():
    """Stage 1 wants micro-batch 1 first, but 0 is sent first: its receive moves ahead."""
    text = "crossed stages=2 microbatches=2\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F1 1F0 1B0 1B1"
    communicating = add_communication(Schedule.parse(text))
    assert str(communicating).splitlines()[2].startswith("rank 1: 1RECV_F0 1RECV_F1 1F1 1F0 ")
    check(communicating)


def test_one_rank_exchanges_nothing():
    text = "alone stages=3 microbatches=1\nrank 0: 0F0 1F0 2F0 2B0 1B0 0B0"
    assert add_communication(Schedule.parse(text)) == Schedule.parse(text)


def test_refusals():
    with pytest.raises(ScheduleError, match="already"):
        add_communication(add_communication(build_schedule("1f1b", 2, 2)))
    with pytest.raises(ScheduleError, match="no 1F0"):
        add_communication(Schedule.parse("x stages=2 microbatches=1\nrank 0: 0F0 0B0\nrank 1: 1B0"))


def test_execution_order_visits_everything_once():
    schedule = add_communication(build_schedule("1f1b", 4, 8))
    visited = list(execution_order(schedule))
    for rank, program in enumerate(schedule.ranks):
        assert [entry for visitor, entry in visited if visitor == rank] == list(program)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("stages,microbatches", [(2, 1), (4, 8), (5, 3)])
def test_torch_accepts_our_text_and_adds_the_same_transfers(name, stages, microbatches):
    oracle = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = build_schedule(name, stages, microbatches)
    actions = {
        rank: [oracle._Action.from_str(str(op)) for op in program] for rank, program in enumerate(schedule.ranks)
    }
    placed = oracle._validate_schedule(actions, stages, stages, microbatches)
    assert placed == {stage: schedule.rank_of(stage) for stage in range(stages)}
    theirs = oracle._add_send_recv(actions, lambda stage: stage, stages)
    for rank, program in enumerate(add_communication(schedule).ranks):
        assert sorted(map(str, program)) == sorted(map(str, theirs[rank]))
