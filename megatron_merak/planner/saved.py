"""What micro-batches in flight keep for their backward: bytes on a stage, and how many of them a schedule holds."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_merak import _native
from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule, ops_of
from megatron_merak.plan import StagePlan, Unit

# A moment of a rank: how many micro-batches of which stages are in which state, as ((stage, state), count) pairs. The
# states are the fields of a Footprint.
Moment = tuple[tuple[tuple[int, str], int], ...]


@dataclass(frozen=True)
class Footprint:
    """Bytes that one micro-batch keeps on one stage, by what was done with it.

    ``kept``: between F and B, the inputs of blocks and the tapes of units that are not recomputed. ``taped``: after R,
    all tapes. ``held``: between B and W, what weight gradients are made of. The others are the most during an op:
    ``forward``; ``backward``, one that recomputes unless R came before (then ``late``), and ``_held`` where W follows.
    """

    kept: int
    taped: int
    held: int
    forward: int
    backward: int
    backward_held: int
    late: int
    late_held: int


def footprint(units: Sequence[Unit], stage: StagePlan) -> Footprint:
    """Of one stage of the chain ``units``.

    A forward through units that are recomputed has the tape of one at a time. A backward takes blocks (runs of units
    that are recomputed together, or single units) in reverse: it has the tape of one run at a time, and what belongs to
    a block is freed behind it, but for what W needs. The token ids, the first unit's input, weigh nothing.
    """
    inputs = [units[unit - 1].output_bytes - units[unit - 1].passed_bytes if unit else 0 for unit in stage.units]
    inputs[0] = units[stage.first - 1].output_bytes if stage.first else 0
    kept, forward, blocks = 0, 0, []  # of a block: kept, its tape beyond that, held
    for run in _blocks(stage):
        entering, *inner = inputs[run[0] - stage.first : run[-1] + 1 - stage.first]
        saved, held = [units[each].saved_bytes for each in run], sum(units[each].held_bytes for each in run)
        again, unread = run[0] in stage.recompute, sum(units[each].unread_bytes for each in run)
        if again:
            blocks.append((entering, sum(saved) + sum(inner) - unread, held))
        else:
            blocks.append((entering + sum(saved) - unread, 0, held))
        kept += blocks[-1][0]
        forward = max(forward, kept + (max(map(sum, zip(saved, (0, *inner), strict=True))) if again else 0))
    taped = kept + sum(tape for _, tape, _ in blocks)
    return Footprint(
        kept=kept,
        taped=taped,
        held=sum(held for _, _, held in blocks),
        forward=forward,
        backward=_backward(blocks, early=False, hold=False),
        backward_held=_backward(blocks, early=False, hold=True),
        late=taped,
        late_held=_backward(blocks, early=True, hold=True),
    )


def _blocks(stage: StagePlan) -> list[tuple[int, ...]]:
    """The runs of units that are recomputed together, and the other units, in order."""
    starts = {run[0]: run for run in stage.runs}
    inner = [unit for run in stage.runs for unit in run[1:]]
    return [starts.get(unit, (unit,)) for unit in stage.units if unit not in inner]


def _backward(blocks: Sequence[tuple[int, int, int]], early: bool, hold: bool) -> int:
    """The most bytes of a micro-batch while its backward runs."""
    now = sum(kept + (tape if early else 0) for kept, tape, _ in blocks)
    most = now
    for kept, tape, held in reversed(blocks):
        most = max(most, now if early else now + tape)
        now += (held if hold else 0) - kept - (tape if early else 0)
        most = max(most, now)
    return most


def walk(schedule: Schedule, rank: int) -> Iterator[tuple[tuple[Op, ...], Moment, Moment]]:
    """The compute ops of each entry of a rank, with what the rank holds while they run and after them."""
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
    """What a rank holds while each of its entries runs, without repetitions and moments at which it holds no more of
    anything than at another."""
    host = _native.host()
    found = None if host is None else host.moments(schedule.ranks[rank], tuple(Kind))
    return found if found is not None else _largest(dict.fromkeys(running for _, running, _ in walk(schedule, rank)))


def of_stage(found: Sequence[Moment], stage: int) -> tuple[Moment, ...]:
    """The moments of one stage of a rank, without the rank's other stages."""
    own = [tuple((state, count) for state, count in moment if state[0] == stage) for moment in found]
    return _largest(dict.fromkeys(own))


def _change(op: Op, early: set[tuple[int, int]], split: set[tuple[int, int]]) -> tuple[int, str, str, str]:
    """A stage, and the states of one of its micro-batches before, during and after an op; '' where it has none."""
    recomputed, waits = (op.stage, op.microbatch) in early, (op.stage, op.microbatch) in split
    if op.kind is Kind.F:
        return op.stage, "", "forward", "kept"
    if op.kind is Kind.R:
        return op.stage, "kept", "taped", "taped"
    if op.kind is Kind.W:
        return op.stage, "held", "held", ""
    during = ("late" if recomputed else "backward") + ("_held" if waits else "")
    return op.stage, "taped" if recomputed else "kept", during, "held" if waits else ""


def _largest(found: Iterable[Moment]) -> tuple[Moment, ...]:
    alike: dict[tuple[tuple[int, str], ...], list[Moment]] = {}
    for moment in found:
        alike.setdefault(tuple(state for state, _ in moment), []).append(moment)
    kept = []
    for group in alike.values():
        counts = [tuple(count for _, count in moment) for moment in group]
        for moment, mine in zip(group, counts, strict=True):
            if not any(mine != other and all(a <= b for a, b in zip(mine, other, strict=True)) for other in counts):
                kept.append(moment)
    return tuple(kept)


def peak(found: Sequence[Moment], footprints: Mapping[int, Footprint]) -> dict[int, int]:
    """The bytes that each stage in ``footprints`` keeps when they together keep most."""
    most, shares = -1, dict.fromkeys(footprints, 0)
    for moment in found:
        mine = [
            (stage, count * getattr(footprints[stage], state)) for (stage, state), count in moment if stage in shares
        ]
        total = sum(size for _, size in mine)
        if total > most:
            most, shares = total, dict.fromkeys(footprints, 0)
            for stage, size in mine:
                shares[stage] += size
    return shares
