"""What a rank knows of its messages: which of them have arrived, by those that came back."""

from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule, ops_of

_CONSUMED = {Kind.F: (Kind.SEND_F, -1), Kind.B: (Kind.SEND_B, 1)}
_CONSUMER = {Kind.SEND_F: (Kind.F, 1), Kind.SEND_B: (Kind.B, -1)}


def arrivals(schedule: Schedule, rank: int) -> dict[Op, tuple[Op, ...]]:
    """Return, per compute op of a rank that reads a message, the rank's sends that are over by then.

    Its peer had read them before it sent that message. Sends that no message follows are nowhere.

    schedule: with communication ops.
    """
    known: dict[Op, tuple[Op, ...]] = {}
    for peer, program in enumerate(schedule.ranks):
        read: list[Op] = []
        for op in (op for entry in program if peer != rank for op in ops_of(entry)):
            if op.kind in _CONSUMED:
                kind, step = _CONSUMED[op.kind]
                source = op.stage + step
                if 0 <= source < schedule.stages and schedule.rank_of(source) == rank:
                    read.append(Op(source, kind, op.microbatch))
            elif op.kind in _CONSUMER and schedule.channel(op)[1] == rank and read:
                kind, step = _CONSUMER[op.kind]
                known[Op(op.stage + step, kind, op.microbatch)] = tuple(read)
                read = []
    return known
