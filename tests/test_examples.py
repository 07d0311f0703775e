"""Examples with settings that are too small, and without their libraries, end in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("name", "flags", "told"),
    [
        ("growing_batch", ["--samples", "8"], "--samples 8: it is below a batch of 64."),
        ("preferences", [], "trl is not installed: pip install -e '.[trl]' in a clone"),
    ],
)
def test_what_cannot_run_is_told_in_one_line(name, flags, told, tmp_path):
    (tmp_path / "trl.py").write_text("raise ModuleNotFoundError('no trl', name='trl')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, f"examples/{name}.py", *flags]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode in (1, 2) and told in done.stderr.splitlines()[-1], done.stderr
    assert "Traceback" not in done.stderr
