"""A plan as a picture: the bytes of its ranks over time peak at what the plan predicts."""

import pytest

from megatron_merak.arguments import parse
from megatron_merak.cluster import CLUSTERS
from megatron_merak.planner import plan
from megatron_merak.planner.memory import rank_memory
from megatron_merak.planner.picture import view

FLAGS = """--num-layers 14 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 500
    --micro-batch-size 2 --global-batch-size 32 --pipeline-model-parallel-size 4 --pipeline-schedule"""


@pytest.mark.parametrize("recompute", ["", " --recompute-granularity full"])
@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved", "shifted", "early-recompute", "zb-h1", "zb-v"]
)
def test_the_curves_of_all_schedules_peak_at_the_prediction(schedule, recompute):
    made = plan(parse(f"{FLAGS} {schedule}{recompute}".split()), 4, CLUSTERS["dgx-h100"])
    shown = view(made)
    memory = rank_memory(made)
    assert shown.peak_bytes() == tuple(rank.total for rank in memory)
    for rank, curve in enumerate(shown.memory):
        times = [time for time, _ in curve]
        assert (
            times == sorted(set(times))
            and times[0] == 0
            and times[-1] == pytest.approx(_last_end(shown, rank))
        )
        assert curve[-1][1] == memory[rank].total - memory[rank].activations
    assert shown.clock == "modelled" and shown.capacity == made.cluster.device.usable
    assert sum(made.predicted_bytes) == sum(shown.peak_bytes())


def _last_end(shown, rank):
    return max(event.end for event in shown.timeline.events if event.rank == rank)
