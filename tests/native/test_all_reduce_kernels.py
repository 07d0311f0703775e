"""The all-reduce over peer memory on threads of the host: its sums, and ThreadSanitizer on its flags and halves."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native.shim import NEEDED, ROOT

pytestmark = NEEDED
KERNEL = Path("csrc/kernels/all_reduce.cuh")

# name -> (text, what stands there instead): each must be seen as a race or a wrong sum.
MUTANTS = {
    "no release": ("__ATOMIC_RELEASE", "__ATOMIC_RELAXED"),
    "no acquire": ("__ATOMIC_ACQUIRE", "__ATOMIC_RELAXED"),
    "one half": ("(call % 2) * peers.capacity", "0 * peers.capacity"),
    "no first meeting": (
        "  meet<WORLD>(team, peers, 2 * call + 1);\n  for (int64_t pack = first",
        "  for (int64_t pack = first",
    ),
    "no second meeting": ("  meet<WORLD>(team, peers, 2 * call + 2);\n", ""),
    "flags of another block": ("+ block * kPeers + from", "+ 0 * block + from"),
    "calls are not counted": ("*calls_of(peers, team.number()) = call + 1", "*calls_of(peers, team.number()) = call"),
    "one rank twice": ("int rank = 1; rank < WORLD", "int rank = 0; rank < WORLD"),
}


def build(folder: Path, ranks: int, *flags: str, mutant: str | None = None) -> Path:
    shutil.copytree(ROOT / "csrc", folder / "csrc", dirs_exist_ok=True)
    if mutant:
        text, other = MUTANTS[mutant]
        source = (folder / KERNEL).read_text(encoding="utf-8")
        assert text in source, mutant
        (folder / KERNEL).write_text(source.replace(text, other), encoding="utf-8")
    program = folder / f"all_reduce_{ranks}"
    command = ["g++", "-std=c++17", "-O1", "-fno-strict-aliasing", "-w", *flags, f"-DRANKS={ranks}", "-pthread"]
    command += ["-Icsrc/include", "-Icsrc", "csrc/test/all_reduce.cpp", "-o", str(program)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return program


def run(program: Path, calls: int, seed: int = 0) -> subprocess.CompletedProcess:
    # Address-space randomisation of some kernels leaves ThreadSanitizer no room for its shadow memory.
    still = ["setarch", "-R"] if shutil.which("setarch") else []
    return subprocess.run([*still, str(program), str(calls), str(seed)], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(("ranks", "calls"), [(2, 60), (4, 25), (8, 8)])
def test_sums_of_any_size_and_no_race(ranks, calls, tmp_path):
    done = run(build(tmp_path, ranks, "-fsanitize=thread"), calls)
    assert done.returncode == 0, done.stdout + done.stderr[:2000]


def test_many_calls_with_ranks_out_of_step(tmp_path):
    done = run(build(tmp_path, 4), 400, seed=3)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught(mutant, tmp_path):
    """By what it sums, or by ThreadSanitizer, which exits with 66."""
    program = build(tmp_path, 2, "-fsanitize=thread", mutant=mutant)
    assert any(run(program, 60, seed).returncode in (1, 66) for seed in range(3)), mutant
