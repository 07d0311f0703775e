"""Programs of csrc/test: what ranks do to each other's memory, on threads of the host, for
ThreadSanitizer to watch.
"""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.native.shim import ROOT

RACE = "-fsanitize=thread"
SEEN = (1, 66)  # exit statuses of a wrong result, and of ThreadSanitizer


class Mutant(NamedTuple):
    """A defect: ``other`` stands where ``text`` was in a file of csrc."""

    file: str
    text: str
    other: str


def build(folder: Path, name: str, *flags: str, mutant: Mutant | None = None) -> Path:
    shutil.copytree(ROOT / "csrc", folder / "csrc", dirs_exist_ok=True)
    if mutant:
        path = folder / "csrc" / mutant.file
        source = path.read_text(encoding="utf-8")
        assert mutant.text in source, mutant
        path.write_text(source.replace(mutant.text, mutant.other), encoding="utf-8")
    program = folder / name
    command = ["g++", "-std=c++17", "-O1", "-fno-strict-aliasing", "-w", *flags, "-pthread"]
    command += ["-Icsrc/include", "-Icsrc", f"csrc/test/{name}.cpp", "-o", str(program)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return program


def run(program: Path, times: int, seed: int = 0) -> subprocess.CompletedProcess:
    # Address-space randomisation of some kernels leaves ThreadSanitizer no room for its shadow
    # memory.
    still = ["setarch", "-R"] if shutil.which("setarch") else []
    return subprocess.run(
        [*still, str(program), str(times), str(seed)], capture_output=True, text=True, timeout=100
    )


def seen(program: Path, times: int) -> bool:
    """Whether a defect shows in one of a few runs."""
    return any(run(program, times, seed).returncode in SEEN for seed in range(3))
