"""What a rank knows to have arrived: by hand, and of every schedule in its order of execution."""

import pytest

from megatron_merak.pipeline_parallel.arrivals import arrivals
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.ops import Kind, Op, ops_of
from megatron_merak.pipeline_parallel.order import execution_order
from megatron_merak.pipeline_parallel.passes import add_communication


def known(schedule, rank):
    return {
        str(op): [str(send) for send in sends] for op, sends in arrivals(schedule, rank).items()
    }


def test_1f1b_by_hand():
    """rank 0: F0 F1 B0 F2 B1 B2, rank 1: F0 B0 F1 B1 F2 B2."""
    schedule = add_communication(build_schedule("1f1b", 2, 3))
    assert known(schedule, 0) == {f"0B{k}": [f"0SEND_F{k}"] for k in range(3)}
    assert known(schedule, 1) == {"1F2": ["1SEND_B0"]}  # no message follows the others


@pytest.mark.parametrize("name", BUILDERS)
def test_a_receiver_has_read_what_is_known_to_have_arrived(name):
    schedule = add_communication(BUILDERS[name].build(4, 8))
    when = {}
    for place, (_, entry) in enumerate(execution_order(schedule)):
        when |= dict.fromkeys(ops_of(entry), place)
    readers = {Kind.SEND_F: (Kind.F, 1), Kind.SEND_B: (Kind.B, -1)}
    sent = {op for op in when if op.kind in readers}
    confirmed = set()
    for rank in range(4):
        for op, sends in arrivals(schedule, rank).items():
            assert schedule.rank_of(op.stage) == rank
            for send in sends:
                kind, step = readers[send.kind]
                read = Op(send.stage + step, kind, send.microbatch)
                assert when[send] < when[read] < when[op]
                assert send not in confirmed
                confirmed.add(send)
    forwards = {op for op in sent if op.kind is Kind.SEND_F}
    assert confirmed <= sent and forwards <= confirmed  # a backward answers every forward
