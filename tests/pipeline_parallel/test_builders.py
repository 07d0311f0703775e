"""The named schedules are valid at every size, take the time their formula says, and look like
their figures.
"""

import re
from itertools import product

import pytest

from megatron_merak.config.parallel import SCHEDULES, UNFLUSHED
from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders import BUILDERS, OTHERS, build_schedule
from megatron_merak.pipeline_parallel.builders.assemble import alternate, one_stage_per_rank
from megatron_merak.pipeline_parallel.builders.interleaved import default_group
from megatron_merak.pipeline_parallel.check import check, peak_in_flight
from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule, ops_of
from megatron_merak.pipeline_parallel.pairs import pair
from megatron_merak.pipeline_parallel.passes import add_communication, forward_only, without
from megatron_merak.pipeline_parallel.simulate import StageCosts, Timeline, simulate

SIZES = [(s, m) for s in (1, 2, 3, 4, 8) for m in (1, 2, 3, 5, 8, 17)] + [(32, 1), (32, 33)]
ALL_SIZES = [
    (s, m) for s in range(1, 33) for m in (1, 2, 3, s - 1, s, s + 1, 2 * s - 1, 2 * s, 47) if m
]
ALL_SIZES += [(s, 256) for s in (1, 2, 3, 8, 15, 32)]


def recomputing(stages: int) -> StageCosts:
    """Forward 1, backward 2, recomputation 1, of which the last stage has none."""
    again = (1,) * (stages - 1) + (0,)
    return StageCosts(
        (1,) * stages, (2,) * stages, (0,) * stages, again, (0,) * (stages - 1), (0,) * (stages - 1)
    )


def makespan(
    name: str, ranks: int, microbatches: int, costs: StageCosts | None = None, **options
) -> float:
    schedule = build_schedule(name, ranks, microbatches, **options)
    return simulate(schedule, costs or StageCosts.uniform(schedule.stages)).makespan


def in_domain(name: str, ranks: int, microbatches: int) -> bool:
    row = BUILDERS[name]
    return ranks >= row.least_ranks and microbatches >= row.least_microbatches(ranks)


def in_flight(name: str, ranks: int, microbatches: int) -> list[int] | None:
    """The most micro-batches that each stage holds, where it is known by a formula."""
    warmup = [min(ranks - stage, microbatches) for stage in range(ranks)]
    match name:
        case "naive":
            return [1] * ranks
        case "gpipe":
            return [microbatches] * ranks
        case "1f1b" | "early-recompute":
            return warmup
        case "shifted":
            return [*warmup[:-2], 3, 1]
        case "zb-h1":
            return [min(ranks, microbatches)] * ranks


def held_by_rank(schedule: Schedule) -> list[int]:
    """The most micro-batches that each rank holds at once, those of all of its stages together."""
    released = (
        Kind.W
        if any(op.kind is Kind.W for entry in schedule.entries() for op in ops_of(entry))
        else Kind.B
    )
    peaks = []
    for program in schedule.ranks:
        held = peak = 0
        for op in program:
            held += (op.kind is Kind.F) - (op.kind is released)
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def validate(name: str, ranks: int, microbatches: int) -> None:
    if not in_domain(name, ranks, microbatches):
        with pytest.raises(ScheduleError, match="it needs at least"):
            build_schedule(name, ranks, microbatches)
        return
    schedule, builder = build_schedule(name, ranks, microbatches), BUILDERS[name]
    sizes = (schedule.name, schedule.stages, schedule.microbatches, len(schedule.ranks))
    assert sizes == (name, ranks * builder.chunks, microbatches, ranks)
    expected = in_flight(name, ranks, microbatches)
    assert schedule.ordered_sums and schedule.updates is None, "a row of _OTHERS"
    check(schedule, expected)
    check(add_communication(schedule), expected)
    assert expected is None or list(peak_in_flight(schedule)) == expected
    kinds = {op.kind for op in schedule.entries()}
    assert (Kind.W in kinds) == builder.splits
    assert (Kind.R in kinds) == (builder.recomputes and ranks > 1)


@pytest.mark.parametrize("ranks,microbatches", SIZES)
@pytest.mark.parametrize("name", BUILDERS)
def test_valid_with_and_without_communication(name, ranks, microbatches):
    validate(name, ranks, microbatches)


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_valid_where_they_are_defined(name):
    found = 0
    for ranks, microbatches in SIZES:
        try:
            schedule = build_schedule(name, ranks, microbatches)
        except ScheduleError:
            continue
        found += 1
        assert (schedule.updates is not None) == OTHERS[name].updates
        assert schedule.updates or not schedule.ordered_sums, "a row of _TABLE"
        check(schedule)
        check(add_communication(schedule))
        assert Schedule.parse(str(schedule)) == schedule
    assert found >= 5


def test_the_flag_has_every_name():
    """`auto`, and the searches of plans, choose from BUILDERS alone."""
    unordered = [name for name, row in OTHERS.items() if not row.updates]
    assert SCHEDULES == (*BUILDERS, *unordered, "auto")
    assert UNFLUSHED == tuple(name for name, row in OTHERS.items() if row.updates)
    assert not BUILDERS.keys() & OTHERS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDERS)
def test_valid_at_every_size(name):
    for ranks, microbatches in dict.fromkeys(ALL_SIZES):
        validate(name, ranks, microbatches)


@pytest.mark.parametrize("name", BUILDERS)
def test_every_pass_of_it_is_valid(name):
    for ranks, microbatches in [(2, 4), (3, 7), (4, 8), (5, 5)]:
        schedule = build_schedule(name, ranks, microbatches)
        check(without(without(schedule, Kind.R), Kind.W))
        check(add_communication(pair(schedule)))
        forwards = add_communication(forward_only(schedule))
        assert {op.kind for op in forwards.entries()} <= {Kind.F, Kind.SEND_F, Kind.RECV_F}
        assert forwards.placement == schedule.placement


@pytest.mark.parametrize("forward,backward", [(1, 1), (1, 2), (5, 3)])
@pytest.mark.parametrize(
    "stages,microbatches", [(1, 1), (1, 9), (2, 1), (4, 2), (4, 8), (5, 7), (16, 64), (32, 33)]
)
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_plain_makespan(name, stages, microbatches, forward, backward):
    timeline = simulate(
        build_schedule(name, stages, microbatches), StageCosts.uniform(stages, forward, backward)
    )
    slots = microbatches * stages if name == "naive" else microbatches + stages - 1
    assert timeline.makespan == slots * (forward + backward)
    assert timeline.bubbles == pytest.approx([1 - microbatches / slots] * stages)
    assert timeline.bubble == pytest.approx(1 - microbatches / slots)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(
    "ranks,microbatches", [(1, 3), (2, 2), (2, 6), (3, 7), (4, 4), (4, 6), (4, 16), (8, 8)]
)
def test_interleaved_makespan(ranks, microbatches, chunks):
    """In costs of a chunk; also where the ranks do not divide the micro-batches."""
    costs = StageCosts.uniform(ranks * chunks, 3, 5)
    assert (
        makespan("interleaved", ranks, microbatches, costs, chunks=chunks)
        == (microbatches * chunks + ranks - 1) * 8
    )


def test_interleaved_groups():
    """Of 16 micro-batches on 4 ranks: 4 a group is Megatron-LM's default; larger ones take as long
    and hold more.
    """
    assert build_schedule("interleaved", 4, 16) == build_schedule("interleaved", 4, 16, group=4)
    costs = StageCosts.uniform(8)
    times = {
        group: makespan("interleaved", 4, 16, costs, group=group) for group in (4, 6, 8, 12, 16)
    }
    assert set(times.values()) == {(16 * 2 + 3) * 3}
    held = {
        group: held_by_rank(build_schedule("interleaved", 4, 16, group=group))[0]
        for group in (4, 8, 16)
    }
    assert held == {4: 4 + 6 + 1, 8: 8 + 6 + 1, 16: 16 + 6 + 1}
    assert [default_group(4, m) for m in (1, 3, 4, 6, 7, 8, 9, 10, 13)] == [
        1,
        3,
        4,
        6,
        7,
        4,
        5,
        5,
        7,
    ]


def test_a_group_that_would_make_ranks_wait_is_refused():
    for microbatches, group in [(16, 3), (16, 17), (9, 4), (7, 6), (3, 2), (16, 15)]:
        with pytest.raises(
            ScheduleError, match=f"pipeline-stage {group}: {microbatches} micro-batches on 4 ranks"
        ):
            build_schedule("interleaved", 4, microbatches, group=group)


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 8, 16, 32])
def test_makespans_with_recomputation(stages):
    """What each idea of the shifted critical path is worth: F = 1, B = 2, R = 1, T = 4 (m
    + S - 1).
    """
    for m in (max(stages, 4), max(stages, 4) + 1, 2 * stages + 3)[: 3 if stages < 16 else 1]:
        full, keeps = StageCosts.uniform(stages, recompute=1), recomputing(stages)
        time = 4 * (m + stages - 1)
        assert makespan("1f1b", stages, m) == 3 * (m + stages - 1)
        assert makespan("1f1b", stages, m, full) == time
        assert makespan("1f1b", stages, m, keeps) == time - 2
        drain = recompute_early(stages, m, lambda stage, k, m=m: k >= m - (stages - 1 - stage))
        assert simulate(drain, full).makespan == time - (stages - 1)
        assert makespan("early-recompute", stages, m, keeps) == time - (stages + 1)
        assert (
            makespan("shifted", stages, m, keeps) == time - (stages + 2) == 4 * m + 3 * stages - 6
        )


def recompute_early(stages, microbatches, early) -> Schedule:
    """1F1B with an R where `early` says so of a stage and a micro-batch."""
    orders = []
    for stage in range(stages):
        order = alternate(microbatches, stages - stage)
        early_ones = {k for k in range(microbatches) if early(stage, k)}
        orders.append([step for kind, k in order for step in _with_recompute(kind, k, early_ones)])
    return one_stage_per_rank("early", microbatches, orders)


def _with_recompute(kind, k, early):
    return [(Kind.R, k), (kind, k)] if kind is Kind.B and k in early else [(kind, k)]


@pytest.mark.parametrize("stages,microbatches", [(2, 2), (3, 7), (4, 4), (4, 12), (8, 3)])
def test_early_recompute_is_as_fast_as_recomputing_before_every_backward(stages, microbatches):
    everywhere = recompute_early(stages, microbatches, lambda stage, k: stage < stages - 1)
    fastest = simulate(everywhere, recomputing(stages)).makespan
    assert makespan("early-recompute", stages, microbatches, recomputing(stages)) == fastest


SHIFTED = """shifted stages=4 microbatches=6
rank 0: 0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0R3 0B3 0R4 0B4 0R5 0B5
rank 1: 1F0 1F1 1F2 1R0 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1R4 1B4 1R5 1B5
rank 2: 2F0 2F1 2F2 2R0 2B0 2R1 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5
rank 3: 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5
"""


def test_shifted_is_the_published_table():
    assert build_schedule("shifted", 4, 6) == Schedule.parse(SHIFTED)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8, 16])
def test_zb_h1_makespan(stages):
    costs_of = (
        product((1, 2, 3), (1, 2, 3), (0, 1, 2, 3))
        if stages < 8
        else [(1, 1, 1), (2, 3, 2), (3, 1, 2)]
    )
    for f, b, w in costs_of:
        for m in (stages, stages + 1, 3 * stages):
            bubble = (stages - 1) * max(f, b, f + b - w)
            costs = StageCosts.uniform(stages, f, b + w, w)
            assert makespan("zb-h1", stages, m, costs) == m * (f + b + w) + bubble
            if w <= min(f, b):
                assert bubble == (stages - 1) * (f + b - w)  # as published


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
def test_zb_v_makespan_and_memory(ranks):
    for m in (2 * ranks - 1, 2 * ranks, 4 * ranks + 1):
        costs = StageCosts.uniform(2 * ranks, 1, 2, weight=1)
        assert makespan("zb-v", ranks, m, costs) == 6 * m + ranks - 1
        assert held_by_rank(build_schedule("zb-v", ranks, m)) == [min(2 * ranks, 2 * m)] * ranks


def test_zb_v_stages_go_down_and_up():
    assert build_schedule("zb-v", 4, 8).placement == (0, 1, 2, 3, 3, 2, 1, 0)


@pytest.mark.parametrize("name", [*BUILDERS, *(name for name in OTHERS if name not in UNFLUSHED)])
def test_figure_is_what_the_simulator_draws(name):
    builder = {**BUILDERS, **OTHERS}[name]
    lines = [line for line in map(str.strip, builder.make.__doc__.splitlines()) if "|" in line]
    ranks = len(lines)
    microbatches = 1 + max(int(number) for number in re.findall(r"[Ff](\d+)", " ".join(lines)))
    assert ranks > 1 and microbatches > 1
    schedule = build_schedule(name, ranks, microbatches)
    costs = StageCosts.uniform(schedule.stages, 1, 2, weight=1 if builder.splits else 0)
    timeline = simulate(schedule, recomputing(ranks) if builder.recomputes else costs)
    assert "\n".join(lines) == "\n".join(figure(timeline))  # text, so that all of it is printed


def figure(timeline: Timeline) -> list[str]:
    """Three characters per unit of time, as in the docstrings."""
    schedule, lines = timeline.schedule, []
    for rank in range(len(schedule.ranks)):
        first = next(stage for stage in range(schedule.stages) if schedule.rank_of(stage) == rank)
        cells = [".  "] * round(timeline.makespan)
        for event in (event for event in timeline.events if event.rank == rank):
            start, end = round(event.start), round(event.end)
            label = f"{event.op.kind}{event.op.microbatch}"
            label = label if event.op.stage == first else label.lower()
            text = label.ljust(3 * (end - start) - 1, "-") + " "
            cells[start:end] = [text[i : i + 3] for i in range(0, len(text), 3)]
        lines.append(f"rank {rank} | {''.join(cells)}".rstrip())
    return lines


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("ranks,microbatches", [(0, 1), (1, 0), (-1, 4)])
def test_nothing_to_schedule_is_refused(name, ranks, microbatches):
    with pytest.raises(ScheduleError, match="at least one"):
        build_schedule(name, ranks, microbatches)


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("2f2b", 2, 2), "schedule 2f2b: there is no such one. Use one of naive, gpipe, 1f1b"),
        (
            ("shifted", 1, 8),
            "at least 2 pipeline ranks, there are 1. Raise --pipeline-model-parallel-size",
        ),
        (
            ("shifted", 8, 7),
            "on 8 pipeline ranks it needs at least 8 micro-batches, there are 7. Raise --global-batch",
        ),
        (
            ("1f1b", 2, 2, 2),
            "--num-virtual-stages-per-pipeline-rank 2: the schedule 1f1b has 1 on every rank",
        ),
        (
            ("zb-v", 2, 2, 1),
            "--num-virtual-stages-per-pipeline-rank 1: the schedule zb-v has 2 on every rank",
        ),
        (
            ("interleaved", 2, 2, 0),
            "--num-virtual-stages-per-pipeline-rank 0: a rank has at least one",
        ),
        (("gpipe", 2, 2, None, 2), "pipeline-stage 2: the schedule gpipe does not group"),
        (("interleaved", 2, 2, None, 0), "pipeline-stage 0: a group has at least one"),
    ],
)
def test_outside_of_the_domain(arguments, message):
    with pytest.raises(ScheduleError) as caught:
        build_schedule(*arguments)
    assert message in str(caught.value)


def test_options_that_say_the_same_are_taken():
    assert build_schedule("zb-v", 2, 2, 2) == build_schedule("zb-v", 2, 2)
    assert build_schedule("1f1b", 2, 2, 1) == build_schedule("1f1b", 2, 2)
    one = build_schedule("interleaved", 2, 4, 1)
    assert [op for op in one.ranks[1] if op.kind is Kind.B] == [Op(1, Kind.B, k) for k in range(4)]
