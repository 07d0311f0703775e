"""The benchmark's script is HuggingFace's, and differs from ours in two lines."""

import difflib
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def two_lines():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("two_lines")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_two_lines_differ(two_lines):
    plain = two_lines.SCRIPT.read_text(encoding="utf-8")
    changes = list(difflib.ndiff(plain.splitlines(), two_lines.changed(plain).splitlines()))
    assert sum(line.startswith("- ") for line in changes) == sum(line.startswith("+ ") for line in changes) == 2
    assert "megatron_merak" not in plain


def test_it_runs_both_and_compares_their_losses(two_lines, capsys):
    assert two_lines.main(["--quick", "--only", "fp32 one", "--steps", "3"]) == 0
    assert "| fp32, one process | HF Trainer |" in capsys.readouterr().out


def test_other_losses_are_told(two_lines):
    rows = [two_lines.Row("fp32", "one", name, [1.0], [[2.0, loss]]) for name, loss in (("HF", 2.0), ("ours", 2.1))]
    assert two_lines.disagreement(rows) == "fp32 one ours: loss 2.1 at step 1, 2.0 in another"
    assert not two_lines.disagreement(rows[:1])
