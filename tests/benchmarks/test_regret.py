"""The regret of a search: tables by hand, and two layouts that run, once."""

import argparse
import json
from dataclasses import asdict

import pytest

from benchmarks.planner import regret
from benchmarks.planner.regret import Case, Row, page, read

CASE = Case("gpt", 2, "native")


def row(choice, taken, chosen=False, measured=False):
    return Row(CASE, choice, 0.5, taken, chosen=chosen, measured=measured)


def test_the_table_by_hand():
    rows = [row("a", 2.0), row("b", 1.0), row("c", 1.5, chosen=True), row("d", 9.0, measured=True)]
    text = page(rows)
    assert text.splitlines()[-1] == "| gpt | 2 | native | 3 | c | 1.500 s | b | 1.000 s | 50.0% |"
    assert "Emulated" in text and "Measured" not in text  # of d nothing was chosen


def test_a_line_that_was_cut_short_is_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    whole = json.dumps(asdict(row("a", 2.0)))
    path.write_text(f"{whole}\n{whole[:20]}")
    assert read(path) == [row("a", 2.0)]
    assert read(tmp_path / "none.jsonl") == []


@pytest.mark.slow
def test_what_has_run_does_not_run_again(tmp_path, monkeypatch, capsys):
    """Modelled times repeat bitwise."""
    rows = []
    for name in ("first", "again"):
        results = tmp_path / f"{name}.jsonl"
        words = f"regret --ranks 2 --models deep --links native --every 200 --results {results}"
        monkeypatch.setattr("sys.argv", words.split())
        assert regret.main() == 0
        rows.append(read(results))
    assert rows[0] == rows[1] and any(each.chosen for each in rows[0])
    monkeypatch.setattr(regret, "run_ranks", None)
    assert regret.main() == 0
    assert "| deep | 2 | native |" in capsys.readouterr().out


def test_slower_links_are_not_measured():
    asked = argparse.Namespace(ranks=[2], links=[*regret.LINKS], models=["gpt"], measured=True)
    assert [*regret.cases(asked)] == [CASE]
