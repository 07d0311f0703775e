"""What a picture of a pipeline shows: a timeline, the origin of its times, and the memory of every
rank.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_merak.counting import counted
from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.ops import Kind
from megatron_merak.pipeline_parallel.simulate import Event, Timeline

# Steps (seconds, value): the value holds from its time to the next step's.
Curve = tuple[tuple[float, int], ...]
CLOCKS = ("modelled", "measured")


@dataclass(frozen=True)
class View:
    """One timeline of a picture. ``clock``: "modelled" (simulated, or on a logical clock) or
    "measured" (a real run).

    ``memory[rank]``: bytes over time, empty where nobody knows them; ``capacity``: bytes of the
    device, 0 where it has
    no fixed size. ``detail``: one line on where the numbers come from. ``step``: seconds of the
    timeline and of what follows it in a step, 0 where nobody knows. ``timed``: messages have times
    of their own, or else last from the end of the op that makes them to the start of the op that
    reads them. Raises ScheduleError for an unknown clock.
    """

    timeline: Timeline
    title: str = ""
    clock: str = "modelled"
    detail: str = ""
    memory: tuple[Curve, ...] = ()
    capacity: int = 0
    timed: bool = True
    step: float = 0.0

    def __post_init__(self):
        if self.clock not in CLOCKS:
            raise ScheduleError(
                "clock", self.clock, f"known are {', '.join(CLOCKS)}", "Use one of them"
            )
        if len(self.memory) not in (0, self.ranks):
            reason = f"there is one for each of {self.ranks} ranks, or none"
            raise ScheduleError("memory curves", len(self.memory), reason, "Give one per rank")

    @property
    def name(self) -> str:
        return self.title or self.timeline.schedule.name

    @property
    def ranks(self) -> int:
        return len(self.timeline.busy)

    @property
    def size(self) -> str:
        """As in "8 stages on 4 ranks, 16 micro-batches"."""
        schedule = self.timeline.schedule
        stages = counted(schedule.stages, "stage")
        microbatches = counted(schedule.microbatches, "micro-batch")
        return f"{stages} on {counted(self.ranks, 'rank')}, {microbatches}"

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank, ascending."""
        schedule = self.timeline.schedule
        return tuple(stage for stage in range(schedule.stages) if schedule.rank_of(stage) == rank)

    def peak_in_flight(self) -> tuple[int, ...]:
        """Return for each rank the most micro-batches in flight, counted once for each of its
        stages.
        """
        return tuple(peak(curve) for curve in in_flight(self.timeline))

    def peak_bytes(self) -> tuple[int, ...]:
        return tuple(peak(curve) for curve in self.memory)


def peak(curve: Curve) -> int:
    return max((value for _, value in curve), default=0)


def in_flight(timeline: Timeline) -> tuple[Curve, ...]:
    """Return for each rank the micro-batches in flight on its stages: from the start of F to the
    end of B, or W if any.

    Counted in the order of the events of a rank, so that rounded times change nothing.
    """
    split = {
        (event.op.stage, event.op.microbatch)
        for event in timeline.events
        if event.op.kind is Kind.W
    }
    curves: list[list[tuple[float, int]]] = [[(0.0, 0)] for _ in timeline.busy]
    for group in groups(timeline.events):
        first = group[0]
        frees = [e for e in group if e.op.kind is Kind.W]
        frees += [
            e for e in group if e.op.kind is Kind.B and (e.op.stage, e.op.microbatch) not in split
        ]
        _step(curves[first.rank], first.start, sum(event.op.kind is Kind.F for event in group))
        _step(curves[first.rank], first.end, -len(frees))
    return tuple(map(tuple, curves))


def groups(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Return the events in order, with those of ops that run together as one."""
    group: list[Event] = []
    for event in events:
        group.append(event)
        if len(group) == event.parts:
            yield group
            group = []


def _step(curve: list[tuple[float, int]], time: float, change: int) -> None:
    if not change:
        return
    last, value = curve[-1]
    if time <= last:
        curve[-1] = (last, value + change)
    else:
        curve.append((time, value + change))
