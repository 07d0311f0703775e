"""The ``auto`` schedule: found for given costs, links and memory caps, instead of built by a
formula.

The search has three steps, each from the best result so far: the builders' schedules, list
schedules under a family of rules, and a local search along the critical path. The result is never
worse than any builder's that the limits allow and whose placement is the same, and comes with a
lower bound that no schedule beats. All times are modelled. The work is limited by a number of
simulated schedules, so that it finds the same on every machine.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.ops import Schedule
from megatron_merak.pipeline_parallel.search.bound import lower_bound
from megatron_merak.pipeline_parallel.search.listing import ListingRule, list_programs
from megatron_merak.pipeline_parallel.search.local import LocalSearch
from megatron_merak.pipeline_parallel.search.problem import MemoryLimits, Problem, Program
from megatron_merak.pipeline_parallel.search.shift import shift_recompute
from megatron_merak.pipeline_parallel.simulate import StageCosts

EVALUATIONS = 2000
_SMALL = 256  # stages x micro-batches up to which the default budget is EVALUATIONS
_FEW = 50  # evaluations of a long pipeline, unless they come to more than
_MOST = _FEW * 64 * 512  # stages x micro-batches that are timed
_SHIFTS = 8  # evaluations for each stage whose forward the shift of recomputation moves
_PATIENCE = (0.0, 0.5, 1.0, 4.0)
_MUTATIONS = 4  # at most, tried ones included, for each evaluation
ProgressCallback = Callable[[float], object]  # called with the finished share of the work, 0 to 1


@dataclass(frozen=True)
class Found:
    """A schedule of compute ops; its makespan, and the bound that none beats, in modelled seconds.

    `builder` names the best of the builders with stages where these are, whose schedule takes
    `builder_makespan`; "" and infinity where there is none. `evaluations`: how many schedules were
    timed.
    """

    schedule: Schedule
    makespan: float
    bound: float
    evaluations: int
    builder: str
    builder_makespan: float


def default_evaluations(stages: int, microbatches: int, searches: int = 1) -> int:
    """Return how many schedules a search simulates by default: fewer, the longer they are.
    searches: that share them.
    """
    size = stages * microbatches
    return max(2, min(_FEW, _MOST // size), EVALUATIONS * _SMALL // max(size, _SMALL) // searches)


def search(
    costs: StageCosts,
    microbatches: int,
    *,
    limits: MemoryLimits | None = None,
    recompute: Sequence[bool] | None = None,
    split_weights: bool = False,
    evaluations: int | None = None,
    placement: Sequence[int] = (),
    report_progress: ProgressCallback = lambda share: None,
) -> Found:
    """The best schedule found.

    `recompute[s]`: stage s may run R as its own op where it recomputes (default: every stage).
    `split_weights`: W may
    be its own op. `evaluations`: how many schedules to time (default: see ``default_evaluations``);
    the answer depends on the arguments alone, so every rank finds the same. `placement[s]`: the
    rank of stage s (default: one stage per rank). Raises ScheduleError for limits under which no
    micro-batch runs, or nothing was found, and for lists of the wrong length.
    """
    problem = Problem(
        costs, microbatches, limits, recompute, split_weights=split_weights, placement=placement
    )
    evaluations = evaluations or default_evaluations(problem.stages, microbatches)
    best = _Best(problem, lower_bound(problem), evaluations, report_progress)
    built = _built(problem)
    makespans = {name: best.offer(programs) for name, programs in built.items()}
    if any(problem.early) and problem.stages == problem.ranks and built:
        schedule = problem.to_schedule("auto", built[min(makespans, key=makespans.__getitem__)])
        attempts = max(1, evaluations // _SHIFTS)
        best.offer(
            problem.from_schedule(
                shift_recompute(schedule, costs, limits, recompute=recompute, attempts=attempts)
            )
        )
    _search_rules(best)
    if not best.programs:
        reason = f"no order of {problem.stages} stages on {problem.ranks} ranks was found within it"
        raise ScheduleError(
            "memory cap", problem.limits.cap, reason, "Raise the cap, or use fewer stages per rank"
        )
    if not best.is_optimal and best.evaluations < evaluations:
        local = LocalSearch(problem, best.programs, report_progress=best.count)
        local.run(evaluations - best.evaluations, best.goal)
        best.take(local.best, local.makespan)
    times = {name: problem.simulated(programs) for name, programs in built.items()}
    builder = min(times, key=times.__getitem__, default="")
    programs = best.programs
    makespan = problem.simulated(best.programs)
    if times and times[builder] < makespan:  # the clock of the search knows less than the simulator
        programs = built[builder]
        makespan = times[builder]
    schedule = problem.to_schedule("auto", programs)
    return Found(
        schedule,
        makespan,
        best.bound,
        best.evaluations,
        builder=builder,
        builder_makespan=times.get(builder, float("inf")),
    )


def builder_makespans(problem: Problem) -> dict[str, float]:
    """Return the makespan of every builder with the problem's placement that its limits allow."""
    return {name: problem.simulated(programs) for name, programs in _built(problem).items()}


def _built(problem: Problem) -> dict[str, list[Program]]:
    """Return the programs of every such builder."""
    built = {}
    chunks = problem.stages // problem.ranks
    for name, row in BUILDERS.items():
        if row.chunks != chunks and not (row.chunked and chunks > 1):
            continue
        try:
            schedule = build_schedule(name, problem.ranks, problem.microbatches, chunks)
        except ScheduleError:
            continue
        programs = problem.from_schedule(schedule)
        if programs is not None:
            built[name] = programs
    return built


class _Best:
    """The best programs so far, and how many of the allowed schedules were simulated."""

    def __init__(
        self, problem: Problem, bound: float, most: int, report_progress: ProgressCallback
    ):
        self.problem = problem
        self.bound = bound
        self.most = most
        self.report_progress = report_progress
        self.programs: list[Program] = []
        self.makespan = float("inf")
        self.evaluations = 0
        self.goal = bound * (1 + 1e-9)

    @property
    def is_optimal(self) -> bool:
        return self.makespan <= self.goal

    def offer(self, programs: list[Program] | None) -> float:
        """Return the makespan of programs; infinity if they break a limit, or are None."""
        self.count()
        if programs is None or not all(
            map(self.problem.allows, range(self.problem.ranks), programs)
        ):
            return float("inf")
        makespan = self.problem.makespan(programs)
        self.take(programs, makespan)
        return makespan

    def take(self, programs: list[Program], makespan: float) -> None:
        if makespan < self.makespan:
            self.makespan = makespan
            self.programs = programs

    def count(self) -> None:
        self.evaluations += 1
        self.report_progress(min(1.0, self.evaluations / self.most))


def _search_rules(best: _Best) -> None:
    """Try list schedules: first the warm-up, then how to choose, then small changes of both, each
    from the best rule.

    Uses at most half of the evaluations.
    """
    tried: dict[ListingRule, float] = {}
    most = best.most // 2

    def attempt(rule: ListingRule) -> float:
        if rule not in tried and best.evaluations < most and not best.is_optimal:
            tried[rule] = best.offer(list_programs(best.problem, rule))
        return tried.get(rule, float("inf"))

    stages = best.problem.stages
    count = best.problem.microbatches
    rule = min(_warmups(ListingRule((1,) * stages), count), key=attempt)
    rule = min(_choices(rule, best.problem), key=attempt)
    rule = min(_warmups(rule, count), key=attempt)
    draw = Random(0)
    for _ in range(_MUTATIONS * best.most):
        if best.is_optimal or best.evaluations >= most:
            break
        mutant = _mutant(rule, best.problem, draw)
        if attempt(mutant) <= attempt(rule):
            rule = mutant


def _warmups(rule: ListingRule, count: int) -> Iterator[ListingRule]:
    """Yield 1F1B's depth of S - s, times factors, and more."""
    stages = len(rule.warmup)
    for factor in (1, 1.5, 2, 3, count):
        for extra in (0, 1, 2):
            yield replace(
                rule,
                warmup=tuple(min(int(factor * (stages - s)) + extra, count) for s in range(stages)),
            )


def _choices(rule: ListingRule, problem: Problem) -> Iterator[ListingRule]:
    stages = problem.stages
    none = (False,) * stages
    every = (True,) * stages
    weights = (
        ((every, False), (every, True), (none, False)) if any(problem.split) else ((none, False),)
    )
    for early, (split, last) in product(_recomputations(problem), weights):
        for forward_first, patience, late in product((False, True), _PATIENCE, _orders(problem)):
            yield replace(
                rule,
                early=early,
                split=split,
                weights_last=last,
                late=late,
                forward_first=forward_first,
                patience=patience,
            )


def _orders(problem: Problem) -> tuple[tuple[bool, bool], ...]:
    """Yield which stage of a rank goes first, in forwards and in backwards."""
    several = problem.stages > problem.ranks
    return (
        ((True, True), (False, True), (True, False), (False, False)) if several else ((True, True),)
    )


def _recomputations(problem: Problem) -> tuple[int, ...]:
    return (1, 2, 0, problem.microbatches) if any(problem.early) else (0,)


def _mutant(rule: ListingRule, problem: Problem, draw: Random) -> ListingRule:
    """Return the rule with one to three changes."""
    for _ in range(draw.randint(1, 3)):
        s = draw.randrange(problem.stages)
        what = draw.randrange(8 if problem.stages == problem.ranks else 9)
        if what < 4:
            depth = min(max(rule.warmup[s] + draw.choice((-2, -1, 1, 2)), 1), problem.microbatches)
            rule = replace(rule, warmup=(*rule.warmup[:s], depth, *rule.warmup[s + 1 :]))
        elif what == 4:
            rule = replace(rule, patience=draw.choice(_PATIENCE))
        elif what == 5:
            rule = replace(rule, forward_first=not rule.forward_first)
        elif what == 6:
            rule = replace(rule, early=draw.choice(_recomputations(problem)))
        elif what == 8:
            rule = replace(rule, late=draw.choice(_orders(problem)))
        elif any(problem.split):
            split = (*rule.split[:s], not rule.split[s], *rule.split[s + 1 :])
            rule = replace(rule, split=split, weights_last=draw.random() < 0.5)
    return rule
