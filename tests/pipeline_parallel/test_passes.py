"""add_communication: where transfers stand, that any runnable schedule stays runnable, and what
torch would place.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.check import check
from megatron_merak.pipeline_parallel.ops import RECEIVES, SENDS, Kind, Op, Schedule, ops_of
from megatron_merak.pipeline_parallel.order import execution_order, needs
from megatron_merak.pipeline_parallel.pairs import pair
from megatron_merak.pipeline_parallel.passes import add_communication, forward_only, resize, without
from megatron_merak.pipeline_parallel.simulate import StageCosts, simulate


def test_one_forward_one_backward_by_hand():
    assert str(add_communication(build_schedule("1f1b", 2, 3))).splitlines()[1:] == [
        "rank 0: 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 0B2",
        "rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
    ]


@pytest.mark.parametrize("name", BUILDERS)
def test_a_send_follows_its_producer_and_a_receive_is_posted_a_forward_or_backward_ahead(name):
    """So before the R that precedes a B, and the W that follows one. Earlier only to keep the order
    of the sends.
    """
    schedule = add_communication(build_schedule(name, 5, 7))
    sent = {}
    for op in (op for program in schedule.ranks for op in program if op.kind in SENDS):
        sent.setdefault(schedule.channel(op), []).append(op.counterpart())
    for program in schedule.ranks:
        compute = [op for op in program if op.kind.is_compute]
        posted = {}
        for index, op in enumerate(program):
            before = [op for op in program[:index] if op.kind.is_compute]
            kind = Kind.F if op.kind in (Kind.SEND_F, Kind.RECV_F) else Kind.B
            partner = Op(op.stage, kind, op.microbatch)
            if op.kind in SENDS:
                assert before[-1] == partner
            elif op.kind in RECEIVES:
                main = [
                    at
                    for at, other in enumerate(compute[: compute.index(partner)])
                    if other.kind in "FB"
                ]
                latest = main[-1] if main else 0
                channel = sent[schedule.channel(op)]
                following = channel[channel.index(op) + 1 :]
                assert len(before) <= latest
                posted[op] = (len(before), latest, following)
        for at, latest, following in posted.values():
            assert at == min([latest, *(posted[other][0] for other in following)])


def test_a_gradient_travels_while_its_microbatch_is_recomputed():
    """Also where the R costs nothing: then what stands before it hides the transfer."""
    text = "r stages=2 microbatches=2\nrank 0: 0F0 0F1 0R0 0B0 0R1 0B1\nrank 1: 1F0 1B0 1F1 1B1"
    assert str(add_communication(Schedule.parse(text))).splitlines()[1] == (
        "rank 0: 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0R0 0RECV_B1 0B0 0R1 0B1"
    )
    text = "w stages=2 microbatches=2\nrank 0: 0F0 0F1 0B0 0W0 0B1 0W1\nrank 1: 1F0 1B0 1W0 1F1 1B1 1W1"
    assert str(add_communication(Schedule.parse(text))).splitlines()[2] == (
        "rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1W0 1F1 1B1 1SEND_B1 1W1"
    )


def test_virtual_stages_of_one_rank_exchange_nothing():
    """The last stage of the first leg of the V and the first of the second are one rank's."""
    schedule = add_communication(build_schedule("zb-v", 2, 3))
    assert {(op.stage, op.kind) for op in schedule.entries() if not op.kind.is_compute} == {
        (0, Kind.SEND_F), (1, Kind.RECV_F), (2, Kind.SEND_F), (3, Kind.RECV_F),
        (3, Kind.SEND_B), (2, Kind.RECV_B), (1, Kind.SEND_B), (0, Kind.RECV_B),
    }  # fmt: skip


@st.composite
def runnable_schedules(draw) -> Schedule:
    """A random order in which every op finds what it needs, with or without R and W, its stages
    placed anywhere; backwards and weight gradients in micro-batch order."""
    stages, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    ranks = draw(st.integers(1, stages))
    kinds = [Kind.F, Kind.B, *draw(st.sets(st.sampled_from([Kind.W, Kind.R])).map(sorted))]
    placement = tuple(
        draw(st.permutations([*range(ranks), *(s % ranks for s in range(stages - ranks))]))
    )
    empty = Schedule("random", stages, microbatches, ((),) * ranks, placement)
    left = [Op(s, kind, k) for s in range(stages) for kind in kinds for k in range(microbatches)]
    done, programs = set(), [[] for _ in range(ranks)]
    while left:
        ready = [
            op
            for op in left
            if done.issuperset(needs(empty, op))
            and not (
                op.kind is Kind.B
                and Kind.R in kinds
                and Op(op.stage, Kind.R, op.microbatch) not in done
            )
            and not (
                op.kind in "BW"
                and op.microbatch > 0
                and Op(op.stage, op.kind, op.microbatch - 1) not in done
            )
        ]
        op = draw(st.sampled_from(ready))
        left.remove(op)
        done.add(op)
        programs[empty.rank_of(op.stage)].append(op)
    return Schedule("random", stages, microbatches, tuple(map(tuple, programs)), placement)


@settings(max_examples=150, deadline=None)
@given(runnable_schedules())
def test_any_runnable_schedule_stays_valid(schedule):
    check(schedule)
    communicating = add_communication(schedule)
    check(communicating)
    computes = [
        [entry for entry in program if entry.kind.is_compute] for program in communicating.ranks
    ]
    assert computes == [list(program) for program in schedule.ranks]
    assert Schedule.parse(str(communicating)) == communicating


@settings(max_examples=50, deadline=None)
@given(runnable_schedules())
def test_simulated_time_respects_every_need(schedule):
    timeline = simulate(
        schedule, StageCosts.uniform(schedule.stages, 1, 2, 1, 1, transfer=0.5, latency=0.25)
    )
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
        "1RECV_F0",
        "1RECV_F1",
        "1F0",
        "1F1|1B0",
        "1SEND_B0",
        "1B1",
        "1SEND_B1",
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


def test_without_leaves_out_recomputations_of_some_stages():
    schedule = build_schedule("shifted", 3, 4)
    assert {op.stage for op in schedule.entries() if op.kind is Kind.R} == {0, 1}
    assert {op.stage for op in without(schedule, Kind.R, [1]).entries() if op.kind is Kind.R} == {0}
    assert without(without(schedule, Kind.R), Kind.W).ranks[2] == schedule.ranks[2]
    grouped = Schedule.parse("g stages=1 microbatches=2\nrank 0: 0F0 0F1|0R0 0B0 0W0|0R1 0B1")
    assert str(without(grouped, Kind.R)).endswith("rank 0: 0F0 0F1 0B0 0W0 0B1")
    with pytest.raises(ScheduleError, match="it cannot do without F ops"):
        without(schedule, Kind.F)


def test_forward_only_runs_the_forwards_of_pairs_alone():
    paired = pair(build_schedule("zb-v", 2, 4))
    assert any(len(ops_of(entry)) > 1 for entry in paired.entries())
    forwards = forward_only(paired)
    assert forwards.placement == paired.placement
    assert list(forwards.entries()) == [
        op for entry in paired.entries() for op in ops_of(entry) if op.kind is Kind.F
    ]


@pytest.mark.parametrize("name", BUILDERS)
def test_resize(name):
    schedule = build_schedule(name, 3, 5)
    for microbatches in (1, 4, 5, 6, 12):
        check(add_communication(resize(schedule, microbatches)))
    assert resize(schedule, 5) == schedule
    check(add_communication(resize(pair(schedule), 3)))
