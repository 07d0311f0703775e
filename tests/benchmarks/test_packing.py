"""The page has the benchmark's table, and its four ways of the same documents agree."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def module():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("packing")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_the_page_has_the_table(module):
    page = module.PAGE.read_text(encoding="utf-8").partition(module.BEGIN)[2].partition(module.END)[0]
    assert all(f"| {way} |" in page for way in module.WAYS)


@pytest.mark.long
def test_all_ways_train_alike(module, capsys):
    """Losses are compared inside."""
    module.main(["--quick"])
    printed = capsys.readouterr().out
    assert all(f"| {way} |" in printed for way in module.WAYS)
