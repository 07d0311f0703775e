"""The benchmark of saves: every way saves and is read back equal, and a saved run is shown again."""

import json
import subprocess
import sys

import pytest

from benchmarks import ROOT
from benchmarks.checkpoints.saves import RUNS, WAYS


@pytest.mark.slow
def test_every_way_is_measured(tmp_path):
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks", "saves"]
    quick = [*command, "--quick", "--directory", str(tmp_path), "--json", str(result)]
    told = subprocess.run(quick, cwd=ROOT, capture_output=True, text=True, timeout=500, check=True)
    found = json.loads(result.read_text())
    assert [*found["stores"]["ways"]] == [*WAYS] and [*found["runs"]["of"]] == [*RUNS]
    for turns in found["stores"]["ways"].values():
        assert all(0 < turn["waits"] <= turn["whole"] for turn in turns)
    assert sum("load" in turns[0] for turns in found["stores"]["ways"].values()) == 4
    assert all(each["waits"][0] > 0 < each["steps"][0] for each in found["runs"]["of"].values())
    again = subprocess.run(
        [*command, "--from", str(result)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert again.stdout.endswith(told.stdout)
