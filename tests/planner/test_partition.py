"""The partition against every possible cut."""

import math
import time
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_merak.errors import PlanError
from megatron_merak.planner.partition import partition


def stage_costs(costs, bounds, shared=()):
    return [
        sum(costs[a:b])
        + sum(cost for cost, users in shared if any(a <= user < b for user in users))
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]


def drawn_reach(data, units, stages):
    """Lowest starts that never fall with the end, as those of a memory cap do; anything at all for
    None.
    """
    if data.draw(st.booleans()):
        return None
    steps = st.lists(st.integers(0, units), min_size=units + 1, max_size=units + 1)
    return [
        [min(end, start) for end, start in enumerate(sorted(data.draw(steps)))]
        for _ in range(stages)
    ]


def within(reach, weight=0):
    """Infinite below the lowest starts; else so much per unit, and more in later stages."""

    def more(stage, start, end):
        if reach is not None and start < reach[stage][end]:
            return math.inf
        return weight * stage * (end - start)

    return more


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_no_cut_is_better(data):
    costs = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=9))
    stages = data.draw(st.integers(1, len(costs)))
    reach, weight = drawn_reach(data, len(costs), stages), data.draw(st.integers(0, 3))
    users = st.lists(st.integers(0, len(costs) - 1), min_size=1)
    shared = data.draw(st.lists(st.tuples(st.integers(0, 30), users), max_size=2))
    cuts = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), stages - 1)]
    if reach is not None:
        cuts = [cut for cut in cuts if all(cut[k] >= reach[k][cut[k + 1]] for k in range(stages))]
    if not cuts:
        with pytest.raises(PlanError, match="no cut"):
            partition(costs, stages, within(reach, weight), shared)
        return
    bounds = partition(costs, stages, within(reach, weight), shared)

    def rank(cut):
        found = stage_costs(costs, cut, shared)
        found = [cost + weight * k * (cut[k + 1] - cut[k]) for k, cost in enumerate(found)]
        return max(found), sum(cost * cost for cost in found)

    assert bounds in cuts and rank(bounds) == min(map(rank, cuts))


def test_ties_are_balanced():
    """The unit of 10 fixes the bottleneck; the others are still spread evenly."""
    assert partition([10, 1, 1, 1, 1, 1, 1], 3) == (0, 1, 4, 7)


def test_a_stage_that_may_hold_little_moves_the_cuts():
    short = [max(end - 2, 0) for end in range(9)]  # two units at most
    assert partition([1] * 8, 2) == (0, 4, 8)
    assert partition([1] * 8, 2, within([short, [0] * 9])) == (0, 2, 8)
    assert partition([1] * 8, 3, within([[0] * 9, short, [0] * 9])) == (0, 3, 5, 8)


@pytest.mark.parametrize(
    ("costs", "stages", "reach"),
    [([1, 1], 3, None), ([1], 0, None), ([1, -1], 1, None), ([1], 1, [[0, 1]])],
)
def test_impossible_partitions_are_plan_errors(costs, stages, reach):
    with pytest.raises(PlanError):
        partition(costs, stages, within(reach))


def test_two_thousand_units_are_quick():
    start = time.process_time()
    bounds = partition([1 + index % 7 for index in range(2000)], 64)
    assert time.process_time() - start < 20
    assert max(stage_costs([1 + index % 7 for index in range(2000)], bounds)) == 126
