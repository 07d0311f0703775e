"""Compiles the sources of csrc/ against the headers of a PyTorch that is not installed here; runs
nothing.

    python tools/compile_check.py 2.11.0         or, against headers that are there: --include DIR

The wheel comes from pip's package index, with pip's own settings, and only its headers are kept.
CUDA kernels are compiled for sm_80, sm_90 and sm_100 where nvcc is on PATH.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")
STANDARD, STABLE_ABI = (
    re.search(rf'^{name} = "(\S+)"', SETUP, re.M)[1] for name in ("STANDARD", "STABLE_ABI")
)
OURS = ["-I", str(ROOT / "csrc/include"), "-I", str(ROOT / "csrc")]
ARCHITECTURES = (80, 90, 100)


def headers_of(version: str, folder: Path) -> Path:
    """The include directory of a PyTorch wheel, taken out of it."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
    ]
    subprocess.run([*command, "--dest", str(folder), f"torch=={version}"], check=True)
    (wheel,) = folder.glob("torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(
            folder, [name for name in archive.namelist() if name.startswith("torch/include/")]
        )
    wheel.unlink()
    return folder / "torch/include"


def commands(include: Path, kernels: bool) -> Iterator[tuple[str, list[str]]]:
    """(what is compiled, how)."""
    torch = ["-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include")]
    options = [
        "-fsyntax-only",
        "-fopenmp-simd",
        "-fvisibility=hidden",
        "-Wall",
        "-Werror",
        '-DMERAK_INTERFACE="0"',
    ]
    for path in sorted([*ROOT.glob("csrc/cuda/*.cpp"), *ROOT.glob("csrc/cpu/*.cpp")]):
        cuda = ["-DUSE_CUDA"] if path.parent.name == "cuda" else []
        yield path.name, ["g++", STANDARD, STABLE_ABI, *options, *cuda, *torch, *OURS, str(path)]
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ARCHITECTURES]
    for path in sorted(ROOT.glob("csrc/cuda/*.cu")) if kernels else ():
        yield (
            path.name,
            ["nvcc", STANDARD, STABLE_ABI, "-O3", *targets, *OURS, "-c", "-o", "out.o", str(path)],
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("torch", nargs="?", help="a version of PyTorch")
    parser.add_argument("--include", type=Path, help="the include directory of one")
    parser.add_argument("--no-kernels", action="store_true", help="leave out the .cu files")
    asked = parser.parse_args()
    if (asked.torch is None) == (asked.include is None):
        parser.error("give a version, or --include")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        include = asked.include or headers_of(asked.torch, Path(folder))
        kernels = not asked.no_kernels and shutil.which("nvcc") is not None
        for name, command in commands(include, kernels):
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
            failed += done.returncode != 0
            print(
                f"{name}: {'compiles' if done.returncode == 0 else done.stderr[-2000:]}", flush=True
            )
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
