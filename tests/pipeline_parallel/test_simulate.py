"""The simulator against times that are known by hand or from literature."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.pipeline_parallel.ops import Schedule
from megatron_merak.pipeline_parallel.simulate import StageCosts, simulate

ROOT = Path(__file__).parents[2]

# Shifted critical path (Lai et al., Merak, 2023) for 4 stages: early recomputation in the bubbles
# of 1F1B.
SHIFTED = """shifted stages=4 microbatches=6
rank 0: 0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0R3 0B3 0R4 0B4 0R5 0B5
rank 1: 1F0 1F1 1F2 1R0 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1R4 1B4 1R5 1B5
rank 2: 2F0 2F1 2F2 2R0 2B0 2R1 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5
rank 3: 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5
"""


def test_recomputation_is_inside_the_backward_unless_it_ran_before():
    costs = StageCosts.uniform(4, recompute=1)
    assert simulate(build_schedule("1f1b", 4, 6), costs).makespan == 4 * (6 + 4 - 1)
    last_keeps = StageCosts((1,) * 4, (2,) * 4, (0,) * 4, (1, 1, 1, 0), (0,) * 3, (0,) * 3)
    assert simulate(build_schedule("1f1b", 4, 6), last_keeps).makespan == 4 * (6 + 4 - 1) - 2
    shifted = simulate(Schedule.parse(SHIFTED), last_keeps)
    assert shifted.makespan == 4 * 6 + 3 * 4 - 6
    assert shifted.peak_in_flight == (4, 3, 3, 1)


def test_the_weight_gradient_leaves_the_backward_when_it_has_its_own_op():
    text = "split stages=2 microbatches=1\nrank 0: 0F0 0B0 0W0\nrank 1: 1F0 1B0 1W0"
    timeline = simulate(Schedule.parse(text), StageCosts.uniform(2, 1, 2, weight=1))
    assert timeline.makespan == 1 + 1 + 1 + 1 + 1  # the W of stage 1 overlaps the B of stage 0
    assert timeline.busy == (3, 3)
    assert (
        simulate(build_schedule("1f1b", 2, 1), StageCosts.uniform(2, 1, 2, weight=1)).makespan == 6
    )


def test_a_slow_link_costs_more_than_fill_and_drain():
    """1F1B, 8 stages: 26 hops, not 14, as a run on an emulated cluster measured; its steady state
    pays round trips.
    """
    timeline = simulate(build_schedule("1f1b", 8, 8), StageCosts.uniform(8, 20, 40, latency=8))
    assert timeline.makespan == 15 * 60 + 26 * 8
    gpipe = simulate(build_schedule("gpipe", 8, 8), StageCosts.uniform(8, 20, 40, latency=8))
    assert gpipe.makespan == 15 * 60 + 14 * 8


def test_messages_of_one_channel_take_turns():
    """Three micro-batches of 1 s over a link of 5 s a message; latency delays each, but not the
    next.
    """
    costs = StageCosts.uniform(2, 1, 0, transfer=5, latency=2)
    timeline = simulate(build_schedule("gpipe", 2, 3), costs)
    activations = [message for message in timeline.transfers if message.source == 0]
    assert [str(message.op) for message in activations] == ["0SEND_F0", "0SEND_F1", "0SEND_F2"]
    assert [message.start for message in activations] == [1, 6, 11]
    assert [message.end for message in activations] == [8, 13, 18]


def test_messages_of_all_stages_and_both_kinds_share_a_wire():
    """Rank 0 holds stages 0 and 3 of a V, so it sends rank 1 activations of the one and gradients
    of the other.
    """
    order = "v stages=4 microbatches=2 placement=0,1,1,0\n"
    order += "rank 0: 0F0 3F0 3B0 0F1 0B0 3F1 3B1 0B1\nrank 1: 1F0 2F0 2B0 1F1 1B0 2F1 2B1 1B1"
    timeline = simulate(Schedule.parse(order), StageCosts.uniform(4, 1, 2, transfer=5))
    sent = [
        (str(m.op), m.start, m.end)
        for m in sorted(timeline.transfers, key=lambda m: (m.source, m.start))
    ]
    assert sent[:4] == [
        ("0SEND_F0", 1, 6),
        ("3SEND_B0", 16, 21),
        ("0SEND_F1", 21, 26),
        ("3SEND_B1", 42, 47),
    ]
    assert sent[4:] == [
        ("2SEND_F0", 8, 13),
        ("1SEND_B0", 29, 34),
        ("2SEND_F1", 34, 39),
        ("1SEND_B1", 51, 56),
    ]


def test_a_transfer_waits_for_its_receive_to_be_posted():
    """The receive of 0F1 is posted when stage 1 starts F0, at 6; posted later, the transfer would
    not be hidden.
    """
    timeline = simulate(build_schedule("1f1b", 2, 2), StageCosts.uniform(2, 1, 10, transfer=5))
    sends = {str(message.op): message for message in timeline.transfers}
    assert (sends["0SEND_F0"].start, sends["0SEND_F1"].start) == (1, 7)
    starts = {str(event.op): event.start for event in timeline.events}
    assert starts["1F1"] == starts["1B0"] + 10


def test_the_slowest_stage_sets_the_pace():
    """Stage 1 waits only for the first forward of stage 0, and its last backward is followed by
    that of stage 0.
    """
    costs = StageCosts((1, 3, 1), (2, 6, 2), (0,) * 3, (0,) * 3, (0,) * 2, (0,) * 2)
    timeline = simulate(build_schedule("1f1b", 3, 20), costs)
    assert timeline.makespan == 1 + 20 * 9 + 2
    assert timeline.bubbles[1] == pytest.approx(1 - 180 / timeline.makespan)


def test_ops_run_together_share_their_entry():
    text = "pair stages=1 microbatches=2\nrank 0: 0F0 0F1|0B0 0B1"
    costs = StageCosts.uniform(1, 1, 2)
    assert simulate(Schedule.parse(text), costs).makespan == 6
    timeline = simulate(Schedule.parse(text), costs, overlap=1.0)
    assert timeline.makespan == 5
    pair = [
        (str(event.op), event.part, event.start, event.end)
        for event in timeline.events
        if event.parts == 2
    ]
    assert pair == [("0F1", 0, 1, 3), ("0B0", 1, 1, 3)]


def test_events_cover_the_busy_time_and_do_not_overlap():
    timeline = simulate(build_schedule("1f1b", 4, 8), StageCosts.uniform(4, 1, 2, transfer=0.5))
    for rank, busy in enumerate(timeline.busy):
        events = [event for event in timeline.events if event.rank == rank]
        assert sum(event.end - event.start for event in events) == busy == 24
        assert all(
            first.end <= second.start for first, second in zip(events, events[1:], strict=False)
        )


@pytest.mark.parametrize("costs", [{"forward": -1}, {"transfer": float("nan")}, {"weight": 3}])
def test_impossible_costs_are_refused(costs):
    with pytest.raises(ScheduleError):
        StageCosts.uniform(3, **costs)


def test_costs_of_another_pipeline_are_refused():
    with pytest.raises(ScheduleError, match="it has 4 stages, the costs 3"):
        simulate(build_schedule("1f1b", 4, 4), StageCosts.uniform(3))
    with pytest.raises(ScheduleError, match="transfer times"):
        StageCosts((1, 1), (1, 1), (0, 0), (0, 0), (0, 0), (0,))


def test_planning_a_schedule_loads_neither_torch_nor_matplotlib():
    code = (
        "import sys, megatron_merak.pipeline_parallel.pictures, megatron_merak.pipeline_parallel.builders;"
        "sys.exit(bool({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
