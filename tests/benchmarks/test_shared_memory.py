"""The benchmark of shared memory: it compares two backends that give the same losses, in the same
processes.
"""

import pytest

from benchmarks.kernels import shared_memory
from benchmarks.step.cases import QUICK
from megatron_merak import _native
from megatron_merak.parallel.shared_memory import register
from tests.ranks import run_ranks


def measured(rank, n):
    register()
    return shared_memory.measure(rank, n, QUICK, shared_memory.SHORT)


def test_both_backends_are_measured_on_the_same_work():
    if not hasattr(_native.host(), "shared_memory"):
        pytest.skip(_native.host_problem())
    for found in run_ranks(measured, 2, timeout=100):
        bench = shared_memory.SHORT
        assert found["shared"] and found["all_reduce"].keys() == set(bench.sizes)
        for size, times in found["all_reduce"].items():
            assert {len(one) for one in times.values()} == {bench.rounds * bench.calls_of(size)}
        assert {len(one) for one in found["step"].values()} == {bench.steps}
        assert (
            found["losses"]["gloo"] == found["losses"]["merak_shm"]
            and len(found["losses"]["gloo"]) == 3
        )
    assert shared_memory.table(found).count("\n") == len(bench.sizes) + 1


def test_a_row_shows_the_ratio_of_the_fastest_calls():
    line = shared_memory.row("x", {"gloo": [8e-6, 4e-6, 9e-6], "merak_shm": [2e-6, 1e-6, 5e-6]})
    assert line.split() == ["x", "4", "8", "1", "2", "4.00", "4.00"]
