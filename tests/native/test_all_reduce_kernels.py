"""The all-reduce over peer memory on threads of the host: its sums, and ThreadSanitizer on its
flags and halves.
"""

import pytest

from tests.native.host_programs import RACE, Mutant, build, run, seen
from tests.native.shim import NEEDED

pytestmark = NEEDED
SIGNAL, KERNEL = "include/merak/signal.h", "kernels/all_reduce.cuh"

# Each must be seen as a race or a wrong sum.
MUTANTS = {
    "no release": Mutant(SIGNAL, "__ATOMIC_RELEASE", "__ATOMIC_RELAXED"),
    "no acquire": Mutant(SIGNAL, "__ATOMIC_ACQUIRE", "__ATOMIC_RELAXED"),
    "one half": Mutant(KERNEL, "(call % 2) * peers.capacity", "0 * peers.capacity"),
    "no first meeting": Mutant(
        KERNEL,
        "  meet<WORLD>(team, peers, 2 * call + 1);\n  constexpr int kPlaces",
        "  constexpr int kPlaces",
    ),
    "no first meeting of two shots": Mutant(
        KERNEL,
        "  meet<WORLD>(team, peers, 2 * call + 1);\n  for (int64_t place = first",
        "  for (int64_t place = first",
    ),
    "no second meeting": Mutant(KERNEL, "  meet<WORLD>(team, peers, 2 * call + 2);\n", ""),
    "flags of another block": Mutant(KERNEL, "+ block * kPeers + from", "+ 0 * block + from"),
    "calls are not counted": Mutant(
        KERNEL,
        "*calls_of(peers, team.number()) = call + 1",
        "*calls_of(peers, team.number()) = call",
    ),
    "a round copies one pack": Mutant(KERNEL, "return start + i * step;", "return start;"),
    "a round sums one place": Mutant(
        KERNEL,
        "parts_at<T, WORLD>(peers, call, start + i * step)",
        "parts_at<T, WORLD>(peers, call, start)",
    ),
    "rounds leave gaps": Mutant(KERNEL, "start += kPlaces * step", "start += (kPlaces + 1) * step"),
    "what is not whole stays": Mutant(KERNEL, "else if (left > 0)", "else if (false)"),
    "what is not whole moves as if it were": Mutant(
        KERNEL, "if (vector && left >= N)", "if (true)"
    ),
    "sums are left in the own half": Mutant(
        KERNEL,
        "sums.of[rank] = load<T, N>(half_of<T>(peers, rank, call)",
        "sums.of[rank] = load<T, N>(own",
    ),
    "one rank twice": Mutant(KERNEL, "int rank = 1; rank < WORLD", "int rank = 0; rank < WORLD"),
}


@pytest.mark.parametrize(("ranks", "calls"), [(2, 60), (4, 25), (8, 8)])
def test_sums_of_any_size_and_no_race(ranks, calls, tmp_path):
    done = run(build(tmp_path, "all_reduce", RACE, f"-DRANKS={ranks}"), calls)
    assert done.returncode == 0, done.stdout + done.stderr[:2000]


def test_many_calls_with_ranks_out_of_step(tmp_path):
    done = run(build(tmp_path, "all_reduce", "-DRANKS=4"), 400, seed=3)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught(mutant, tmp_path):
    """By what it sums, or by ThreadSanitizer."""
    assert seen(build(tmp_path, "all_reduce", RACE, "-DRANKS=2", mutant=MUTANTS[mutant]), 60), (
        mutant
    )
