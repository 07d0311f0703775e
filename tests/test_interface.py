"""Compiled parts that were built from other sources, or are not whole, are told apart before they
are loaded.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_merak import _native
from megatron_merak.ops.schemas import SCHEMAS

PARTS = [path for path in Path(_native.__file__).parent.glob("*.so")]
OTHER = "import megatron_merak._native as native; native.INTERFACE = 99; "


def names(owner: object, prefix: str = "") -> list[str]:
    """What a module and its classes have, by full name."""
    found = []
    for name, value in sorted(vars(owner).items()):
        if not name.startswith("_"):
            found.append(prefix + name)
            found += (
                names(value, f"{prefix}{name}.") if isinstance(value, (ModuleType, type)) else []
            )
    return found


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment
    )


@pytest.mark.skipif(_native.host() is None, reason=f"not compiled: {_native.host_problem()}")
def test_the_number_stands_for_these_names_and_schemas():
    text = "\n".join(
        [*names(_native.host()), *(f"{name}{schema}" for name, schema in sorted(SCHEMAS.items()))]
    )
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    assert (_native.INTERFACE, digest) == (7, "3dffeda1589c"), (
        "it changed: take another INTERFACE, and write down its digest"
    )


@pytest.mark.parametrize("path", PARTS, ids=lambda path: path.name)
def test_built_parts_carry_the_number(path, monkeypatch, tmp_path):
    assert _native.unfit(path) == ""
    monkeypatch.setattr(_native, "INTERFACE", 99)
    assert _native.unfit(path) == f"{path.name} was built from other sources than this code's"


@pytest.mark.skipif(sys.platform != "linux", reason="of ELF files")
@pytest.mark.parametrize("path", PARTS, ids=lambda path: path.name)
def test_parts_that_are_cut_short(path, tmp_path):
    content, cut = path.read_bytes(), tmp_path / "cut.so"
    for size in (10, 63, 64, 1000, len(content) // 2, len(content) - 100, len(content) - 1):
        cut.write_bytes(content[:size])
        assert _native.unfit(cut) == "cut.so is cut short", size


@pytest.mark.skipif(not PARTS, reason="nothing is compiled")
def test_stale_parts_are_left_alone():
    done = run(
        OTHER
        + "from megatron_merak import ops; import torch; print(native.host(), native.host_problem());"
        # fmt: skip
        "print(ops.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5).sum().item())"
    )
    assert done.returncode == 0, done.stderr
    host, total = done.stdout.splitlines()
    assert host.startswith("None _C.") and host.endswith(
        "was built from other sources than this code's"
    )
    assert abs(float(total) - 8) < 1e-3
    assert (
        "runs without its compiled kernels: _ops_cpu.abi3.so was built from other sources"
        in done.stderr
    )


@pytest.mark.skipif(not PARTS, reason="nothing is compiled")
@pytest.mark.parametrize("wanted", ["native.host()", "import megatron_merak.ops"])
def test_stale_parts_that_are_required_are_an_error(wanted):
    done = run(OTHER + wanted, MERAK_EXT="1")
    assert done.returncode == 1
    assert (
        "ImportError: MERAK_EXT=1: _" in done.stderr
        and "`pip install -e .` in a clone builds it" in done.stderr
    )
