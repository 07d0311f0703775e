"""Ops and schedules read back what they print."""

import json
from dataclasses import replace

import pytest

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule, ops_of, parse_entry
from megatron_merak.pipeline_parallel.passes import add_communication

GROUPED = """
two stages=2 microbatches=2

rank 0: 0F0 0F1 0B0 0R1 0B1 0W1
rank 1: 1F0 1F1|1B0 1B1
"""


@pytest.mark.parametrize("kind", Kind)
def test_op_text(kind):
    op = Op(12, kind, 345)
    assert str(op) == f"12{kind.value}345"
    assert Op.parse(str(op)) == op


@pytest.mark.parametrize("text", ["", "F0", "0F", "0X1", "0f1", "0F1 ", "-1F0", "0RECV1", "0F1|"])
def test_bad_op_text_is_refused(text):
    with pytest.raises(ScheduleError):
        parse_entry(text)


def test_counterpart_is_an_involution_across_one_boundary():
    assert Op(0, Kind.SEND_F, 3).counterpart() == Op(1, Kind.RECV_F, 3)
    assert Op(1, Kind.SEND_B, 3).counterpart() == Op(0, Kind.RECV_B, 3)
    for kind in (kind for kind in Kind if not kind.is_compute):
        assert Op(4, kind, 3).counterpart().counterpart() == Op(4, kind, 3)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("communicate", [False, True])
def test_schedule_round_trips_as_text_and_as_json(name, communicate):
    schedule = build_schedule(name, 4, 6)
    if communicate:
        schedule = add_communication(schedule)
    assert schedule.has_communication == communicate
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule


def test_groups_and_empty_ranks_round_trip():
    schedule = Schedule.parse(GROUPED)
    assert schedule.ranks[1][1] == (Op(1, Kind.F, 1), Op(1, Kind.B, 0))
    assert [len(ops_of(entry)) for entry in schedule.ranks[1]] == [1, 2, 1]
    assert Schedule.parse(str(schedule)) == schedule == Schedule.from_dict(schedule.to_dict())
    empty = Schedule("none", 2, 1, ((), ()))
    assert Schedule.parse(str(empty)) == empty


def test_what_is_said_of_sums_round_trips():
    ordered = Schedule("x", 2, 1, ((), ()), (1, 0))
    unordered = replace(ordered, ordered_sums=False)
    assert str(unordered).startswith("x stages=2 microbatches=1 placement=1,0 sums=unordered\n")
    assert "ordered_sums" not in ordered.to_dict() and ordered != unordered
    assert Schedule.parse(str(unordered)) == unordered == Schedule.from_dict(unordered.to_dict())
    with pytest.raises(TypeError, match="ordered_sums is 'no'"):
        Schedule.from_dict(unordered.to_dict() | {"ordered_sums": "no"})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1f1b stages=2",
        "x stages=1 microbatches=1\nrank 1: 0F0",
        "x stages=1 microbatches=1\nrank 0: 0F0 0Q0",
    ],
)
def test_bad_schedule_text_is_refused(text):
    with pytest.raises(ScheduleError):
        Schedule.parse(text)


def test_malformed_schedules_are_refused():
    for name, stages, ranks in (("two words", 1, ((),)), ("none", 1, ()), ("many", 1, ((), ()))):
        with pytest.raises(ScheduleError):
            Schedule(name, stages, 1, ranks)
    with pytest.raises(ScheduleError, match="fewer than two"):
        Schedule("group", 1, 1, (((Op(0, Kind.F, 0),),),))


def test_stages_go_round_the_ranks():
    schedule = Schedule("virtual", 5, 1, ((), ()))
    assert [schedule.rank_of(stage) for stage in range(5)] == [0, 1, 0, 1, 0]
    # Two ranks, two boundaries: the activation 1 -> 0 and the gradient 1 -> 0 are different
    # streams.
    assert schedule.channel(Op(1, Kind.SEND_F, 0)) == (1, 0, Kind.SEND_F)
    assert schedule.channel(Op(0, Kind.RECV_B, 0)) == (1, 0, Kind.SEND_B)
