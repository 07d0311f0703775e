"""The CUDA bindings on the CPU: registered for CPU tensors, with their kernels under the SIMT shim,
called by torch.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.native.shim import BUILDS, FLAGS, NEEDED, ROOT

FAMILIES = ("norm", "activation", "residual", "rotary", "softmax", "cross_entropy", "flat")
STUBS = ROOT / "tests/native/stubs.cpp"
TORCH = Path(torch.__file__).parent
OPTIONS = [
    *(flag for flag in FLAGS if not flag.startswith(("-std", "-O"))),
    "-std=c++17",
    "-O0",
    "-DUSE_CUDA",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
    "-isystem",
    str(TORCH / "include"),
    "-isystem",
    str(TORCH / "include/torch/csrc/api/include"),
    "-I",
    str(ROOT / "csrc"),
    "-I",
    str(ROOT / "csrc/include"),
    "-I",
    str(ROOT / "csrc/cuda"),
]


def compile_(*arguments: str) -> None:
    done = subprocess.run(["g++", *OPTIONS, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def build() -> Path:
    """The library; built once for each content of csrc."""
    files = sorted(
        path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cuh", ".cu", ".cpp")
    )
    key = hashlib.sha256(
        b"".join(path.read_bytes() for path in [STUBS, *files]) + repr(OPTIONS).encode()
    ).hexdigest()
    library = BUILDS / f"bindings-{key[:20]}.so"
    if library.exists():
        return library
    folder = library.with_suffix(f".{os.getpid()}")
    folder.mkdir(parents=True)
    sources = [STUBS, *(ROOT / f"csrc/cuda/launch_{family}.cu" for family in FAMILIES)]
    for family in FAMILIES:
        text = (ROOT / f"csrc/cuda/ops_{family}.cpp").read_text(encoding="utf-8")
        sources.append(folder / f"ops_{family}.cpp")
        sources[-1].write_text(
            text.replace("(merak, CUDA, library)", "(merak, CPU, library)"), encoding="utf-8"
        )
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    for source, into in zip(sources, objects, strict=True):
        compile_("-c", "-x", "c++", str(source), "-o", into)
    # -Bsymbolic: the stubs come before whatever the process has of their names.
    libraries = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10"]
    compile_("-shared", "-Wl,-Bsymbolic", *objects, *libraries, "-o", str(folder / "out.so"))
    os.replace(folder / "out.so", library)
    return library


@NEEDED
@pytest.mark.compiles
@pytest.mark.timeout(600)
def test_operations_called_by_torch():
    environment = {**os.environ, "MERAK_EXT": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.native.bindings", str(build())]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
