"""The search against the simulator, the checker, every schedule of tiny pipelines, and the
builders.
"""

import itertools
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from benchmarks.schedules import search_instances as instances
from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.check import check, peak_in_flight
from megatron_merak.pipeline_parallel.ops import Kind, Schedule
from megatron_merak.pipeline_parallel.search.bound import lower_bound
from megatron_merak.pipeline_parallel.search.listing import ListingRule, list_programs
from megatron_merak.pipeline_parallel.search.placement import placements
from megatron_merak.pipeline_parallel.search.problem import B, F, MemoryLimits, Problem, R, W
from megatron_merak.pipeline_parallel.search.search import (
    builder_makespans,
    default_evaluations,
    search,
)
from megatron_merak.pipeline_parallel.search.shift import shift_recompute
from megatron_merak.pipeline_parallel.simulate import StageCosts, simulate

ROOT = Path(__file__).parents[2]


def merges(microbatches: int, kinds: tuple[int, ...]):
    """Every program of one stage: the kinds in micro-batch order, F before R before B before W."""
    rank = {F: 0, R: 1, B: 2, W: 3}

    def grow(done):
        if all(count == microbatches for count in done.values()):
            yield []
        for kind in kinds:
            k = done[kind]
            if k < microbatches and all(
                done[other] > k for other in kinds if rank[other] < rank[kind]
            ):
                for rest in grow({**done, kind: k + 1}):
                    yield [4 * k + kind, *rest]

    return list(grow(dict.fromkeys(kinds, 0)))


def random_costs(
    draw: random.Random, stages: int, recompute: bool = True, transfer: float = 3
) -> StageCosts:
    def some(count, low, high):
        return tuple(draw.uniform(low, high) for _ in range(count))

    backward = some(stages, 1, 3)
    weight = tuple(draw.random() * value for value in backward)
    recomputed = some(stages, 0.5, 1.5) if recompute else (0.0,) * stages
    links = some(stages - 1, 0, transfer), some(stages - 1, 0, 2)
    return StageCosts(some(stages, 0.5, 1.5), backward, weight, recomputed, *links)


@pytest.mark.parametrize("seed", range(60))
def test_the_clock_is_the_simulator(seed):
    """Programs of random merges of F, R, B and W, over links as slow as the stages: equal to the
    last bit.
    """
    draw = random.Random(seed)
    stages, count = draw.choice([1, 2, 3, 5]), draw.choice([1, 2, 5])
    problem = Problem(random_costs(draw, stages), count, split_weights=True)
    warmup = tuple(draw.randint(1, count) for _ in range(stages))
    rule = ListingRule(warmup, draw.choice([0, 0.5]), draw.random() < 0.5, draw.choice([0, 1, 3]))
    programs = list_programs(problem, rule)
    for program in programs:
        if draw.random() < 0.5:
            program[:] = [code for code in program if code & 3 != W]
    schedule = problem.to_schedule("some", programs)
    check(schedule)
    timeline = simulate(schedule, problem.costs)
    assert problem.makespan(programs) == timeline.makespan
    ends = problem.clock(
        [problem.compile(stage, program) for stage, program in enumerate(programs)]
    )
    for stage, program in enumerate(programs):
        simulated = [event.end for event in timeline.events if event.rank == stage]
        assert ends[stage][1:] == simulated and len(simulated) == len(program)
    assert problem.from_schedule(schedule) == programs


def some_placement(draw: random.Random, ranks: int) -> tuple[int, ...]:
    """Two stages of each rank, in turn or in a V, or three, in turn."""
    once = tuple(range(ranks))
    return draw.choice([once * 2, (*once, *reversed(once)), once * 3])


@pytest.mark.parametrize("seed", range(40))
def test_lists_of_several_stages_per_rank_run(seed):
    """Whatever the rule, in memory for one micro-batch on every stage and a little more."""
    draw = random.Random(seed)
    ranks, count = draw.choice([2, 3, 4]), draw.choice([1, 3, 6])
    home = some_placement(draw, ranks)
    stages = len(home)
    chunks, taped, weighs = stages // ranks, draw.choice([0, 2]), draw.choice([0, 1, 2])
    cap = (chunks + max(taped, weighs - 1) + draw.choice([0, 1, 3]),) * ranks
    limits = MemoryLimits(cap, (1,) * stages, (taped,) * stages, (weighs,) * stages)
    costs = random_costs(draw, stages)
    problem = Problem(costs, count, limits, split_weights=draw.random() < 0.5, placement=home)
    warmup = tuple(draw.randint(1, count) for _ in range(stages))
    late = draw.random() < 0.5, draw.random() < 0.5
    rule = ListingRule(
        warmup,
        draw.choice([0, 0.5]),
        draw.random() < 0.5,
        draw.choice([0, 1, 3]),
        (),
        draw.random() < 0.5,
        late,
    )
    programs = list_programs(problem, rule)
    assert programs is not None
    assert all(map(problem.allows, range(ranks), programs))
    schedule = problem.to_schedule("some", programs)
    check(schedule)
    assert problem.from_schedule(schedule) == programs
    assert lower_bound(problem) <= problem.makespan(programs) * (1 + 1e-9)
    free = Problem(
        replace(costs, transfer=(0,) * (stages - 1)), count, limits, None, any(problem.split), home
    )
    assert free.makespan(programs) == pytest.approx(free.simulated(programs))


@pytest.mark.parametrize("seed", range(12))
def test_several_stages_per_rank_are_never_worse_than_a_builder(seed):
    draw = random.Random(seed)
    ranks, count = draw.choice([2, 3, 4]), draw.choice([4, 7])
    place = draw.choice(placements(ranks, 2) + placements(ranks, 3))
    costs = random_costs(
        draw, len(place.home), recompute=draw.random() < 0.5, transfer=draw.choice([0, 1])
    )
    limits = MemoryLimits.in_flight((draw.choice([ranks, 2 * ranks]),) * ranks, place.chunks)
    found = search(
        costs, count, limits=limits, split_weights=True, evaluations=150, placement=place.home
    )
    check(found.schedule)
    problem = Problem(costs, count, limits, None, True, place.home)
    assert problem.from_schedule(found.schedule) is not None, "the schedule breaks a limit"
    assert simulate(found.schedule, costs).makespan == found.makespan >= found.bound * (1 - 1e-9)
    builders = builder_makespans(problem)
    assert all(found.makespan <= makespan for makespan in builders.values())
    names = [name for name in ("interleaved", "zb-v") if name in builders]
    for name in names:
        built = build_schedule(name, ranks, count, place.chunks)
        assert builders[name] == simulate(built, costs).makespan
    assert names or limits.cap[0] == ranks * place.chunks


@pytest.mark.parametrize(
    "name", [name for name, builder in BUILDERS.items() if builder.chunks == 1]
)
def test_the_clock_times_the_builders(name):
    costs = random_costs(random.Random(name), 5)
    problem = Problem(costs, 8, split_weights=True)
    schedule = build_schedule(name, 5, 8)
    assert builder_makespans(problem)[name] == simulate(schedule, costs).makespan


def test_programs_that_wait_for_each_other_take_for_ever():
    problem = Problem(StageCosts.uniform(2), 2)
    stuck = [
        [4 * 0 + F, 4 * 0 + B, 4 * 1 + F, 4 * 1 + B],
        [4 * 0 + F, 4 * 1 + F, 4 * 0 + B, 4 * 1 + B],
    ]
    assert problem.makespan(stuck) == float("inf")


def test_memory_counts_as_the_checker_does():
    draw = random.Random(0)
    for _ in range(100):
        kinds = (F, B, W) if draw.random() < 0.5 else (F, B)
        program = draw.choice(merges(4, kinds))
        bound = draw.randint(1, 4)
        problem = Problem(
            StageCosts.uniform(1, weight=1), 4, MemoryLimits.in_flight([bound]), split_weights=True
        )
        peak = peak_in_flight(problem.to_schedule("some", [program]))[0]
        assert problem.fits(0, program) == (peak <= bound)


def test_tapes_are_held_from_an_early_recomputation_and_during_any_other():
    early = [4 * 0 + F, 4 * 1 + F, 4 * 0 + R, 4 * 1 + R, 4 * 0 + B, 4 * 1 + B]
    inside = [4 * 0 + F, 4 * 1 + F, 4 * 0 + B, 4 * 1 + B]
    for cap, early_fits, inside_fits in (
        (22.0, True, True),
        (21.9, False, True),
        (12.0, False, True),
        (11.9, False, False),
    ):
        limits = MemoryLimits((cap,), (1.0,), (10.0,), (0.0,))
        problem = Problem(StageCosts.uniform(1, recompute=1), 2, limits)
        assert (problem.fits(0, early), problem.fits(0, inside)) == (early_fits, inside_fits)


@pytest.mark.parametrize("capped", [False, True], ids=["free", "capped"])
@pytest.mark.parametrize("kinds", [(F, B), (F, R, B), (F, B, W)], ids=["FB", "FRB", "FBW"])
@pytest.mark.parametrize("seed", range(4))
def test_every_schedule_of_a_tiny_pipeline(kinds, seed, capped):
    """Among all orders of all stages none beats the bound, and the search finds one of the best."""
    draw = random.Random(100 + seed)
    stages, count = (3, 3) if kinds == (F, B) else (2, 3)
    costs = random_costs(draw, stages, recompute=R in kinds, transfer=1)
    caps = tuple(draw.choice([3.0, 4.0, 5.0, 6.0]) for _ in range(stages))
    limits = (
        MemoryLimits(caps, (1.0,) * stages, (2.0,) * stages, (0.7,) * stages) if capped else None
    )
    problem = Problem(costs, count, limits, None, W in kinds)
    choices = [program for some in sorted({(F, B), kinds}) for program in merges(count, some)]
    compiled = [
        [problem.compile(stage, program) for program in choices if problem.allows(stage, program)]
        for stage in range(stages)
    ]
    best = float("inf")
    for combination in itertools.product(*compiled):
        best = min(best, max((end[-1] for end in problem.clock(combination)), default=best))
    found = search(costs, count, limits=limits, split_weights=W in kinds)
    assert found.bound <= best * (1 + 1e-12)
    assert found.makespan <= best * (1 + 1e-12)


def test_the_bound_is_reached_by_known_optima():
    for stages, count in ((4, 8), (8, 8), (3, 30)):
        assert lower_bound(Problem(StageCosts.uniform(stages), count)) == 3 * (count + stages - 1)
    for limits in (MemoryLimits.in_flight([1, 1, 1]), MemoryLimits.in_flight([1, 3, 3])):
        assert lower_bound(Problem(StageCosts.uniform(3), 5, limits)) == 5 * 3 * 3


def assert_found(instance):
    found = instance.search()
    check(found.schedule)
    problem = instance.problem()
    programs = problem.from_schedule(found.schedule)
    assert programs is not None, "the schedule breaks a limit"
    assert simulate(found.schedule, instance.costs).makespan == found.makespan
    builders = builder_makespans(problem)
    assert (
        found.makespan
        <= min(builders.values())
        == found.builder_makespan
        == builders[found.builder]
    )
    assert found.makespan >= found.bound * (1 - 1e-9)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_auto_is_never_worse_than_a_builder(seed):
    assert_found(instances.instance(seed))


@pytest.mark.slow
def test_auto_on_two_hundred_instances():
    every = [instances.instance(seed) for seed in range(200)]
    found = [assert_found(instance) for instance in every]
    uneven = [one for one, instance in zip(found, every, strict=True) if instance.uneven]
    assert len(uneven) >= 80
    assert (
        sum(one.makespan < one.builder_makespan * (1 - 1e-6) for one in uneven) >= len(uneven) / 2
    )
    assert median(one.makespan / one.bound for one in found) <= 1.05


def test_every_process_finds_the_same():
    code = (
        "import sys; sys.path.insert(0, '.');"
        "from benchmarks.schedules.search_instances import instance; print(instance(13).search().schedule)"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1


def test_a_deep_pipeline_of_many_micro_batches_is_bounded():
    """The work is counted, not timed: so many schedules, whatever the machine."""
    costs = StageCosts.uniform(16, 1, 2, 1, 1)
    shares = []
    found = search(
        costs,
        64,
        limits=MemoryLimits.in_flight([16] * 16),
        split_weights=True,
        report_progress=shares.append,
    )
    assert found.evaluations <= default_evaluations(16, 64) == 500
    assert default_evaluations(64, 512) == 50 and default_evaluations(2, 4) == 2000
    assert shares == sorted(shares) and len(shares) >= found.evaluations


@pytest.mark.long
def test_the_largest_pipeline_takes_seconds():
    costs = StageCosts.uniform(64, 1, 2, 0, 1, 0.1, 0.01)
    started = time.process_time()
    found = search(costs, 512)
    assert time.process_time() - started < 40, "on a slow machine"
    assert found.makespan < found.builder_makespan


def test_slow_links_get_a_deeper_warm_up():
    costs = StageCosts.uniform(8, 20, 40, latency=8)
    found = search(costs, 8)
    assert found.makespan == 15 * 60 + 14 * 8 == found.bound
    capped = search(costs, 16, limits=MemoryLimits.in_flight([8 - stage + 1 for stage in range(8)]))
    assert capped.makespan < simulate(build_schedule("1f1b", 8, 16), costs).makespan
    check(capped.schedule, [8 - stage + 1 for stage in range(8)])


def test_what_is_not_allowed_is_not_used():
    costs = StageCosts.uniform(4, 1, 2, 1, 1)
    found = search(costs, 8, recompute=(False,) * 4)
    assert {op.kind for op in found.schedule.entries()} == {Kind.F, Kind.B}
    found = search(costs, 8, recompute=(True, False, False, False), split_weights=True)
    assert {op.stage for op in found.schedule.entries() if op.kind is Kind.R} <= {0}


def test_limits_that_nothing_fits_are_told():
    with pytest.raises(ScheduleError, match="memory cap 5.*stage 1 needs 6"):
        MemoryLimits((6, 5), (1, 1), (5, 5), (0, 0))
    with pytest.raises(ScheduleError, match="limits.*2 values for 3 stages"):
        search(StageCosts.uniform(3), 4, limits=MemoryLimits.in_flight([1, 2]))
    with pytest.raises(ScheduleError, match="recompute.*1 values for 3 stages"):
        search(StageCosts.uniform(3), 4, recompute=(True,))
    with pytest.raises(ScheduleError, match="micro-batches 0"):
        search(StageCosts.uniform(3), 0)


@pytest.mark.parametrize("stages,count", [(2, 4), (3, 8), (4, 6), (8, 16), (8, 32)])
def test_the_general_shift_has_the_times_of_merak(stages, count):
    """Forward 1, backward 2, recompute 1, free links; differences to 4 (m + S - 1), of each part of
    the idea.
    """
    base = 4 * (count + stages - 1)
    plain = build_schedule("1f1b", stages, count)
    everywhere = StageCosts.uniform(stages, recompute=1)
    zero, last_keeps = (0,) * stages, (1,) * (stages - 1) + (0,)
    costs = StageCosts((1,) * stages, (2,) * stages, zero, last_keeps, zero[1:], zero[1:])

    def shifted(costs, **options):
        return simulate(shift_recompute(plain, costs, **options), costs).makespan

    assert simulate(plain, everywhere).makespan == base
    assert simulate(plain, costs).makespan == base - 2
    assert shifted(everywhere, warmup=False) == base - (stages - 1)
    assert shifted(costs) == base - (stages + 2) == 4 * count + 3 * stages - 6
    assert shifted(costs, warmup=False) == base - stages
    assert shifted(costs, drain=False) == base - 4


def test_the_shift_keeps_within_memory_and_never_loses():
    draw = random.Random(5)
    for _ in range(20):
        stages, count = draw.choice([2, 3, 5]), draw.choice([4, 8])
        costs = random_costs(draw, stages)
        caps = tuple(stages - stage + 2 * draw.choice([1, 2]) for stage in range(stages))
        limits = MemoryLimits(caps, (1,) * stages, (2,) * stages, (0,) * stages)
        plain = build_schedule("1f1b", stages, count)
        shifted = shift_recompute(plain, costs, limits)
        check(shifted)
        assert Problem(costs, count, limits).from_schedule(shifted) is not None
        assert simulate(shifted, costs).makespan <= simulate(plain, costs).makespan


def test_the_shift_replaces_recomputation_and_refuses_virtual_stages():
    costs = StageCosts((1,) * 4, (2,) * 4, (0,) * 4, (1, 1, 1, 0), (0,) * 3, (0,) * 3)
    assert simulate(shift_recompute(build_schedule("shifted", 4, 8), costs), costs).makespan == 38
    virtual = Schedule.parse("two stages=2 microbatches=1\nrank 0: 0F0 1F0 1B0 0B0")
    with pytest.raises(ScheduleError, match="several stages on a rank"):
        shift_recompute(virtual, StageCosts.uniform(2, recompute=1))


def test_the_benchmark_writes_its_report(tmp_path):
    out = tmp_path / "search.md"
    command = [sys.executable, "-m", "benchmarks", "search", "--instances", "5", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    text = out.read_text()
    assert "5 random pipelines" in text and "modelled" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| all | 5")]
    assert len(rows) == 1 and all(float(row.split()[0]) >= 0 for row in rows[0][3:4])
