"""The benchmark of preprocessing runs, and both contestants write the same bytes."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_row_is_printed():
    command = [sys.executable, "-m", "benchmarks", "preprocess", "--megabytes", "1.5", "--repeats"]
    done = subprocess.run([*command, "1"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines()[4:]]
    assert [row[:2] for row in rows] == [
        [f" {workers} ", f" {name} "]
        for workers in (1, 2)
        for name in ("merak-preprocess", "megatron-core")
    ]
