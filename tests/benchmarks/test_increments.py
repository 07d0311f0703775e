"""The benchmark of increments: every way trains and recovers a step, and a saved run is shown again."""

import json
import subprocess
import sys

import pytest

from benchmarks import ROOT
from benchmarks.checkpoints.increments import RANKS, WAYS


@pytest.mark.slow
def test_every_way_is_measured(tmp_path):
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks", "increments"]
    quick = [*command, "--quick", "--directory", str(tmp_path), "--json", str(result)]
    told = subprocess.run(quick, cwd=ROOT, capture_output=True, text=True, timeout=500, check=True)
    found = json.loads(result.read_text())["ranks"]
    assert [*found] == [*RANKS] and all([*ways] == [*WAYS] for ways in found.values())
    for ways in found.values():
        for way, each in ways.items():
            assert each["steps"][0] > 0 and ("waits" in each) == (way != "none")
        # all ranks together write each byte of a gradient once, in fp32: a third of a checkpoint
        assert 0.3 < ways["of 5 steps"]["bytes"][0] / ways["none"]["checkpoint"][0] < 0.4
    again = subprocess.run(
        [*command, "--from", str(result)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert again.stdout.endswith(told.stdout)
