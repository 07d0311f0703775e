"""The compiled partition against its twin in Python: the same bounds."""

import math
import os
import time
from random import Random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_merak import _native
from megatron_merak.errors import PlanError
from megatron_merak.planner.partition import partition

pytestmark = pytest.mark.skipif(
    _native.host() is None, reason=f"not compiled: {_native.host_problem()}"
)


def both(*arguments):
    """The bounds of the compiled code and of Python; the message where there are none."""
    found = []
    for choice in ("auto", "0"):
        with mock.patch.dict(os.environ, MERAK_EXT=choice):
            try:
                found.append(partition(*arguments))
            except PlanError as error:
                found.append(str(error))
    return found


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_bounds_are_equal(data):
    numbers = data.draw(
        st.sampled_from(
            [st.floats(0, 10), st.integers(0, 4), st.sampled_from([0.0, 0.1, 0.2, 0.3])]
        )
    )
    costs = data.draw(st.lists(numbers, min_size=1, max_size=14))
    stages = data.draw(st.integers(1, len(costs)))
    users = st.lists(st.integers(0, len(costs) - 1), min_size=1)
    shared = data.draw(st.lists(st.tuples(numbers, users), max_size=2))
    most = data.draw(
        st.none() | st.lists(st.integers(1, len(costs)), min_size=stages, max_size=stages)
    )
    weight = data.draw(st.sampled_from([0.0, 0.1, 1 / 3]))

    def more(stage, start, end):
        return math.inf if end - start > most[stage] else weight * stage * (end - start)

    ours, theirs = both(costs, stages, None if most is None else more, shared)
    assert ours == theirs


@pytest.mark.parametrize("seed", range(8))
def test_long_chains_are_equal(seed):
    draw = Random(seed)
    costs = [draw.choice([1.0, 1.1, 0.7]) * (1 + 1e-9 * draw.random()) for _ in range(300)]
    ours, theirs = both(costs, draw.choice([2, 8, 31, 150, 300]), None, [(3.7, [0, 299])])
    assert ours == theirs


def test_a_mistake_in_a_cost_comes_through():
    def more(stage, start, end):
        raise ZeroDivisionError if end > 2 else PlanError("cost", end, "too early", "Wait")

    for error, stages in ((ZeroDivisionError, 1), (PlanError, 3)):
        with pytest.raises(error):
            partition([1.0, 1.0, 1.0], stages, more)


def test_a_cost_is_asked_for_once():
    asked = []

    def more(stage, start, end):
        asked.append((stage, start, end))
        return 0.1

    partition([1.0 + unit % 3 for unit in range(40)], 5, more)
    assert len(asked) == len(set(asked))


def test_numbers_that_are_no_doubles_are_left_to_python():
    """The squares differ in their last digit only, which a double does not have."""
    costs = [2**60 + 1, 2**60, 2**60 + 1, 2**60]
    ours, theirs = both(costs, 2)
    assert ours == theirs


def test_ten_thousand_units_take_no_time():
    started = time.thread_time()
    bounds = partition([1.0 + index % 7 for index in range(10_000)], 256)
    assert len(bounds) == 257 and time.thread_time() - started < 5
