"""Activation memory: what a micro-batch keeps on a stage for its backward, and how many are in
flight in a schedule.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_merak import _native
from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule, ops_of
from megatron_merak.plan import StagePlan, Unit

# The micro-batches in flight on a rank at some time, as ((stage, state), count) pairs. The states
# are the fields of a Footprint.
Moment = tuple[tuple[tuple[int, str], int], ...]


@dataclass(frozen=True)
class Footprint:
    """Bytes that one micro-batch keeps on one stage, by its state. ``csrc/py/moments.cpp`` uses the
    same names.

    Between ops:
    kept:          after F: the inputs of recomputed blocks, and the tapes of units that are not
                   recomputed.
    taped:         after R: all tapes.
    held:          after B, where a W follows: the operands of weight gradients.

    The peak during an op:
    forward:       of F.
    backward:      of a B that recomputes, without a W.
    backward_held: of a B that recomputes, before a W.
    late:          of a B after an R, without a W.
    late_held:     of a B after an R, before a W.
    """

    kept: int
    taped: int
    held: int
    forward: int
    backward: int
    backward_held: int
    late: int
    late_held: int


@dataclass(frozen=True)
class _Block:
    """Bytes of units that are recomputed together, or of a single one: kept between ops, beyond
    that on the tape, held for a W, and kept by the host.
    """

    kept: int
    tape: int
    held: int
    away: int = 0


def tape_bytes(units: Sequence[Unit], stage: StagePlan, unit: int) -> int:
    """Return the bytes that a unit keeps which is not recomputed."""
    own = units[unit]
    return _entering(units, stage, unit) + own.saved_bytes - own.unread_bytes


def _entering(units: Sequence[Unit], stage: StagePlan, unit: int) -> int:
    """Return the bytes of a unit's input, without what earlier units of the stage read."""
    if not unit:
        return 0
    before = units[unit - 1]
    return before.output_bytes - (0 if unit == stage.first else before.passed_bytes)


def footprint(units: Sequence[Unit], stage: StagePlan) -> Footprint:
    """Return the footprint of one stage of the chain ``units``.

    A forward through recomputed units has the tape of one unit at a time. A backward runs blocks
    (units that are recomputed together, or single units) in reverse: it has the tape of one
    recomputed block at a time and frees it afterwards, except what a W needs. The tape of an
    offloaded unit is on the device while the unit runs, and in a backward from the time when that of
    the offloaded unit behind it in the model begins; not counted is what is being copied to the
    host. The token ids, the input of the first unit, are not counted either.
    """
    inputs = [_entering(units, stage, unit) for unit in stage.units]
    kept = 0
    forward = 0
    blocks: list[_Block] = []
    for run in _blocks(stage):
        entering, *inner = inputs[run[0] - stage.first : run[-1] + 1 - stage.first]
        saved = [units[each].saved_bytes for each in run]
        held = sum(units[each].held_bytes for each in run)
        recomputed = run[0] in stage.recompute
        unread = sum(units[each].unread_bytes for each in run)
        running = 0
        if recomputed:
            blocks.append(_Block(entering, sum(saved) + sum(inner) - unread, held))
            running = max(map(sum, zip(saved, (0, *inner), strict=True)))
        elif run[0] in stage.offload:
            running = tape_bytes(units, stage, run[0])
            blocks.append(_Block(0, 0, held, away=running))
        else:
            blocks.append(_Block(tape_bytes(units, stage, run[0]), 0, held))
        kept += blocks[-1].kept
        forward = max(forward, kept + running)
    again = any(block.tape for block in blocks)
    backward = _backward(blocks, early=False, defer=False)
    backward_held = _backward(blocks, early=False, defer=True)
    return Footprint(
        kept=kept,
        taped=kept + sum(block.tape for block in blocks),
        held=sum(block.held for block in blocks),
        forward=forward,
        backward=backward,
        backward_held=backward_held,
        # an R of nothing leaves nothing
        late=_backward(blocks, early=True, defer=False) if again else backward,
        late_held=_backward(blocks, early=True, defer=True) if again else backward_held,
    )


def _blocks(stage: StagePlan) -> list[tuple[int, ...]]:
    """Return the runs of units that are recomputed together, and the other units, in order."""
    runs = stage.runs
    starts = {run[0]: run for run in runs}
    inner = {unit for run in runs for unit in run[1:]}
    return [starts.get(unit, (unit,)) for unit in stage.units if unit not in inner]


def _backward(blocks: Sequence[_Block], early: bool, defer: bool) -> int:
    """Return the peak bytes of a micro-batch during its backward.

    early: whether an R ran before.
    defer: whether a W follows.
    """
    now = sum(block.kept + (block.tape if early else 0) for block in blocks)
    most = now
    before = [0]  # per block, the tape of the nearest earlier offloaded one
    for block in blocks:
        before.append(block.away or before[-1])
    for block, coming in zip(reversed(blocks), reversed(before[:-1]), strict=True):
        most = max(most, now + (0 if early else block.tape) + block.away + coming)
        now += (block.held if defer else 0) - block.kept - (block.tape if early else 0)
        most = max(most, now + coming)
    return most


def rank_moments(schedule: Schedule, rank: int) -> Iterator[tuple[tuple[Op, ...], Moment, Moment]]:
    """Yield (compute ops, moment while they run, moment after them) for each entry of a rank's
    schedule.
    """
    ops = [op for entry in schedule.ranks[rank] for op in ops_of(entry) if op.kind.is_compute]
    early = {(op.stage, op.microbatch) for op in ops if op.kind is Kind.R}
    split = {(op.stage, op.microbatch) for op in ops if op.kind is Kind.W}
    now: Counter[tuple[int, str]] = Counter()

    def moment() -> Moment:
        return tuple(sorted((state, count) for state, count in now.items() if count and state[1]))

    for entry in schedule.ranks[rank]:
        changes = [_change(op, early, split) for op in ops_of(entry) if op.kind.is_compute]
        for stage, before, during, _ in changes:
            now[stage, before] -= 1
            now[stage, during] += 1
        running = moment()
        for stage, _, during, after in changes:
            now[stage, during] -= 1
            now[stage, after] += 1
        if changes:
            yield ops_of(entry), running, moment()


def moments(schedule: Schedule, rank: int) -> tuple[Moment, ...]:
    """Return the distinct moments while entries of a rank run, without those at which another one
    has more of all.
    """
    host = _native.host()
    compiled = None if host is None else host.moments(schedule.ranks[rank], tuple(Kind))
    if compiled is not None:
        return compiled
    return _largest(dict.fromkeys(running for _, running, _ in rank_moments(schedule, rank)))


def of_stage(rank: Sequence[Moment], stage: int) -> tuple[Moment, ...]:
    """Return the moments of one stage, given those of its rank."""
    own = [tuple((state, count) for state, count in moment if state[0] == stage) for moment in rank]
    return _largest(dict.fromkeys(own))


def _change(
    op: Op, early: set[tuple[int, int]], split: set[tuple[int, int]]
) -> tuple[int, str, str, str]:
    """Return (stage, state before, during and after an op) of its micro-batch; '' where it is not
    in flight.
    """
    recomputed = (op.stage, op.microbatch) in early
    deferred = (op.stage, op.microbatch) in split
    if op.kind is Kind.F:
        return op.stage, "", "forward", "kept"
    if op.kind is Kind.R:
        return op.stage, "kept", "taped", "taped"
    if op.kind is Kind.W:
        return op.stage, "held", "held", ""
    during = ("late" if recomputed else "backward") + ("_held" if deferred else "")
    return op.stage, "taped" if recomputed else "kept", during, "held" if deferred else ""


def _largest(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    """Drop the moments at which every count is at most that of another moment with the
    same states.
    """
    by_states: dict[tuple[tuple[int, str], ...], list[Moment]] = {}
    for moment in moments:
        by_states.setdefault(tuple(state for state, _ in moment), []).append(moment)
    kept = []
    for group in by_states.values():
        counts = [tuple(count for _, count in moment) for moment in group]
        for moment, own in zip(group, counts, strict=True):
            if not any(
                own != other and all(a <= b for a, b in zip(own, other, strict=True))
                for other in counts
            ):
                kept.append(moment)
    return tuple(kept)


class InFlight:
    """The micro-batches in flight in a schedule.

    moments:   of each rank, see ``moments``.
    of_stages: of each stage.
    splits:    stages whose weight gradients are separate ops (W).
    """

    def __init__(self, schedule: Schedule):
        self.moments = [moments(schedule, rank) for rank in range(len(schedule.ranks))]
        self.of_stages = [
            of_stage(self.moments[schedule.rank_of(stage)], stage)
            for stage in range(schedule.stages)
        ]
        ops = (op for entry in schedule.entries() for op in ops_of(entry))
        self.splits = frozenset(op.stage for op in ops if op.kind is Kind.W)


def most_kept(moments: Sequence[Moment], own: Footprint) -> int:
    """Return the most bytes that a stage keeps. moments: of it alone."""
    most = 0
    for moment in moments:
        most = max(most, sum(count * getattr(own, state) for (_, state), count in moment))
    return most


def peak(moments: Sequence[Moment], footprints: Mapping[int, Footprint]) -> dict[int, int]:
    """Return the bytes that each stage in ``footprints`` keeps when their sum is largest."""
    most = -1
    shares = dict.fromkeys(footprints, 0)
    for moment in moments:
        sizes = [
            (stage, count * getattr(footprints[stage], state))
            for (stage, state), count in moment
            if stage in shares
        ]
        total = sum(size for _, size in sizes)
        if total > most:
            most = total
            shares = dict.fromkeys(footprints, 0)
            for stage, size in sizes:
                shares[stage] += size
    return shares
