"""The model against the machine: sleeping kernels and gloo over a link of 1 Gbit/s between two
network namespaces.
"""

import json
from pathlib import Path
from statistics import median

import pytest

from benchmarks.overlap import shaped
from tests.parallel import wall
from tests.ranks import run_ranks

RATE, REPEATS, LIMIT = 1e9, 5, 0.05


@pytest.mark.slow
def test_modelled_times_are_within_5_percent_of_the_machines(tmp_path):
    if reason := shaped.missing(RATE):
        pytest.skip(f"no network namespaces here: {reason}")
    result = tmp_path / "result"
    arguments = [str(tmp_path / "store"), str(result), str(REPEATS)]
    shaped.run_on_hosts(RATE, Path(wall.__file__), arguments, timeout=300)
    ranks = [json.loads(Path(f"{result}.{rank}").read_text()) for rank in (0, 1)]
    modelled = run_ranks(wall.predict, 2, timeout=120)
    lines, worst = [], 0.0
    for name in wall.PROGRAMS:
        runs = list(zip(*(rank[name] for rank in ranks), strict=True))
        times = [max(end for _, end in run) - min(start for start, _ in run) for run in runs]
        # what disturbs a run only adds to it
        found, expected = min(times), max(times[name] for times in modelled)
        error = found / expected - 1
        worst = max(worst, abs(error))
        line = f"{name:24s} modelled {1e3 * expected:7.1f} ms   measured {1e3 * found:7.1f} ms   {error:+.1%}"
        lines.append(f"{line}   (median {median(times) / expected - 1:+.1%})")
    print("\n" + "\n".join(lines))
    assert worst < LIMIT, "\n".join(lines)
