"""torch.distributed.pipelining as an oracle: its orders where it has the same schedules, its
validator for all.
"""

import pytest

from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule
from megatron_merak.pipeline_parallel.passes import add_communication, without

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


def text_of(schedule: Schedule, op: Op) -> str:
    """torch has a kind of its own, I, for a backward whose weight gradients come later."""
    split = op.kind is Kind.B and BUILDERS[schedule.name].splits
    return f"{op.stage}I{op.microbatch}" if split else str(op)


def order_of(actions) -> list[str]:
    kept = (action for action in actions if action is not None)
    return [str(action) for action in kept if "REDUCE_GRAD" not in str(action)]


def their_order(name: str, ranks: int, microbatches: int, chunks: int) -> list[list[str]]:
    """What a schedule of torch says that each rank does, without the stages that it would run."""
    schedule = object.__new__(getattr(torch_schedules, name))
    schedule._n_microbatches = schedule.n_microbatches = microbatches
    schedule._num_stages = schedule.num_stages = ranks * chunks
    schedule.pp_group_size, schedule.n_local_stages = ranks, chunks
    schedule.number_of_rounds = max(1, microbatches // ranks)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    if hasattr(schedule, "_calculate_single_rank_operations"):
        return [order_of(schedule._calculate_single_rank_operations(rank)) for rank in range(ranks)]
    return [order_of(actions) for actions in schedule._get_pipeline_order().values()]


@pytest.mark.parametrize(
    "ranks,microbatches", [(1, 2), (2, 2), (2, 6), (4, 4), (4, 8), (4, 10), (8, 32)]
)
@pytest.mark.parametrize(
    "ours,theirs,chunks",
    [
        ("1f1b", "Schedule1F1B", 1),
        ("gpipe", "ScheduleGPipe", 1),
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("interleaved", "ScheduleInterleaved1F1B", 3),
        ("zb-h1", "ScheduleInterleavedZeroBubble", 1),
        ("zb-v", "ScheduleZBVZeroBubble", 2),
    ],
)
def test_same_order(ours, theirs, chunks, ranks, microbatches):
    schedule = build_schedule(ours, ranks, microbatches, chunks)
    found = [[text_of(schedule, op) for op in program] for program in schedule.ranks]
    expected = their_order(theirs, ranks, microbatches, chunks)
    # torch numbers the forwards of the last rank from 1, beyond its last micro-batch
    if ours == "1f1b":
        assert expected[-1] != found[-1] and "".join(expected[-1]).count("F") == microbatches
        expected[-1] = found[-1]
    assert found == expected


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("ranks,microbatches", [(2, 4), (4, 8), (5, 6)])
def test_torch_accepts_our_text_and_adds_the_same_transfers(name, ranks, microbatches):
    schedule = without(build_schedule(name, ranks, microbatches), Kind.R)  # which it does not know
    actions = {
        rank: [torch_schedules._Action.from_str(text_of(schedule, op)) for op in program]
        for rank, program in enumerate(schedule.ranks)
    }
    placed = torch_schedules._validate_schedule(actions, ranks, schedule.stages, microbatches)
    assert placed == {stage: schedule.rank_of(stage) for stage in range(schedule.stages)}
    theirs = torch_schedules._add_send_recv(actions, schedule.rank_of, schedule.stages)
    for rank, program in enumerate(add_communication(schedule).ranks):
        assert sorted(text_of(schedule, op) for op in program) == sorted(map(str, theirs[rank]))
