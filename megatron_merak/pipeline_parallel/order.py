"""The dependencies between ops, defined in one place, and the traversal that respects them."""

from collections import deque
from collections.abc import Iterator

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.ops import Entry, Kind, Op, Schedule, ops_of

_PRODUCER = {Kind.R: Kind.F, Kind.W: Kind.B, Kind.SEND_F: Kind.F, Kind.SEND_B: Kind.B}


def needs(schedule: Schedule, op: Op) -> tuple[Op, ...]:
    """Return the ops that must be done before `op` starts.

    Sends are buffered and receives only posted, so neither waits for its peer: the op that consumes
    a message needs its receive posted and its send done. Without communication ops, or between two
    stages of one rank, the consumer needs the producer directly.
    """
    stage = op.stage
    microbatch = op.microbatch
    match op.kind:
        case Kind.F if stage > 0:
            if _exchanges(schedule, stage, stage - 1):
                return Op(stage, Kind.RECV_F, microbatch), Op(stage - 1, Kind.SEND_F, microbatch)
            return (Op(stage - 1, Kind.F, microbatch),)
        case Kind.B if stage < schedule.stages - 1:
            forward = Op(stage, Kind.F, microbatch)
            if _exchanges(schedule, stage, stage + 1):
                return (
                    forward,
                    Op(stage, Kind.RECV_B, microbatch),
                    Op(stage + 1, Kind.SEND_B, microbatch),
                )
            return forward, Op(stage + 1, Kind.B, microbatch)
        case Kind.B:
            return (Op(stage, Kind.F, microbatch),)
        case Kind.F | Kind.RECV_F | Kind.RECV_B:
            return ()
        case kind:
            return (Op(stage, _PRODUCER[kind], microbatch),)


def _exchanges(schedule: Schedule, stage: int, neighbour: int) -> bool:
    return schedule.has_communication and schedule.rank_of(stage) != schedule.rank_of(neighbour)


def crosses_ranks(schedule: Schedule, transfer: Op) -> bool:
    """Whether the two ends of a send or receive are different ranks."""
    source, destination, _ = schedule.channel(transfer)
    return source != destination


def execution_order(schedule: Schedule) -> Iterator[tuple[int, Entry]]:
    """Yield every (rank, entry) once, after everything that the entry needs.

    Raises ScheduleError on a deadlock; the message names the ranks that wait for each other.
    """
    done: set[Op] = set()
    waiting: dict[Op, list[int]] = {}
    position = [0] * len(schedule.ranks)
    ready = deque(range(len(schedule.ranks)))
    while ready:
        rank = ready.popleft()
        program = schedule.ranks[rank]
        while position[rank] < len(program):
            entry = program[position[rank]]
            missing = _missing(schedule, entry, done)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            position[rank] += 1
            yield rank, entry
            for op in ops_of(entry):
                done.add(op)
                ready.extend(waiting.pop(op, ()))
    if waiting:
        raise _deadlock(
            schedule, position, {rank: op for op, ranks in waiting.items() for rank in ranks}
        )


def _missing(schedule: Schedule, entry: Entry, done: set[Op]) -> Op | None:
    return next(
        (need for op in ops_of(entry) for need in needs(schedule, op) if need not in done), None
    )


def _deadlock(schedule: Schedule, position: list[int], blocker: dict[int, Op]) -> ScheduleError:
    """Follow who waits for whom from the first blocked rank until a rank repeats, or waits for an
    op that never runs.
    """
    chain: list[int] = []
    rank = min(blocker)
    while rank in blocker and rank not in chain:
        chain.append(rank)
        rank = schedule.rank_of(blocker[rank].stage)
    if rank in chain:
        chain = chain[chain.index(rank) :]
    waits = []
    for waiter in chain:
        need = blocker[waiter]
        entry = schedule.ranks[waiter][position[waiter]]
        at = next(op for op in ops_of(entry) if need in needs(schedule, op))
        fate = f"of rank {schedule.rank_of(need.stage)}" if rank in chain else "that never runs"
        waits.append(
            f"rank {waiter} stops at {at} (entry {position[waiter]}) and waits for {need} {fate}"
        )
    return ScheduleError(
        "schedule",
        schedule.name,
        "deadlock: " + "; ".join(waits),
        "Move what is waited for before what waits for it",
    )
