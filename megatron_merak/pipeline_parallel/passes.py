"""Passes: functions from Schedule to Schedule."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.ops import Entry, Kind, Op, Schedule, ops_of
from megatron_merak.pipeline_parallel.order import crosses_ranks


def forward_only(schedule: Schedule) -> Schedule:
    """Return the forwards of a schedule of compute ops, in order, each on its own: the schedule of
    an evaluation.
    """
    forwards = [
        [op for entry in program for op in ops_of(entry) if op.kind is Kind.F]
        for program in schedule.ranks
    ]
    return replace(schedule, ranks=tuple(map(tuple, forwards)), updates=None)


def without(schedule: Schedule, kind: Kind, stages: Collection[int] | None = None) -> Schedule:
    """Return a schedule of compute ops without the R or W ops of these stages (default: all): each
    B then includes them.

    Used for the R ops of stages that recompute nothing.
    """
    if kind not in (Kind.R, Kind.W):
        raise ScheduleError(
            "schedule", schedule.name, f"it cannot do without {kind} ops", "Drop R or W ops only"
        )
    dropped = range(schedule.stages) if stages is None else stages
    ranks = []
    for program in schedule.ranks:
        left = [
            [op for op in ops_of(entry) if op.kind is not kind or op.stage not in dropped]
            for entry in program
        ]
        ranks.append(tuple(ops[0] if len(ops) == 1 else tuple(ops) for ops in left if ops))
    return replace(schedule, ranks=tuple(ranks))


def resize(schedule: Schedule, microbatches: int) -> Schedule:
    """Return a schedule of compute ops for another number of micro-batches.

    The last ones are left out, or the schedule is repeated for further ones. Raises ScheduleError
    for one that updates weights on its way.
    """
    if schedule.updates is not None and microbatches != schedule.microbatches:
        reason = (
            f"it updates weights among its {schedule.microbatches} micro-batches, and this step "
            f"has {microbatches}"
        )
        raise ScheduleError("schedule", schedule.name, reason, "Let all steps have as many")
    rounds = -(-microbatches // schedule.microbatches)

    def program_of(program: tuple[Entry, ...]) -> Iterator[Entry]:
        for past in range(0, rounds * schedule.microbatches, schedule.microbatches):
            for entry in program:
                moved = [replace(op, microbatch=op.microbatch + past) for op in ops_of(entry)]
                remaining = tuple(op for op in moved if op.microbatch < microbatches)
                if remaining:
                    yield remaining if len(remaining) > 1 else remaining[0]

    programs = tuple(tuple(program_of(program)) for program in schedule.ranks)
    return replace(schedule, microbatches=microbatches, ranks=programs)


def add_communication(schedule: Schedule) -> Schedule:
    """Add the sends and receives to a schedule of compute ops.

    A send follows the entry that produces its value. A receive is posted one forward or backward
    before its consumer, so that the transfer overlaps with that and with the recomputations and
    weight gradients in between. It is posted earlier if the messages of its channel are sent in
    another order than they are consumed: the ends of a channel are matched by order alone. Stages
    on one rank exchange no messages. Raises ScheduleError if there is communication already.
    """
    if schedule.has_communication:
        raise ScheduleError(
            "schedule", schedule.name, "it has communication ops already", "Pass compute ops only"
        )
    sends = [[_sends(schedule, entry) for entry in program] for program in schedule.ranks]
    receives = _place_receives(schedule, sends)
    programs = []
    for rank, program in enumerate(schedule.ranks):
        ops: list[Entry] = []
        for index, entry in enumerate(program):
            ops += [*receives[rank][index], entry, *sends[rank][index]]
        programs.append(tuple(ops))
    return replace(schedule, ranks=tuple(programs))


def _sends(schedule: Schedule, entry: Entry) -> list[Op]:
    sends = []
    for op in ops_of(entry):
        if op.kind is Kind.F and op.stage < schedule.stages - 1:
            sends.append(Op(op.stage, Kind.SEND_F, op.microbatch))
        elif op.kind is Kind.B and op.stage > 0:
            sends.append(Op(op.stage, Kind.SEND_B, op.microbatch))
    return [send for send in sends if crosses_ranks(schedule, send)]


def _place_receives(schedule: Schedule, sends: list[list[list[Op]]]) -> list[list[list[Op]]]:
    """Return for every rank the receives to post before each of its entries.

    The receives of a channel have the order of its sends. In reverse order, each is posted as late
    as its own consumer allows, and no later than the one that follows it.
    """
    consumer = [
        {op: i for i, entry in enumerate(program) for op in ops_of(entry)}
        for program in schedule.ranks
    ]
    receives: list[list[list[Op]]] = [[[] for _ in program] for program in schedule.ranks]
    latest: dict[tuple[int, int, Kind], int] = {}
    for program in sends:
        for send in (send for group in reversed(program) for send in reversed(group)):
            receive = send.counterpart()
            rank = schedule.rank_of(receive.stage)
            channel = schedule.channel(send)
            kind = Kind.F if receive.kind is Kind.RECV_F else Kind.B
            at = consumer[rank].get(Op(receive.stage, kind, receive.microbatch))
            if at is None:
                raise ScheduleError(
                    "schedule",
                    schedule.name,
                    f"{send} has no {receive.stage}{kind}{receive.microbatch} to receive it",
                    "Run every micro-batch on every stage",
                )
            at = min(_ahead(schedule.ranks[rank], at), latest.get(channel, at))
            latest[channel] = at
            receives[rank][at].insert(0, receive)
    return receives


def _ahead(program: Sequence[Entry], consumer: int) -> int:
    """Return the entry before which to post a receive: the forward or backward next before its
    consumer.

    An R or W alone may be too short to hide a transfer, or empty where a stage recomputes nothing.
    """
    earlier = range(consumer - 1, -1, -1)
    return next(
        (i for i in earlier if any(op.kind in (Kind.F, Kind.B) for op in ops_of(program[i]))), 0
    )
