"""Every layout equals one process that runs HuggingFace's model: the loss, every gradient,
optimizer steps.

The steps are ten where every layout is compared, and three where layouts that meet every pair of
choices are.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from itertools import groupby
from operator import attrgetter

import pytest

from tests.choice import later

from .cases import (
    AXES,
    Case,
    accelerated,
    divided,
    layouts,
    pairs,
    pairwise,
    shared,
    some_cases,
    sweep,
)
from .compare import TOLERANCE, Distance, distance
from .reference import reference
from .rig import Outcome, Run, launch, put_together

CANDIDATES = some_cases()
# the last with weights and moments of two updates, and a loss scale that has grown
SELECTION = [replace(case, steps=3) for case in pairwise(CANDIDATES)]
# four ranks on two cores take their time: a fourth of their cases at once, and all of fewer ranks
AT_ONCE = [case for place, case in enumerate(SELECTION) if case.world < 4 or place % 4 == 0]
JOBS = {
    case: f"{job}-{at // 24}"
    for job, cases in groupby(sweep(), attrgetter("layout"))
    for at, case in enumerate(cases)
}


class Lazily:
    """Runs of cases; asking for one launches all that have the same ``key``."""

    def __init__(self, cases: Sequence[Case], key: Callable[[Case], object]):
        self.cases, self.key = cases, key
        self.outcomes: dict[Case, Sequence[Outcome]] = {}

    def __getitem__(self, case: Case) -> Run:
        if case not in self.outcomes:
            self.outcomes = launch(
                [other for other in self.cases if self.key(other) == self.key(case)]
            )
        return put_together(self.outcomes[case])


@pytest.fixture(scope="module")
def selected():
    return Lazily(SELECTION, lambda case: (case.world, case in AT_ONCE))


@pytest.fixture(scope="module")
def swept():
    return Lazily(list(JOBS), JOBS.__getitem__)


def check(case: Case, run: Run) -> Distance:
    assert run.first_loss == run.curve[0], "one batch on the same weights, twice"
    assert abs(run.evaluated - run.first_loss) <= TOLERANCE[case.dtype].loss
    found = distance(run, reference(case.family, case.dtype, case.loss))
    assert found.within(TOLERANCE[case.dtype]), f"{case}: {found}, allowed {TOLERANCE[case.dtype]}"
    return found


def test_the_selection_meets_every_pair_of_axis_values():
    assert frozenset().union(*map(pairs, SELECTION)) == frozenset().union(*map(pairs, CANDIDATES))
    assert len(SELECTION) < 50
    assert len({case.layout for case in layouts()}) == 14 and len(layouts()) == 14 * 3 * 2 * 2 * 2
    met = {(case.schedule, case.recompute, case.overlap) for case in accelerated()}
    assert len(met) == 8 * 4 * 4, "schedule x recomputation x overlap"
    schedules = {*AXES["schedule"]} - {"shifted"}  # which three micro-batches have none of
    assert (
        len({case.layout for case in shared()}) == 6
        and {case.schedule for case in shared()} >= schedules
    )
    assert len(divided()) == 3 * 4 * 2 * 2 * 2 and any(
        c.sequence_parallel and c.tp == 4 for c in SELECTION
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case", [case if case in AT_ONCE else later(case) for case in SELECTION], ids=str
)
def test_equals_one_process(case, selected):
    check(case, selected[case])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=pytest.mark.xdist_group(job))
        for case, job in JOBS.items()
    ],
)
def test_equals_one_process_everywhere(case, swept, measured):
    measured(case, astuple(check(case, swept[case])))
