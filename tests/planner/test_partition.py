"""The partition against every possible cut."""

import time
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_merak.errors import PlanError
from megatron_merak.planner.partition import partition


def stage_costs(costs, bounds, extra):
    return [sum(costs[a:b]) + e for a, b, e in zip(bounds, bounds[1:], extra, strict=False)]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_no_cut_is_better(data):
    costs = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=9))
    stages = data.draw(st.integers(1, len(costs)))
    extra = data.draw(st.one_of(st.just([0] * stages), st.lists(st.integers(0, 30), min_size=stages, max_size=stages)))
    bounds = partition(costs, stages, extra)
    assert bounds[0] == 0 and bounds[-1] == len(costs) and len(bounds) == stages + 1
    assert all(a < b for a, b in zip(bounds, bounds[1:], strict=False))

    def rank(cut):
        found = stage_costs(costs, cut, extra)
        return max(found), sum(cost * cost for cost in found)

    cuts = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), stages - 1)]
    assert rank(bounds) == min(map(rank, cuts))


def test_ties_are_balanced():
    """The unit of 10 fixes the bottleneck; the others are still spread evenly."""
    assert partition([10, 1, 1, 1, 1, 1, 1], 3) == (0, 1, 4, 7)


def test_extra_costs_shift_the_cuts():
    assert partition([1] * 8, 2) == (0, 4, 8)
    assert partition([1] * 8, 2, [0, 4]) == (0, 6, 8)


@pytest.mark.parametrize(
    ("costs", "stages", "extra"), [([1, 1], 3, None), ([1], 0, None), ([1, -1], 1, None), ([1], 1, [1, 1])]
)
def test_impossible_partitions_are_plan_errors(costs, stages, extra):
    with pytest.raises(PlanError):
        partition(costs, stages, extra)


def test_two_thousand_units_are_quick():
    start = time.process_time()
    bounds = partition([1 + index % 7 for index in range(2000)], 64)
    assert time.process_time() - start < 20
    assert max(stage_costs([1 + index % 7 for index in range(2000)], bounds, [0] * 64)) == 126
