"""The compiled simulator and search against their twins in Python: every number to the last bit,
every error alike.
"""

import os
import pickle
import time
from dataclasses import astuple, replace
from random import Random
from unittest import mock

import pytest

from megatron_merak import _native
from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule, ops_of
from megatron_merak.pipeline_parallel.pairs import pair
from megatron_merak.pipeline_parallel.passes import add_communication, without
from megatron_merak.pipeline_parallel.search.listing import ListingRule, list_programs
from megatron_merak.pipeline_parallel.search.problem import MemoryLimits, Problem
from megatron_merak.pipeline_parallel.search.search import search
from megatron_merak.pipeline_parallel.simulate import StageCosts, simulate
from megatron_merak.pipeline_parallel.timeline import CompiledTimeline, Timeline

from .views import MIXED

host = _native.host()
pytestmark = pytest.mark.skipif(host is None, reason=f"not compiled: {_native.host_problem()}")


def twin(function, *arguments, **options):
    with mock.patch.dict(os.environ, MERAK_EXT="0"):
        assert _native.host() is None
        return function(*arguments, **options)


def outcome(function, *arguments):
    try:
        return function(*arguments)
    except ScheduleError as error:
        return str(error)


def compare(schedule, costs, overlap=0.0) -> bool:
    """Whether it ran; both ways are the same."""
    ours, theirs = (
        outcome(simulate, schedule, costs, overlap),
        outcome(twin, simulate, schedule, costs, overlap),
    )
    if isinstance(theirs, str):
        assert ours == theirs
        return False
    assert type(ours) is CompiledTimeline and type(theirs) is Timeline
    for name in (
        "makespan",
        "busy",
        "peak_in_flight",
        "bubbles",
        "events",
        "transfers",
        "schedule",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours == theirs and hash(ours) == hash(theirs)
    return True


def some_costs(draw: Random, stages: int) -> StageCosts:
    """Sometimes free links, sometimes slow ones, sometimes whole numbers with many ties."""
    slow = draw.choice([0, 0.1, 3])

    def some(count, most):
        whole = draw.random() < 0.3
        return tuple(
            draw.randint(0, 3) * bool(most) if whole else draw.random() * most for _ in range(count)
        )

    forward, backward = some(stages, 1), some(stages, 2)
    weight = tuple(value * draw.choice([0, 0.5, 1]) for value in backward)
    return StageCosts(
        forward, backward, weight, some(stages, 1), some(stages - 1, slow), some(stages - 1, slow)
    )


@pytest.mark.parametrize("name", BUILDERS)
def test_builders_take_the_same_time(name):
    draw = Random(name)
    for ranks, microbatches in ((1, 1), (2, 3), (2, 8), (4, 4), (4, 13), (7, 9)):
        try:
            schedule = build_schedule(name, ranks, microbatches)
        except ScheduleError:
            continue
        for costs in (
            StageCosts.uniform(schedule.stages),
            *(some_costs(draw, schedule.stages) for _ in range(4)),
        ):
            assert compare(schedule, costs)
            assert compare(add_communication(schedule), costs)
            assert compare(without(schedule, Kind.R), costs)
            assert compare(pair(schedule), costs, draw.choice([0, 0.37, 1]))


def random_order(draw: Random, stages: int, ranks: int, microbatches: int) -> Schedule:
    """Any order that respects the dependencies, stages anywhere, some ops together."""
    placement = [*range(ranks), *(draw.randrange(ranks) for _ in range(stages - ranks))]
    draw.shuffle(placement)
    kinds = [Kind.F, Kind.B]
    early = {s for s in range(stages) if draw.random() < 0.5}
    split = {s for s in range(stages) if draw.random() < 0.5}
    done: dict[tuple[int, Kind], int] = {(s, kind): 0 for s in range(stages) for kind in Kind}
    programs: list[list] = [[] for _ in range(ranks)]
    while any(done[s, kind] < microbatches for s in range(stages) for kind in kinds):
        ready = []
        for s in range(stages):
            f, b, r, w = (done[s, kind] for kind in (Kind.F, Kind.B, Kind.R, Kind.W))
            if f < microbatches and (s == 0 or done[s - 1, Kind.F] > f):
                ready.append(Op(s, Kind.F, f))
            if b < f and (s == stages - 1 or done[s + 1, Kind.B] > b):
                ready.append(Op(s, Kind.B, b))
            if s in early and b <= r < f:
                ready.append(Op(s, Kind.R, r))
            if s in split and w < b:
                ready.append(Op(s, Kind.W, w))
        op = draw.choice(ready)
        if op.kind is Kind.B and op.stage in early:
            done[op.stage, Kind.R] = max(done[op.stage, Kind.R], op.microbatch + 1)
        done[op.stage, op.kind] += 1
        programs[placement[op.stage]].append(op)
    for s in split:
        rest = range(done[s, Kind.W], microbatches)
        programs[placement[s]] += [Op(s, Kind.W, k) for k in rest]
    return Schedule("random", stages, microbatches, tuple(map(tuple, programs)), tuple(placement))


def grouped(draw: Random, schedule: Schedule) -> Schedule:
    """Neighbours of different micro-batches become groups of two or three."""
    programs = []
    for program in schedule.ranks:
        entries: list = []
        for op in program:
            together = ops_of(entries[-1]) if entries else ()
            apart = all(other.microbatch != op.microbatch for other in together)
            if together and apart and len(together) < 3 and draw.random() < 0.4:
                entries[-1] = (*together, op)
            else:
                entries.append(op)
        programs.append(tuple(entries))
    return replace(schedule, ranks=tuple(programs))


def damaged(draw: Random, schedule: Schedule) -> Schedule:
    """One entry swapped with its neighbour or another, dropped, run twice, or another op."""
    programs = [list(program) for program in schedule.ranks]
    program = draw.choice([some for some in programs if some])
    i, j = draw.randrange(len(program)), draw.randrange(len(program))
    match draw.randrange(8):
        case 5 | 6 | 7:
            program[i - 1], program[i] = program[i], program[i - 1]
        case 0:
            program[i], program[j] = program[j], program[i]
        case 1:
            del program[i]
        case 2:
            program.insert(j, program[i])
        case 3:
            program[i] = Op(
                draw.randrange(schedule.stages + 1), draw.choice(list(Kind)), draw.randrange(4)
            )
        case 4:
            draw.choice(programs).insert(0, program.pop(i))
    return replace(schedule, ranks=tuple(map(tuple, programs)))


@pytest.mark.parametrize("seed", range(100))
def test_any_order_takes_the_same_time_and_fails_alike(seed):
    draw = Random(seed)
    stages = draw.randint(1, 7)
    schedule = random_order(draw, stages, draw.randint(1, stages), draw.randint(1, 6))
    costs = some_costs(draw, stages)
    assert compare(schedule, costs)
    sent = add_communication(schedule)
    assert compare(sent, costs)
    compare(grouped(draw, schedule), costs, draw.random())
    for some in (schedule, sent):
        for _ in range(4):
            compare(damaged(draw, some), costs)


def test_damage_is_of_both_kinds():
    """The test above would be worth little if every damaged schedule failed, or none."""
    draw, ran = Random(0), []
    for _ in range(60):
        schedule = add_communication(random_order(draw, 3, 2, 3))
        ran.append(compare(damaged(draw, schedule), StageCosts.uniform(3, transfer=0.5)))
    assert 5 < sum(ran) < 55


def test_groups_stages_of_one_rank_and_odd_numbers():
    mixed = Schedule.parse(MIXED)
    assert compare(mixed, StageCosts.uniform(4, 0.01, 0.02, 0.01, 0.01, 0.001, 0.0005), 0.5)
    assert compare(mixed, StageCosts.uniform(4, 1, 2, 1, 1, 5, 2), 1)
    for odd in (2**60 + 1, 1e300, float("inf")):
        timeline = simulate(mixed, StageCosts.uniform(4, odd))
        assert type(timeline) is Timeline and repr(timeline) == repr(
            twin(simulate, mixed, StageCosts.uniform(4, odd))
        )


def test_what_is_no_op_is_left_to_python():
    for program in (
        ("0F0", "0B0"),
        (Op(0, "F", 0), Op(0, "B", 0)),
        (Op(0, Kind.F, True), Op(0, Kind.B, 0)),
        [],
        ((),),
    ):
        assert (
            host.simulate((program,), tuple(Kind), 1, [0], astuple(StageCosts.uniform(1)), 0.0)
            is None
        )
    assert host.simulate(((),), tuple(Kind), -1, [0], astuple(StageCosts.uniform(1)), 0.0) is None


def test_a_timeline_can_be_stored():
    arguments = build_schedule("1f1b", 3, 5), StageCosts.uniform(3, transfer=0.1)
    again = pickle.loads(pickle.dumps(simulate(*arguments)))
    assert type(again) is Timeline and again == twin(simulate, *arguments)


def test_a_deep_pipeline_is_quick():
    """128 stages of 512 micro-batches, as of a plan for ten thousand ranks: 1F1B takes (m + S -
    1)(F + B).
    """
    schedule = build_schedule("1f1b", 128, 512)
    started = time.thread_time()
    timeline = simulate(schedule, StageCosts.uniform(128))
    seconds = time.thread_time() - started
    assert timeline.makespan == (512 + 127) * 3 and timeline.peak_in_flight == tuple(
        range(128, 0, -1)
    )
    assert seconds < 2


def some_problem(draw: Random) -> Problem:
    ranks, count = draw.randint(1, 6), draw.randint(1, 8)
    once = tuple(range(ranks))
    home = draw.choice([once, once, once, once * 2, (*once, *reversed(once)), once * 3])
    stages, chunks = len(home), len(home) // ranks
    costs = some_costs(draw, stages)
    limits = None
    if draw.random() < 0.6:
        taped, held = draw.choice([0.0, 2.0, 3]), draw.choice([0.0, 0.5, 1.5])
        cap = tuple(chunks + taped + draw.randint(0, 6) + draw.random() for _ in range(ranks))
        limits = MemoryLimits(cap, (1.0,) * stages, (taped,) * stages, (held,) * stages)
    recompute = [draw.random() < 0.7 for _ in range(stages)] if draw.random() < 0.5 else None
    return Problem(costs, count, limits, recompute, draw.random() < 0.5, home)


def some_rule(draw: Random, problem: Problem) -> ListingRule:
    count = problem.microbatches
    return ListingRule(
        tuple(draw.randint(1, count + 1) for _ in range(problem.stages)),
        draw.choice([0, 0.0, 0.5, 4.0]),
        draw.random() < 0.5,
        draw.choice([0, 1, 2, count]),
        draw.choice([(), tuple(draw.random() < 0.5 for _ in range(problem.stages))]),
        draw.random() < 0.5,
        (draw.random() < 0.5, draw.random() < 0.5),
    )


@pytest.mark.parametrize("seed", range(60))
def test_lists_and_their_clocks_are_equal(seed):
    draw = Random(seed)
    problem = some_problem(draw)
    plain = twin(
        Problem, problem.costs, problem.microbatches, problem.limits, placement=problem.home
    )
    plain.early, plain.split = problem.early, problem.split
    assert problem.compiled is not None and twin(lambda: plain.compiled) is None
    for _ in range(10):
        rule = some_rule(draw, problem)
        programs = list_programs(problem, rule)
        assert programs == list_programs(plain, rule)
        if programs is None:
            continue
        assert problem.makespan(programs) == plain.makespan(programs)
        compiled = [plain.compile(stage, program) for stage, program in enumerate(programs)]
        assert problem.compiled.ends(programs) == plain.clock(compiled)
        rank = draw.randrange(problem.ranks)
        if len(programs[rank]) > 1:
            i, j = (draw.randrange(len(programs[rank])) for _ in range(2))
            programs[rank][i], programs[rank][j] = programs[rank][j], programs[rank][i]
            assert problem.makespan(programs) == plain.makespan(programs)


@pytest.mark.parametrize("seed", range(6))
def test_a_search_finds_the_same(seed):
    draw = Random(seed)
    problem = some_problem(draw)
    arguments = problem.costs, problem.microbatches
    options = {"limits": problem.limits, "split_weights": any(problem.split), "evaluations": 150}
    options["placement"] = problem.home
    assert search(*arguments, **options) == twin(search, *arguments, **options)


def test_impossible_arguments_are_refused():
    core = Problem(StageCosts.uniform(2), 2).compiled
    for programs in ([[0]], [[0], [8]], [[-1], [0]]):
        with pytest.raises(ValueError):
            core.ends(programs)
    with pytest.raises(ValueError):
        core.list((1,), 0.0, False, 0, (), False, (True, True))
    for home in ([0], [0, 2], [0, 0], [-1, 0]):
        with pytest.raises(ValueError):
            host.Pipeline(
                2, astuple(StageCosts.uniform(2)), [(1.0, 1.0)] * 4, [False] * 2, [False] * 2, home
            )
    for costs in (astuple(StageCosts.uniform(3)), astuple(StageCosts.uniform(2))[:5]):
        with pytest.raises(ValueError):
            host.Pipeline(2, costs, [(1.0, 1.0)] * 4, [False] * 2, [False] * 2, [0, 1])
        with pytest.raises(ValueError):
            host.simulate(((), ()), tuple(Kind), 2, [0, 1], costs, 0.0)


@pytest.mark.parametrize("seed", range(40))
def test_the_same_programs_are_allowed(seed):
    draw = Random(seed)
    problem = some_problem(draw)
    plain = twin(
        Problem, problem.costs, problem.microbatches, problem.limits, placement=problem.home
    )
    assert twin(lambda: plain.compiled) is None
    for _ in range(20):
        rank = draw.randrange(problem.ranks)
        listed = list_programs(problem, some_rule(draw, problem)) or [[]] * problem.ranks
        every = list(range(4 * problem.microbatches * len(problem.stages_of[rank])))
        program = draw.choice([listed[rank], every])
        if not program:
            continue
        i, j = draw.randrange(len(program)), draw.randrange(len(program))
        program.insert(j, program.pop(i))
        assert problem.allows(rank, program) == plain.allows(rank, program)
