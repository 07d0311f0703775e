"""The benchmark of overlap: how much is hidden on the modelled clock, and that what is measured is
what it says.
"""

import json
from pathlib import Path

import pytest

from benchmarks.overlap import modelled as overlap_modelled
from benchmarks.overlap import page as overlap_page
from benchmarks.overlap import shaped
from benchmarks.overlap import wall as overlap_wall
from tests.ranks import run_ranks


def modelled(bandwidth, scale):
    ranks = run_ranks(overlap_modelled.run, 2, bandwidth, scale, timeout=180)
    return {key: overlap_page.Outcome.modelled(one.accounts) for key, one in ranks[0].items()}


@pytest.fixture(scope="module")
def outcomes():
    return modelled(15e9, 64)


@pytest.mark.long
def test_halves_and_pairs_hide_nine_tenths_where_computing_takes_as_long(outcomes):
    assert overlap_page.covered(outcomes)
    shares = overlap_page.shares(outcomes)
    assert shares["weight-gradient"] < 0.5
    assert min(shares[mode] for mode in overlap_page.HIDING) > overlap_page.ENOUGH_MODELLED
    recomputing = outcomes["sub-pipeline", True].hidden(outcomes["none", True], "R")
    assert recomputing > overlap_page.ENOUGH_MODELLED


@pytest.mark.slow
def test_nothing_is_hidden_beyond_the_time_of_computing():
    slow = modelled(2e9, 64)
    assert not overlap_page.covered(slow)
    blocking = slow["none", False]
    most = (blocking.total["F"] - blocking.exposed["F"]) / blocking.exposed["F"]
    assert slow["sub-pipeline", False].hidden(blocking, "F") < most < 0.5


@pytest.mark.slow
def test_the_times_do_not_depend_on_the_scale(outcomes):
    for key, one in modelled(15e9, 16).items():
        assert sum(one.total.values()) == pytest.approx(
            sum(outcomes[key].total.values()), rel=0.005
        ), key


@pytest.mark.slow
def test_a_rank_measures_all_ways_to_one_gradient(tmp_path):
    bench = overlap_wall.Bench(
        str(tmp_path / "store"), str(tmp_path / "results"), 2, 8, 16, 0.001, 1
    )
    (times, other) = run_ranks(overlap_wall.predict, 2, bench, {"F": 0.004, "B": 0.008})
    assert times == other and times.keys() == {
        (mode, again) for mode in overlap_wall.MODES[1:] for again in (False, True)
    }
    blocking = times["none", False]
    assert (
        blocking["F"] == pytest.approx(0.004 + 4 * 0.0002, rel=0.02)
        and 2 * blocking["F"] < blocking["B"] + 0.001
    )
    if reason := shaped.missing(1e9):
        pytest.skip(f"no network namespaces: {reason}")
    shaped.run_on_hosts(1e9, Path(overlap_wall.__file__), [json.dumps(vars(bench))], 100)
    ranks = [json.loads((tmp_path / f"results.{rank}").read_text())["runs"] for rank in (0, 1)]
    gradients = {run["gradient"] for runs in ranks for run in runs if run["mode"] != "compute"}
    assert max(gradients) == pytest.approx(min(gradients), rel=1e-6)
    wall = overlap_page.Wall.of(ranks, "")
    assert wall.compute[False]["F"] > 4 * 0.001 and wall.compute[False]["B"] > 4 * 0.002
    assert wall.outcomes["none", False].total["F"] > wall.compute[False]["F"]
