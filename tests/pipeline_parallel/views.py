"""Timelines that are known by hand, for the tests of pictures."""

from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.pipeline_parallel.ops import Schedule
from megatron_merak.pipeline_parallel.pictures.trace import messages_between, timeline_of
from megatron_merak.pipeline_parallel.pictures.view import View
from megatron_merak.pipeline_parallel.simulate import Event, StageCosts, simulate

# Two stages on one rank in a V, with every kind of op, a group, and messages in both directions.
MIXED = """mixed stages=4 microbatches=2 placement=0,1,1,0
rank 0: 0F0 0F1 3F0 3B0 3F1 3B1|3W0 3W1 0R0 0B0 0W0 0R1 0B1 0W1
rank 1: 1F0 2F0 1F1 2F1 2B0 2W0 1B0|2B1 1W0|2W1 1B1 1W1
"""


def view(
    name: str, ranks: int = 4, microbatches: int = 8, chunks: int | None = None, **costs: float
) -> View:
    schedule = build_schedule(name, ranks, microbatches, chunks)
    given = {
        "forward": 0.01,
        "backward": 0.02,
        "weight": 0.01,
        "transfer": 0.001,
        "latency": 0.0005,
    } | costs
    return View(simulate(schedule, StageCosts.uniform(schedule.stages, **given)))


def mixed() -> View:
    """With memory curves that nobody computed, a capacity, and a title that is no HTML."""
    costs = StageCosts.uniform(4, 0.01, 0.02, 0.01, 0.01, 0.001, 0.0005)
    timeline = simulate(Schedule.parse(MIXED), costs, overlap=0.5)
    memory = (((0.0, 2**30), (0.01, 3 * 2**30)), ((0.0, 5), (0.02, 0)))
    return View(
        timeline, "</script><b>mixed & paired", "modelled", 'some "detail"', memory, 2 * 2**30
    )


def measured() -> View:
    """As a run is seen: nobody timed its messages, and ops start some time after they could."""
    plain = simulate(
        build_schedule("1f1b", 3, 4), StageCosts.uniform(3, 0.01, 0.02, transfer=0.002)
    ).schedule
    late = simulate(plain, StageCosts.uniform(3, 0.0113, 0.0217, latency=0.0007))
    events = [Event(e.rank, e.op, e.start + 0.0003, e.end, e.part, e.parts) for e in late.events]
    timeline = timeline_of(plain, events, messages_between(plain, events))
    return View(timeline, "a run", "measured", timed=False)
