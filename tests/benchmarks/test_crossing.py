"""Where two techniques of Merak's paper cross: the closed forms on the page, and its tables."""

from math import isfinite

import pytest

from benchmarks import EVIDENCE
from benchmarks.modelled.crossing import (
    BEGIN,
    END,
    Pipeline,
    memories,
    saved_by_keeping,
    saved_by_shifting,
    section,
)

SIZES = [(2, 4), (3, 4), (3, 12), (4, 4), (4, 9), (8, 8), (8, 20), (16, 16)]
FIRST = (0.0, 0.1, 0.25, 0.5, 0.8, 1.0)


@pytest.mark.parametrize("times", [(1, 2, 1), (1, 2, 0.5), (1, 4, 0.7), (2, 3, 1)])
def test_closed_forms_are_what_the_simulator_finds(times):
    for stages, count in SIZES:
        one = Pipeline(stages, count, *times)
        again = one.recompute
        full = (count + stages - 1) * sum(times)
        assert one.full() == pytest.approx(full)
        assert one.shifted() == pytest.approx(full - again * saved_by_shifting(stages))
        for first in FIRST:
            saved = saved_by_keeping(stages, count, one.shares(first))
            assert one.aware(first) == pytest.approx(full - again * saved)


def test_closed_forms_do_not_hold_outside_their_conditions():
    for times in ((1, 1.5, 1), (1, 2, 1.5)):
        one = Pipeline(4, 8, *times)
        expected = (8 + 3) * sum(times) - one.recompute * saved_by_shifting(4)
        assert one.shifted() > expected + 0.1


def test_the_crossing_parts_the_two():
    for stages, count in SIZES:
        one = Pipeline(stages, count)
        share = one.crossing()
        assert one.aware(share - 1e-6) > one.shifted() >= one.aware(share)


def test_both_are_never_slower_than_either_with_the_same_shares():
    for stages, count in SIZES:
        for times in ((1, 2, 1), (1, 1, 1), (1, 2, 1.5)):
            one = Pipeline(stages, count, *times)
            for first in FIRST:
                assert one.both(first) <= min(one.aware(first), one.shifted()) + 1e-9


@pytest.mark.long
def test_with_the_same_memory_each_of_the_three_is_the_fastest_somewhere():
    found = memories()
    assert {"shifted", "stage-aware", "both"} <= {memory.fastest for memory in found}
    for memory in found:
        assert isfinite(memory.base) and min(memory.alone.values()) < memory.base
        assert memory.capacity <= memory.alone["stage-aware"] * (1 + 1e-9)


@pytest.mark.long
def test_the_page_has_the_section():
    page = (EVIDENCE / "paper.md").read_text(encoding="utf-8")
    assert section() == BEGIN + page.partition(BEGIN)[2].partition(END)[0] + END
