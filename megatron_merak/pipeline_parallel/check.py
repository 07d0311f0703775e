"""The schedule checker: a schedule that it accepts runs to its end on every rank, and computes
every gradient once.
"""

from collections import Counter
from collections.abc import Sequence

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.ops import (
    COMPUTE,
    RECEIVES,
    SENDS,
    UNORDERED,
    Kind,
    Op,
    Schedule,
    entry_text,
    ops_of,
)
from megatron_merak.pipeline_parallel.order import crosses_ranks, execution_order
from megatron_merak.pipeline_parallel.unflushed import check_updates

# (earlier, later) of one stage and micro-batch: if both exist, they are in this order, in different
# entries.
_IN_ORDER = (
    (Kind.RECV_F, Kind.F),
    (Kind.F, Kind.SEND_F),
    (Kind.F, Kind.R),
    (Kind.F, Kind.B),
    (Kind.R, Kind.B),
    (Kind.RECV_B, Kind.B),
    (Kind.B, Kind.SEND_B),
    (Kind.B, Kind.W),
)


def check(schedule: Schedule, in_flight: Sequence[int] | None = None) -> None:
    """Raises ScheduleError unless the schedule, of compute ops with or without communication, can
    run and is complete.

    It holds that: every op is on the rank of its stage; every stage has F and B of every
    micro-batch once, and R and W at most once; F < R < B < W; every stage runs its Bs in
    micro-batch order, and its Ws, so that all schedules sum gradients alike, unless `ordered_sums`
    of the schedule is false; where there is communication, every boundary between ranks has its
    send and receive, after the producer and before the consumer, in the same order at both ends;
    the ranks never wait in a circle (sends buffered, receives posted); and every op finds the
    version of the weights that `updates` says. `in_flight[s]`, if given, bounds the micro-batches stage s may hold.
    """
    _check_placement(schedule)
    _check_complete(schedule)
    _check_order(schedule)
    if schedule.ordered_sums:
        _check_sums(schedule)
    check_updates(schedule)
    if schedule.has_communication:
        _check_pairs(schedule)
        _check_channels(schedule)
    for _ in execution_order(schedule):
        pass
    _check_in_flight(schedule, in_flight)


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return the most micro-batches in flight on each stage: from the start of F to the end of B,
    or of its W if any.

    Of ops that run together, the forward counts first.
    """
    has_weight = {(op.stage, op.microbatch) for op in _all_ops(schedule) if op.kind is Kind.W}
    in_flight = [0] * schedule.stages
    peak = [0] * schedule.stages
    for entry in schedule.entries():
        for op in sorted(ops_of(entry), key=lambda op: op.kind is not Kind.F):
            if op.kind is Kind.F:
                in_flight[op.stage] += 1
                peak[op.stage] = max(peak[op.stage], in_flight[op.stage])
            elif op.kind is Kind.W or (
                op.kind is Kind.B and (op.stage, op.microbatch) not in has_weight
            ):
                in_flight[op.stage] -= 1
    return tuple(peak)


def _all_ops(schedule: Schedule) -> list[Op]:
    return [op for entry in schedule.entries() for op in ops_of(entry)]


def _wrong(schedule: Schedule, reason: str, remedy: str) -> ScheduleError:
    return ScheduleError("schedule", schedule.name, reason, remedy)


def _check_placement(schedule: Schedule) -> None:
    for rank, program in enumerate(schedule.ranks):
        for index, entry in enumerate(program):
            for op in ops_of(entry):
                if op.stage >= schedule.stages or op.microbatch >= schedule.microbatches:
                    reason = (
                        f"{op} (rank {rank}, entry {index}) is outside of {schedule.stages} "
                        "stages x "
                    )
                    raise _wrong(
                        schedule, f"{reason}{schedule.microbatches} micro-batches", "Remove it"
                    )
                if schedule.rank_of(op.stage) != rank:
                    reason = (
                        f"{op} is on rank {rank} (entry {index}), but stage {op.stage} "
                        "lives on rank "
                    )
                    raise _wrong(schedule, f"{reason}{schedule.rank_of(op.stage)}", "Move it there")
            if len(ops_of(entry)) > 1 and any(op.kind not in COMPUTE for op in ops_of(entry)):
                reason = f"{entry_text(entry)} (rank {rank}, entry {index}) groups communication"
                raise _wrong(
                    schedule, reason, "Group compute ops only, communication overlaps by itself"
                )


def _check_complete(schedule: Schedule) -> None:
    counts = Counter(_all_ops(schedule))
    for op, count in counts.items():
        if count > 1:
            raise _wrong(
                schedule,
                f"rank {schedule.rank_of(op.stage)} runs {op} {count} times",
                "Run it once",
            )
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            for op in (Op(stage, Kind.F, microbatch), Op(stage, Kind.B, microbatch)):
                if op not in counts:
                    reason = f"rank {schedule.rank_of(stage)} never runs {op}"
                    raise _wrong(
                        schedule, reason, "Run F and B of every micro-batch on every stage"
                    )


def _check_order(schedule: Schedule) -> None:
    for rank, program in enumerate(schedule.ranks):
        index = {op: i for i, entry in enumerate(program) for op in ops_of(entry)}
        for later_op, later in index.items():
            for first_kind, second_kind in _IN_ORDER:
                if second_kind is not later_op.kind:
                    continue
                first_op = Op(later_op.stage, first_kind, later_op.microbatch)
                if index.get(first_op, -1) >= later:
                    reason = (
                        f"rank {rank} runs {later_op} (entry {later}) no later than "
                        f"{first_op} ({index[first_op]})"
                    )
                    raise _wrong(schedule, reason, f"Run {first_kind} before {second_kind}")


def _check_sums(schedule: Schedule) -> None:
    """Check that gradients are added in micro-batch order, so that all schedules compute equal
    bits.
    """
    separate = {(op.stage, op.microbatch) for op in _all_ops(schedule) if op.kind is Kind.W}
    latest: dict[tuple[int, str], Op] = {}
    for op in _all_ops(schedule):
        adds = op.kind is Kind.W or (
            op.kind is Kind.B and (op.stage, op.microbatch) not in separate
        )
        for applies, what in ((op.kind is Kind.B, "backwards"), (adds, "weight gradients")):
            before = latest.get((op.stage, what), op)
            if applies and before.microbatch > op.microbatch:
                reason = (
                    f"rank {schedule.rank_of(op.stage)} runs {op} after {before}: its "
                    f"{what} are out of order"
                )
                remedy = (
                    "Run them in the order of the micro-batches, as gradients are summed, "
                    f"or declare {UNORDERED}"
                )
                raise _wrong(schedule, reason, remedy)
            if applies:
                latest[op.stage, what] = op


def _check_pairs(schedule: Schedule) -> None:
    """Check that boundaries between ranks, and only these, have a send and a receive of every
    micro-batch.
    """
    expected = set()
    for boundary in range(schedule.stages - 1):
        for microbatch in range(schedule.microbatches):
            for send in (
                Op(boundary, Kind.SEND_F, microbatch),
                Op(boundary + 1, Kind.SEND_B, microbatch),
            ):
                if crosses_ranks(schedule, send):
                    expected |= {send, send.counterpart()}
    present = {op for op in _all_ops(schedule) if op.kind not in COMPUTE}
    for op in _sorted(expected - present):
        other = op.counterpart()
        rank = schedule.rank_of(op.stage)
        reason = (
            f"rank {rank} lacks {op}, the other end of {other} of rank "
            f"{schedule.rank_of(other.stage)}"
        )
        raise _wrong(schedule, reason, "Add it, or let add_communication place all transfers")
    for op in _sorted(present - expected):
        reason = (
            f"rank {schedule.rank_of(op.stage)} has {op}, which crosses no boundary between ranks"
        )
        raise _wrong(schedule, reason, "Remove it")


def _sorted(ops: set[Op]) -> list[Op]:
    return sorted(ops, key=lambda op: (op.microbatch, op.stage, op.kind))


def _check_channels(schedule: Schedule) -> None:
    """Check that both ends of a channel have the same order: its k-th send matches its k-th
    receive.
    """
    sends: dict[tuple[int, int, Kind], list[Op]] = {}
    receives: dict[tuple[int, int, Kind], list[Op]] = {}
    for op in _all_ops(schedule):
        if op.kind in SENDS:
            sends.setdefault(schedule.channel(op), []).append(op)
        elif op.kind in RECEIVES:
            receives.setdefault(schedule.channel(op), []).append(op)
    for (source, destination, kind), sent in sends.items():
        for number, (send, receive) in enumerate(
            zip(sent, receives[source, destination, kind], strict=True)
        ):
            if send.counterpart() != receive:
                reason = (
                    f"rank {destination} expects {receive.counterpart()} as message "
                    f"{number} of {kind} from rank "
                )
                remedy = (
                    "Post sends and receives of a channel in the same order, they are "
                    "matched by order"
                )
                raise _wrong(schedule, f"{reason}{source}, which sends {send}", remedy)


def _check_in_flight(schedule: Schedule, limits: Sequence[int] | None) -> None:
    if limits is None:
        return
    if len(limits) != schedule.stages:
        raise _wrong(
            schedule,
            f"{len(limits)} in-flight bounds for {schedule.stages} stages",
            "Give one per stage",
        )
    for stage, (peak, limit) in enumerate(zip(peak_in_flight(schedule), limits, strict=True)):
        if peak > limit:
            reason = f"stage {stage} holds {peak} micro-batches at once, {limit} are allowed"
            raise _wrong(schedule, reason, "Run backwards earlier, or allow more memory")
