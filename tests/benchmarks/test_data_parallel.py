"""The pages' tables are what the benchmark of replicas writes, and its contestants compute the same losses."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "data_parallel.md"


@pytest.fixture(scope="module", params=["data_parallel", "data_parallel_modelled"])
def module(request):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module(request.param)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def between(module) -> str:
    return PAGE.read_text(encoding="utf-8").partition(module.BEGIN)[2].partition(module.END)[0].strip()


@pytest.mark.long
def test_the_page_has_the_table(module):
    if module.__name__ == "data_parallel_modelled":
        assert between(module) == module.table()
        return
    page = between(module)
    assert all(f"| {precision} | {name} |" in page for precision in ("fp32", "bf16") for name in module.WAYS)
    assert module.main(["--quick", "--only", "fp32 torch"]) == 0


def test_the_page_shows_what_the_tool_says_of_a_plan_that_does_not_fit(capsys):
    text = PAGE.read_text(encoding="utf-8")
    command, _, rest = text.partition("$ python tools/plan.py ")[2].partition("\n...\n")
    plan_tool = importlib.import_module("tools.plan")
    plan_tool.main(command.replace("\\\n", " ").split())
    printed = capsys.readouterr().out
    assert rest.partition("```")[0].strip() == printed[printed.index("pipeline rank") :].strip()
