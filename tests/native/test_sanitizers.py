"""The comparisons of the CUDA kernels again, under the address and the undefined-behaviour
sanitizer.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.shim import NEEDED, ROOT, SANITIZED

pytestmark = pytest.mark.compiles

FAMILIES = ("norm", "activation", "residual", "rotary", "softmax", "cross_entropy", "flat")
RUNTIMES = ("libasan.so", "libubsan.so", "libstdc++.so")

# Loads a family with edits of its sources, and runs one comparison.
MUTATED = """
import sys, torch
from tests.native import test_{family}_kernels as tests
from tests.native.shim import load
kernels = load("{family}", {edits!r})
{check}
"""

PACK, NORM = "include/merak/pack.h", "kernels/norm.cuh"
FAULTS = [
    pytest.param(
        "activation", PACK, "if (i < count) to[i] = pack.at[i];", "if (i <= count) to[i] = pack.at[i];",
        "tests.compare_biased(kernels, 'gelu', torch.ones(3, 7), torch.ones(7), torch.ones(3, 7))",
        "heap-buffer-overflow", id="an element too many is written",
    ),
    pytest.param(
        "norm", NORM, "index < a.rows ? a.width : 0;  // past", "index <= a.rows ? a.width : 0;  // past",
        "tests.compare(kernels, tests.case(torch.float32, 5, 136))",
        "heap-buffer-overflow", id="a row too many is read",
    ),
    pytest.param(
        "norm", NORM, "__shared__ float scratch[kSums * kWarp];", "__shared__ float scratch[kSums];",
        "tests.compare(kernels, tests.case(torch.float32, 5, 8192, centred=True))",
        "insufficient space", id="shared memory is too small",
    ),
    pytest.param(
        "residual", PACK, "% 16 == 0) && ...", "% 16 >= 0) && ...",
        "x = tests.shifted(torch.ones(5, 520)); tests.compare(kernels, x, None, x)",
        "misaligned address", id="an address is taken for aligned",
    ),
]  # fmt: skip


def _runtime(name: str) -> str:
    found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True)
    return found.stdout.strip() if Path(found.stdout.strip()).is_absolute() else ""


def sanitized(*command: str) -> subprocess.CompletedProcess:
    """Run python with the sanitizers in place; they must be loaded before everything else."""
    environment = {
        **os.environ,
        SANITIZED: "1",
        "LD_PRELOAD": ":".join(map(_runtime, RUNTIMES)),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@NEEDED
@pytest.mark.skipif(not all(map(_runtime, RUNTIMES)), reason="gcc has no sanitizers here")
class TestSanitizers:
    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_kernels_are_clean(self, family):
        done = sanitized(
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            f"tests/native/test_{family}_kernels.py",
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        assert " passed" in done.stdout and "skipped" not in done.stdout

    @pytest.mark.timeout(300)
    @pytest.mark.parametrize(("family", "file", "old", "new", "check", "report"), FAULTS)
    def test_a_fault_is_seen(self, family, file, old, new, check, report):
        done = sanitized("-c", MUTATED.format(family=family, edits={file: (old, new)}, check=check))
        assert done.returncode != 0 and report in done.stderr, done.stderr[-4000:]
