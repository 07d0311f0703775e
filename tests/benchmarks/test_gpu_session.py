"""The session on a GPU, tried on this CPU: what it refuses, and every step of its four parts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def session(*arguments, out=None):
    environment = {**os.environ, "PYTHON": sys.executable, **({"OUT": str(out)} if out else {})}
    command = ["bash", str(ROOT / "benchmarks" / "gpu_session.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the part is missing. Use A, B, C or D"),
        (["E"], "E: there is no such part or option"),
        (["A", "--within", "soon"], "--within soon: it is not a number of seconds"),
        (["A", "--device", "tpu"], "--device tpu: there is no such one. Use cuda or cpu."),
        (["A", "--out"], "--out: its value is missing"),
    ],
)
def test_what_is_wrong_is_told_at_once(arguments, message):
    done = session(*arguments)
    assert done.returncode == 2 and done.stderr.startswith(f"gpu_session.sh: {message}") and not done.stdout


def test_help_and_a_part_without_time(tmp_path):
    told = session("--help").stdout
    assert all(f"gpu_session.sh {part} " in told for part in "ABCD") and "set -uo" not in told
    done = session("D", "--device", "cpu", "--within", "1", "--only", "^(kernels|rest)$", out=tmp_path)
    assert done.returncode == 1 and "left out after 1 s: kernels rest; call it again" in done.stdout
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "steps"),
    [
        ("A", ["doctor", "rates", "test_pointwise_gpu", "test_captured_gpu"]),
        ("D", ["test_training_gpu", "rates", "predicted", "kernels"]),
    ],
)
def test_every_step_of_a_part_runs_once(part, steps, tmp_path):
    arguments = (part, "--device", "cpu", "--only", f"^({'|'.join(steps)})$")
    done = session(*arguments, out=tmp_path)
    assert done.returncode == 0, done.stdout
    for name in steps:
        assert json.loads((tmp_path / f"{name}.json").read_text())["status"] == "ok"
    assert (tmp_path / "device_profile.json").exists()
    again = session(*arguments, out=tmp_path)
    repeated = "predicted" in steps  # of all rows that there are by then
    assert again.returncode == 0 and again.stdout.count("there already") == len(steps) - repeated


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("part", "rows"), [("B", 12), ("C", 26)])
def test_every_row_of_a_part_is_measured_or_says_why(part, rows, tmp_path):
    while "left out" in (done := session(part, "--device", "cpu", out=tmp_path)).stdout:
        pass
    found = [json.loads(path.read_text()) for path in tmp_path.glob("step_*.json")]
    assert done.returncode == 0 and len(found) == rows, done.stdout
    assert {row["status"] for row in found} <= {"measured", "not installed"}
    assert json.loads((tmp_path / "summary.json").read_text())
