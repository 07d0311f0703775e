"""The partition against every possible cut."""

import math
import operator
import time
from functools import reduce
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_merak.errors import PlanError
from megatron_merak.planner.partition import in_ticks, level, partition


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


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_the_costliest_rank_gets_cheaper_and_no_stage_costlier_than_the_costliest(data):
    costs = data.draw(st.lists(st.integers(0, 20), min_size=4, max_size=16))
    stages = data.draw(st.integers(2, len(costs)))
    homes = data.draw(st.permutations([stage % ((stages + 1) // 2) for stage in range(stages)]))
    users = st.lists(st.integers(0, len(costs) - 1), min_size=1)
    shared = data.draw(st.lists(st.tuples(st.integers(0, 30), users), max_size=1))
    bounds = partition(costs, stages, None, shared)
    moved = level(bounds, homes, costs, None, shared)
    assert moved[0] == 0 and moved[-1] == len(costs) and sorted(set(moved)) == list(moved)
    before, after = stage_costs(costs, bounds, shared), stage_costs(costs, moved, shared)
    assert max(after) <= max(before)
    assert max(rank_costs(after, homes)) <= max(rank_costs(before, homes))
    if moved == bounds:
        return
    # nothing is moved for nothing
    squares = [sum(x * x for x in rank_costs(each, homes)) for each in (before, after)]
    assert max(rank_costs(after, homes)) < max(rank_costs(before, homes)) or squares[1] < squares[0]


def rank_costs(costs, homes):
    return [
        sum(c for c, own in zip(costs, homes, strict=True) if own == home) for home in set(homes)
    ]


def test_the_longer_stage_is_not_of_the_rank_that_has_the_head():
    """34 units over two ranks with four stages each, of which the last costs more."""
    costs = [1] + [4] * 32 + [9]
    homes = [0, 1] * 4
    bounds = (0, 5, 10, 14, 18, 22, 26, 30, 34)
    assert max(rank_costs(stage_costs(costs, bounds), homes)) == 73
    leveled = level(bounds, homes, costs)
    assert max(rank_costs(stage_costs(costs, leveled), homes)) == 69
    assert level(bounds, range(8), costs) == bounds


def test_what_costs_as_much_is_as_much_in_whatever_order_it_is_added_up():
    seconds = [0.1 * k / 7 for k in range(1, 200)]
    # not ``sum``, which corrects its roundings from Python 3.12 on
    assert reduce(operator.add, seconds) != reduce(operator.add, reversed(seconds))
    ticks = [in_ticks(each) for each in seconds]
    total = reduce(operator.add, ticks)
    assert total == reduce(operator.add, reversed(ticks)) == sum(ticks)
    assert total == pytest.approx(sum(seconds), rel=1e-10)
    assert math.isinf(in_ticks(math.inf))
