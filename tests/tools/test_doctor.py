"""tools/doctor.py: what it says must be what runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from megatron_merak import _native, ops

ROOT = Path(__file__).parents[2]


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "tools" / "doctor.py"), *arguments]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=100
    )


def test_it_says_what_is_active_here():
    done = doctor("--json")
    found = json.loads(done.stdout)
    assert found["torch"]["detail"].startswith(torch.__version__)
    assert f"cuDNN {torch.backends.cudnn.version() or 'none'}" in found["torch"]["detail"]
    if not torch.cuda.is_available():
        assert "after the product on cpu" in found["products"]["detail"] and found["attention"][
            "detail"
        ].endswith("on cpu: flash_attention")
    assert found["_ops_cpu"]["active"] == (not ops.PROBLEMS["_ops_cpu"])
    assert found["_C"]["active"] == (_native.host() is not None)
    assert done.returncode == (0 if found["_C"]["active"] and found["_ops_cpu"]["active"] else 1)


def test_switched_off_is_not_broken():
    done = doctor(MERAK_EXT="0")
    assert done.returncode == 0, done.stderr
    off = [
        line for line in done.stdout.splitlines() if line.startswith(("host-side", "CPU kernels"))
    ]
    assert len(off) == 2 and all(" off " in line and "MERAK_EXT=0" in line for line in off)
