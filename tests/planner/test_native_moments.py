"""What ranks hold, by the compiled walk and by its twin in Python, on orders that run and on any
others.
"""

import os
from random import Random
from unittest import mock

import pytest

from megatron_merak import _native
from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule, ops_of
from megatron_merak.pipeline_parallel.pairs import pair
from megatron_merak.pipeline_parallel.passes import add_communication
from megatron_merak.planner.saved import moments

pytestmark = pytest.mark.skipif(
    _native.host() is None, reason=f"not compiled: {_native.host_problem()}"
)


def compare(schedule: Schedule) -> None:
    for rank in range(len(schedule.ranks)):
        with mock.patch.dict(os.environ, MERAK_EXT="0"):
            expected = moments(schedule, rank)
        assert moments(schedule, rank) == expected
        assert _native.host().moments(schedule.ranks[rank], tuple(Kind)) == expected


@pytest.mark.parametrize("name", BUILDERS)
def test_builders_hold_the_same(name):
    for ranks, microbatches in ((1, 1), (2, 4), (4, 9), (8, 16)):
        try:
            schedule = build_schedule(name, ranks, microbatches)
        except ScheduleError:
            continue
        for each in (schedule, add_communication(schedule), pair(schedule)):
            compare(each)


@pytest.mark.parametrize("seed", range(40))
def test_any_program_holds_the_same(seed):
    """Of several stages, with or without R and W, together or alone, in whatever order: counts may
    be below zero.
    """
    draw = Random(seed)
    stages, count = draw.randint(1, 4), draw.randint(1, 6)
    kinds = [Kind.F, Kind.B, *draw.sample([Kind.R, Kind.W, Kind.SEND_F], draw.randint(0, 3))]
    ops = [Op(s, kind, k) for s in range(stages) for k in range(count) for kind in kinds]
    if draw.random() < 0.5:
        draw.shuffle(ops)
    else:
        ops.sort(key=lambda op: (op.microbatch + 2 * "FRBW".find(op.kind[0]), op.stage))
    entries: list = []
    for op in ops:
        last = ops_of(entries[-1]) if entries else ()
        together = last and len(last) < 3 and all(other.kind.is_compute for other in (*last, op))
        if together and draw.random() < 0.3:
            entries[-1] = (*last, op)
        else:
            entries.append(op)
    compare(Schedule("any", stages, count, (tuple(entries),)))


def test_what_is_no_op_is_left_to_python():
    host = _native.host()
    assert host.moments((), tuple(Kind)) == ()
    for program in (("0F0",), (Op(0, "F", 0),), ((Op(0, Kind.F, 0),),)):
        assert host.moments(program, tuple(Kind)) is None
    with pytest.raises(ValueError):
        host.moments((), tuple(Kind)[:3])
