"""The benchmark of operations: every row runs, agrees, and is printed as the tools read it."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.kernels import ops as benchmark


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The process's allocator and threads stay as they are."""
    monkeypatch.setattr(benchmark, "keep_freed_memory", lambda: True)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


def test_every_row_runs_and_agrees(capsys):
    assert benchmark.main(["--quick", "--json", "--no-compile"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 2 * len(benchmark.table())
    for row in rows:
        assert row["ours_ms"] > 0 and row["eager_ratio"] == pytest.approx(
            row["eager_ms"] / row["ours_ms"]
        )
        assert row["compile_ms"] is None and row["threads"] == 1


def test_the_table_has_a_line_per_row(capsys):
    benchmark.main(
        ["--quick", "--no-compile", "--only", "rotary", "--only", "swiglu", "--dtype", "fp32"]
    )
    head, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["rotary", "swiglu"]


def test_wrong_results_end_the_run():
    (row,) = [row for row in benchmark.table(quick=True) if row.op == "swiglu"]
    wrong = replace(row, ours=lambda x: 1.001 * row.peer(x))
    with pytest.raises(SystemExit, match="ours and PyTorch.s in float64 differ by 1.0e-03"):
        benchmark.run_row(wrong, "fp32", benchmark.parse(["--quick", "--no-compile"]))
