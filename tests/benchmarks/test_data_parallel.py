"""The pages' tables are what the benchmark of replicas writes, and its contestants compute the same
losses.
"""

import importlib

import pytest

from benchmarks import DOCS, EVIDENCE
from benchmarks.modelled import data_parallel as modelled
from benchmarks.trainers import data_parallel as measured


def between(module) -> str:
    return (
        (EVIDENCE / "data_parallel.md")
        .read_text(encoding="utf-8")
        .partition(module.BEGIN)[2]
        .partition(module.END)[0]
        .strip()
    )


@pytest.mark.long
def test_the_page_has_the_table_that_is_modelled():
    assert between(modelled) == modelled.table()


@pytest.mark.long
def test_the_page_has_the_table_that_is_measured():
    page = between(measured)
    assert all(
        f"| {precision} | {name} |" in page
        for precision in ("fp32", "bf16")
        for name in measured.WAYS
    )
    assert measured.main(["--quick", "--only", "fp32 torch"]) == 0


def test_the_page_shows_what_the_tool_says_of_a_plan_that_does_not_fit(capsys):
    text = (DOCS / "data_parallel.md").read_text(encoding="utf-8")
    command, _, rest = text.partition("$ python tools/plan.py ")[2].partition("\n...\n")
    plan_tool = importlib.import_module("tools.plan")
    plan_tool.main(command.replace("\\\n", " ").split())
    printed = capsys.readouterr().out
    assert rest.partition("```")[0].strip() == printed[printed.index("pipeline rank") :].strip()
