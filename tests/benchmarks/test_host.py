"""The benchmark of the compiled cores runs, and compares what it times."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_merak import _native

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(_native.host() is None, reason=f"not compiled: {_native.host_problem()}")
def test_every_row_is_printed():
    command = [sys.executable, "-m", "benchmarks", "host", "--scale", "0.01"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines()[2:]]
    assert len(rows) == 18 and all(float(cell) > 0 for row in rows for cell in row[1:])
