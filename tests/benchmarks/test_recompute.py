"""The benchmark of recomputation: every method plans a layout, and none is slower than recomputing
all.
"""

from benchmarks.modelled.recompute import SCHEDULES, Case
from megatron_merak.plan import Grid


def test_recomputing_less_takes_less_time_on_one_layout():
    case = Case("1.5B", Grid(tp=1, dp=2, pp=4), 16)
    assert case.plan("none", "1f1b") is None, "it does not fit"
    for schedule in SCHEDULES:
        full, fewest = case.plan("full", schedule), case.plan("capacity", schedule)
        assert fewest.predicted_time <= case.unbalanced(schedule) <= full.predicted_time
