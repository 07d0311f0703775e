"""The checker refuses every planted mistake, and says what is wrong."""

import random
from dataclasses import replace

import pytest

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.check import check
from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule, parse_entry
from megatron_merak.pipeline_parallel.passes import add_communication


def edit(schedule: Schedule, rank: int, change) -> Schedule:
    program = list(schedule.ranks[rank])
    change(program)
    return replace(
        schedule, ranks=(*schedule.ranks[:rank], tuple(program), *schedule.ranks[rank + 1 :])
    )


def swap(first: str, second: str):
    def change(program):
        i, j = program.index(Op.parse(first)), program.index(Op.parse(second))
        program[i], program[j] = program[j], program[i]

    return change


def drop(op: str):
    return lambda program: program.remove(Op.parse(op))


def put(op: str, at: int):
    return lambda program: program.insert(at, Op.parse(op))


MUTANTS = {
    "dropped forward": (2, drop("2F3"), "rank 2 never runs 2F3"),
    "dropped backward": (0, drop("0B7"), "rank 0 never runs 0B7"),
    "dropped send": (
        1,
        drop("1SEND_F2"),
        "rank 1 lacks 1SEND_F2, the other end of 2RECV_F2 of rank 2",
    ),
    "dropped receive": (
        1,
        drop("1RECV_B2"),
        "rank 1 lacks 1RECV_B2, the other end of 2SEND_B2 of rank 2",
    ),
    "repeated op": (3, put("3F0", 9), "rank 3 runs 3F0 2 times"),
    "wrong rank": (3, put("2W0", 9), "2W0 is on rank 3 .* stage 2 lives on rank 2"),
    "too many micro-batches": (3, put("3F8", 9), "3F8 .* outside"),
    "unknown stage": (0, put("4F0", 9), "4F0 .* outside"),
    "backward first": (3, swap("3F2", "3B2"), "3B2 .* no later than 3F2"),
    "send before forward": (0, swap("0F1", "0SEND_F1"), "0SEND_F1 .* no later than 0F1"),
    "receive after use": (1, swap("1F3", "1RECV_F3"), "1F3 .* no later than 1RECV_F3"),
    "weight before backward": (0, put("0W3", 0), "0W3 .* no later than 0B3"),
    "recompute before forward": (0, put("0R3", 0), "0R3 .* no later than 0F3"),
    "recompute after backward": (
        0,
        lambda program: program.append(Op.parse("0R3")),
        "0B3 .* no later than 0R3",
    ),
    "crossed sends": (1, swap("1SEND_F1", "1SEND_F2"), "1SEND_F2 .* no later than 1F2"),
    "crossed receives": (
        1,
        swap("1RECV_F0", "1RECV_F1"),
        "rank 1 expects 0SEND_F1 as message 0 .* which sends 0SEND_F0",
    ),
    "edge send": (3, put("3SEND_F0", 9), "3SEND_F0, which crosses no boundary"),
    "edge receive": (0, put("0RECV_F0", 0), "0RECV_F0, which crosses no boundary"),
    "grouped communication": (
        0,
        lambda program: program.append(parse_entry("0W0|0RECV_B0")),
        "groups communication",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_refused(mutant):
    rank, change, message = MUTANTS[mutant]
    schedule = add_communication(build_schedule("1f1b", 4, 8))
    check(schedule)
    with pytest.raises(ScheduleError, match=message):
        check(edit(schedule, rank, change))


@pytest.mark.parametrize("name", BUILDERS)
def test_no_op_can_be_dropped_but_what_a_backward_would_do_itself(name):
    schedule = add_communication(build_schedule(name, 3, 4))
    for rank, program in enumerate(schedule.ranks):
        for index, op in enumerate(program):
            dropped = edit(schedule, rank, lambda ops, index=index: ops.pop(index))
            if op.kind is Kind.R:
                check(dropped)
            elif op.kind is not Kind.W:
                with pytest.raises(ScheduleError):
                    check(dropped)


def test_random_reorderings_pass_only_if_they_run():
    """A shuffled compute schedule is accepted exactly when a step-by-step run of it, written here
    anew, ends, which takes no backward before that of the micro-batch before."""
    generator, verdicts = random.Random(0), []
    for _ in range(300):
        schedule = build_schedule("1f1b", 3, 3)
        for _ in range(generator.randint(1, 3)):
            rank = generator.randrange(3)
            i = generator.randrange(5)
            schedule = edit(schedule, rank, lambda ops, i=i: ops.insert(i, ops.pop(i + 1)))
        runs = runs_to_the_end(schedule)
        verdicts.append(runs)
        if runs:
            check(schedule)
            check(add_communication(schedule))
        else:
            with pytest.raises(ScheduleError):
                check(schedule)
            with pytest.raises(ScheduleError):
                check(add_communication(schedule))
    assert 50 < sum(verdicts) < 250


def runs_to_the_end(schedule: Schedule) -> bool:
    programs = [list(program) for program in schedule.ranks]
    forward, backward = set(), set()
    moved = True
    while moved:
        moved = False
        for program in programs:
            if not program:
                continue
            s, kind, k = program[0].stage, program[0].kind, program[0].microbatch
            if kind is Kind.F and (s == 0 or (s - 1, k) in forward):
                forward.add((s, k))
            elif (
                kind is Kind.B
                and (s, k) in forward
                and (s == schedule.stages - 1 or (s + 1, k) in backward)
            ):
                if k > 0 and (s, k - 1) not in backward:
                    continue
                backward.add((s, k))
            else:
                continue
            program.pop(0)
            moved = True
    return not any(programs)


DEADLOCK = """deadlock stages=3 microbatches=2
rank 0: 0F0 0B0 0F1 0B1
rank 1: 1F0 1F1 1B0 1B1
rank 2: 2F0 2B0 2F1 2B1
"""


@pytest.mark.parametrize("prepare", [lambda schedule: schedule, add_communication])
def test_a_deadlock_names_who_waits_for_whom(prepare):
    """Stage 0 wants the gradient of 0 before it runs 1, stage 1 wants the activation of 1 before it
    returns that.
    """
    with pytest.raises(ScheduleError) as caught:
        check(prepare(Schedule.parse(DEADLOCK)))
    reason = caught.value.reason
    assert reason.startswith("deadlock: rank 0 stops at 0B0 (entry ")
    assert "rank 1 stops at 1F1 (entry " in reason
    assert "of rank 1; rank 1 stops" in reason and reason.endswith("of rank 0")
    assert "rank 2" not in reason  # it waits too, but is not part of the circle


def test_in_flight_bound():
    schedule = build_schedule("1f1b", 4, 8)
    check(schedule, in_flight=[4, 3, 2, 1])
    with pytest.raises(ScheduleError, match="stage 1 holds 3 micro-batches at once, 2 are allowed"):
        check(schedule, in_flight=[4, 2, 2, 1])
    with pytest.raises(ScheduleError, match="3 in-flight bounds for 4 stages"):
        check(schedule, in_flight=[4, 4, 4])


def test_a_weight_op_keeps_its_microbatch_in_flight():
    text = "split stages=1 microbatches=2\nrank 0: 0F0 0B0 0F1 0B1 0W0 0W1"
    check(Schedule.parse(text), in_flight=[2])
    with pytest.raises(ScheduleError, match="holds 2"):
        check(Schedule.parse(text), in_flight=[1])


@pytest.mark.parametrize(
    "program,message",
    [
        ("0F0 0F1 0B1 0B0", "runs 0B0 after 0B1: its backwards are out of order"),
        ("0F0 0F1 0B0 0B1 0W1 0W0", "runs 0W0 after 0W1: its weight gradients are out of order"),
        ("0F0 0F1 0B0 0B1 0W0", "runs 0W0 after 0B1: its weight gradients are out of order"),
    ],
)
def test_gradients_are_summed_in_order(program, message):
    """Or two schedules would differ by rounding. Without its own W a B adds the weight
    gradients.
    """
    check(Schedule.parse("x stages=1 microbatches=2\nrank 0: 0F1 0F0 0B0 0W0 0B1"))
    with pytest.raises(ScheduleError, match=f"{message}.*or declare sums=unordered"):
        check(Schedule.parse(f"x stages=1 microbatches=2\nrank 0: {program}"))
    check(Schedule.parse(f"x stages=1 microbatches=2 sums=unordered\nrank 0: {program}"))


def test_virtual_stages_stay_where_they_are_placed():
    schedule = build_schedule("zb-v", 2, 2)
    check(schedule)
    with pytest.raises(ScheduleError, match="0F0 is on rank 0 .*, but stage 0 lives on rank 1"):
        check(replace(schedule, placement=(1, 0, 0, 1)))
    with pytest.raises(ScheduleError, match="3F0 is on rank 0 .*, but stage 3 lives on rank 1"):
        check(replace(schedule, placement=()))
