"""The benchmark of schedules: its formulas, and that timed stages do what they are timed for."""

import pytest

from benchmarks.schedules import cells, timed_runs
from benchmarks.schedules import page as schedules_page
from tests.ranks import run_ranks


def test_formulas_are_what_the_simulation_finds():
    found = [
        cell for cell in cells.all_cells((2, 4, 8), (1, 2, 4)) if cell.schedule in cells.FORMULAS
    ]
    without = [cell for cell in found if cell.formula() is None]
    assert [(cell.schedule, cell.ranks, cell.microbatches) for cell in without] == [
        ("shifted", 2, 2),
        ("zb-v", 2, 2),
        ("zb-v", 4, 4),
        ("zb-v", 8, 8),
    ]
    assert [cell.schedule for cell in found if cell.outside] == ["shifted"]
    for cell in (cell for cell in found if cell not in without):
        assert cell.simulated() == pytest.approx(cell.formula(), rel=1e-12), cell


def test_an_emulated_run_takes_what_the_simulation_finds():
    chosen = [cell for cell in cells.all_cells((4,), (1, 2)) if not cell.outside]
    ranks = run_ranks(timed_runs.emulate, 4, chosen)
    for cell, seconds in zip(chosen, zip(*ranks, strict=True), strict=True):
        assert max(seconds) == pytest.approx(cell.simulated(), rel=1e-12), cell


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "early-recompute"])
def test_a_measured_step_takes_no_less_than_it_sleeps_and_torch_has_the_same_gradients(name):
    cell = cells.Cell(name, 2, 4, forward=0.004)
    found = schedules_page.Measured.of(cell.simulated(), run_ranks(timed_runs.measure, 2, cell, 1))
    assert len(found.ours) == 1 and len(found.torch) == (cell.peer is not None)
    assert min(*found.ours, *found.torch, 99) > cell.simulated()
    assert found.same_gradients


def test_gradients_that_differ_from_torch_are_seen():
    cell = cells.Cell("1f1b", 2, 2, forward=0.001)
    ranks = run_ranks(timed_runs.measure, 2, cell, 1)
    ranks[1].gradients["torch"][1][3] += 1e-6
    assert not schedules_page.Measured.of(1.0, ranks).same_gradients
