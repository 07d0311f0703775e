"""The ``auto`` schedule: one that is found for the given costs, links and memory caps, instead of built by a formula.

Three steps, each from the best of those before: the builders' schedules, list schedules under a family of rules, and a
local search along the critical path. The result is never worse than any builder's that the limits allow, and comes with
a lower bound that no schedule beats. All times are modelled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.ops import Schedule
from megatron_merak.pipeline_parallel.search.bound import lower_bound
from megatron_merak.pipeline_parallel.search.listing import Rule, list_programs
from megatron_merak.pipeline_parallel.search.local import LocalSearch
from megatron_merak.pipeline_parallel.search.problem import Limits, Problem, Program
from megatron_merak.pipeline_parallel.search.shift import shift_recompute
from megatron_merak.pipeline_parallel.simulate import StageCosts

EVALUATIONS = 2000
_SMALL = 256  # stages x micro-batches up to which the default budget is EVALUATIONS
_FEWEST = 50
_PATIENCE = (0.0, 0.5, 1.0, 4.0)
_MUTATIONS = 4  # at most, tried ones included, for each evaluation


@dataclass(frozen=True)
class Found:
    """A schedule of compute ops; its makespan, and the bound that none beats, in modelled seconds.

    `builder` names the best of the builders, whose schedule takes `builder_makespan`. `evaluations`: how many schedules
    were timed.
    """

    schedule: Schedule
    makespan: float
    bound: float
    evaluations: int
    builder: str
    builder_makespan: float


def search(
    costs: StageCosts,
    microbatches: int,
    *,
    limits: Limits | None = None,
    recompute: Sequence[bool] | None = None,
    split_weights: bool = False,
    evaluations: int | None = None,
) -> Found:
    """The best schedule found, one stage per rank.

    `recompute[s]`: stage s may run R as its own op where it recomputes (default: every stage). `split_weights`: W may
    be its own op. `evaluations`: how many schedules to time (default: 2000, fewer where stages x micro-batches exceed
    256); the answer depends on the arguments alone, so every rank finds the same. Raises ScheduleError for limits under
    which no micro-batch runs, and for lists of the wrong length.
    """
    problem = Problem(costs, microbatches, limits, recompute, split_weights)
    if evaluations is None:
        size = problem.stages * microbatches
        evaluations = max(_FEWEST, EVALUATIONS * _SMALL // max(size, _SMALL))
    builders = builder_makespans(problem)
    builder = min(builders, key=builders.__getitem__)
    schedule = build_schedule(builder, problem.stages, microbatches)
    best = _Best(problem, lower_bound(problem))
    best.offer(problem.from_schedule(schedule))
    best.evaluations = len(builders)
    if any(problem.early):
        best.offer(problem.from_schedule(shift_recompute(schedule, costs, limits, recompute=recompute)))
    _search_rules(best, evaluations)
    if not best.is_optimal and best.evaluations < evaluations:
        local = LocalSearch(problem, best.programs)
        local.run(evaluations - best.evaluations, best.goal)
        best.evaluations += local.evaluations
        if local.makespan < best.makespan:
            best.makespan, best.programs = local.makespan, local.best
    found = problem.to_schedule("auto", best.programs)
    return Found(found, best.makespan, best.bound, best.evaluations, builder, builders[builder])


def builder_makespans(problem: Problem) -> dict[str, float]:
    """The makespan of every builder with one stage per rank, of those whose schedule the problem allows."""
    makespans = {}
    for name, row in BUILDERS.items():
        if row.chunks > 1:
            continue
        try:
            programs = problem.from_schedule(build_schedule(name, problem.stages, problem.microbatches))
        except ScheduleError:
            continue
        if programs is not None:
            makespans[name] = problem.makespan(programs)
    return makespans


class _Best:
    """The best programs so far of a problem."""

    def __init__(self, problem: Problem, bound: float):
        self.problem, self.bound = problem, bound
        self.programs: list[Program] = []
        self.makespan = float("inf")
        self.evaluations = 0
        self.goal = bound * (1 + 1e-9)

    @property
    def is_optimal(self) -> bool:
        return self.makespan <= self.goal

    def offer(self, programs: list[Program]) -> float:
        makespan = self.problem.makespan(programs)
        self.evaluations += 1
        if makespan < self.makespan:
            self.makespan, self.programs = makespan, programs
        return makespan


def _search_rules(best: _Best, evaluations: int) -> None:
    """List schedules: first the warm-up, then how to choose, then small changes of both, each from the best rule.

    Takes at most half of the evaluations.
    """
    tried: dict[Rule, float] = {}

    def attempt(rule: Rule) -> float:
        if rule not in tried and best.evaluations < evaluations and not best.is_optimal:
            tried[rule] = best.offer(list_programs(best.problem, rule))
        return tried.get(rule, float("inf"))

    stages, count = best.problem.stages, best.problem.microbatches
    rule = min(_warmups(Rule((1,) * stages), count), key=attempt)
    rule = min(_choices(rule, best.problem), key=attempt)
    rule = min(_warmups(rule, count), key=attempt)
    draw = Random(0)
    for _ in range(_MUTATIONS * evaluations):
        if best.is_optimal or best.evaluations >= evaluations // 2:
            break
        mutant = _mutant(rule, best.problem, draw)
        if attempt(mutant) <= attempt(rule):
            rule = mutant


def _warmups(rule: Rule, count: int) -> Iterator[Rule]:
    """1F1B's depth of S - s, times a factor, and more."""
    stages = len(rule.warmup)
    for factor in (1, 1.5, 2, 3, count):
        for extra in (0, 1, 2):
            yield replace(rule, warmup=tuple(min(int(factor * (stages - s)) + extra, count) for s in range(stages)))


def _choices(rule: Rule, problem: Problem) -> Iterator[Rule]:
    stages = problem.stages
    none, every = (False,) * stages, (True,) * stages
    weights = ((every, False), (every, True), (none, False)) if any(problem.split) else ((none, False),)
    for early, (split, last) in product(_recomputations(problem), weights):
        for forward_first, patience in product((False, True), _PATIENCE):
            yield replace(
                rule, early=early, split=split, weights_last=last, forward_first=forward_first, patience=patience
            )


def _recomputations(problem: Problem) -> tuple[int, ...]:
    return (1, 2, 0, problem.microbatches) if any(problem.early) else (0,)


def _mutant(rule: Rule, problem: Problem, draw: Random) -> Rule:
    """The rule with one to three changes."""
    for _ in range(draw.randint(1, 3)):
        s, what = draw.randrange(problem.stages), draw.randrange(8)
        if what < 4:
            depth = min(max(rule.warmup[s] + draw.choice((-2, -1, 1, 2)), 1), problem.microbatches)
            rule = replace(rule, warmup=(*rule.warmup[:s], depth, *rule.warmup[s + 1 :]))
        elif what == 4:
            rule = replace(rule, patience=draw.choice(_PATIENCE))
        elif what == 5:
            rule = replace(rule, forward_first=not rule.forward_first)
        elif what == 6:
            rule = replace(rule, early=draw.choice(_recomputations(problem)))
        elif any(problem.split):
            split = (*rule.split[:s], not rule.split[s], *rule.split[s + 1 :])
            rule = replace(rule, split=split, weights_last=draw.random() < 0.5)
    return rule
