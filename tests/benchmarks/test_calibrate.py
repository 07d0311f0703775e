"""The page of predicted steps has what the program computes, and the table what it fitted."""

import math
import re
from dataclasses import asdict, replace

import pytest

from benchmarks import ROOT
from benchmarks.modelled.calibrate import ROWS, STARTS, fit, halves, rows_of, summary
from megatron_merak.cluster import PRACTICE

PAGE = (ROOT / "docs" / "evidence" / "planner.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def rows():
    return rows_of(ROWS)


def test_the_constants_of_the_page_are_those_of_the_table():
    families = list(STARTS)
    for name in asdict(PRACTICE["A100"]):
        line = re.search(rf"^\| `{name}` \|(.*)\|$", PAGE, re.M).group(1)
        cells = [float(cell.split()[0]) for cell in line.split("|")]
        assert cells == [getattr(PRACTICE[family], name) for family in families]


def test_what_is_assumed_is_called_so():
    assumed = set(re.findall(r"^\| `(\w+)` \|.*\(assumed\).*", PAGE, re.M))
    assert assumed == {*asdict(PRACTICE["A100"])} - {"low", "high", *STARTS["A100"]}
    assert all(len(constants) <= 8 for constants in STARTS.values())


def test_the_errors_of_the_page_are_those_of_the_plans(rows):
    errors = {row: math.log(row.plan.predicted_time / row.measured) for row in rows}
    within = sum(row.expected for row in rows) / len(rows)
    line = f"{summary('fitted to these rows', rows, errors)} {within:.0%} |"
    assert line in PAGE.splitlines()


def test_halves_have_every_other_row_of_each_source(rows):
    first, second = halves(rows)
    assert {*first} | {*second} == {*rows} and not {*first} & {*second}
    for source in {row.source for row in rows}:
        in_first = sum(row.source == source for row in first)
        in_second = sum(row.source == source for row in second)
        assert abs(in_first - in_second) <= 1
    assert abs(len(first) - len(second)) <= 1


def test_a_fit_finds_the_constants_that_made_the_steps(rows):
    few = [row for row in rows if row.source == "nanotron H100"][:5]
    made = replace(PRACTICE["H100"], product=0.66, passes=2.0)
    exact = [replace(row, measured=row.measured * math.exp(row.error(made))) for row in few]
    before = [row.error(PRACTICE["H100"]) for row in exact]
    assert max(map(abs, before)) > 0.05
    found = fit(exact)
    assert [row.error(found) for row in exact] == pytest.approx([0.0] * 5, abs=0.02)
