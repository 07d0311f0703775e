"""The result of a simulated step: ops and messages with their times."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule

KINDS = tuple(Kind)


@dataclass(frozen=True, slots=True)
class Event:
    """A compute op on a rank, in seconds. Of ops run together, this is number `part` of `parts`,
    with equal times.
    """

    rank: int
    op: Op
    start: float
    end: float
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message between two ranks, named by its send; `end` is when all of it has arrived."""

    op: Op
    source: int
    destination: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step. `busy[rank]` and `makespan` in seconds, `peak_in_flight[stage]` in
    micro-batches.
    """

    schedule: Schedule
    events: tuple[Event, ...]
    transfers: tuple[Transfer, ...]
    makespan: float
    busy: tuple[float, ...]
    peak_in_flight: tuple[int, ...]

    def __eq__(self, other: object) -> bool:
        """Compare values, also with the compiled simulator's class."""
        if not isinstance(other, Timeline):
            return NotImplemented
        return all(
            getattr(self, field.name) == getattr(other, field.name) for field in fields(Timeline)
        )

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The fraction of the makespan in which each rank is idle."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The mean of ``bubbles``."""
        return sum(self.bubbles) / len(self.bubbles)


class CompiledTimeline(Timeline):
    """A timeline of the compiled simulator; its ops, events and messages are created when they are
    first read.

    compiled: a ``Simulated`` of ``csrc/py/simulate.cpp``.
    schedule: the simulated one.
    """

    _found: Any
    _given: Schedule

    def __init__(self, compiled: Any, schedule: Schedule):
        values = {"makespan": compiled.makespan, "busy": tuple(compiled.busy)}
        values["peak_in_flight"] = tuple(compiled.peak_in_flight)
        vars(self).update(values, _found=compiled, _given=schedule)

    def __reduce__(self) -> tuple[type[Timeline], tuple[Any, ...]]:
        return Timeline, tuple(getattr(self, field.name) for field in fields(Timeline))

    @cached_property
    def schedule(self) -> Schedule:
        if self._given.has_communication:
            return self._given
        programs = []
        for entries, placed in zip(self._given.ranks, self._found.programs(), strict=True):
            rest = iter(entries)
            programs.append(tuple(next(rest) if sent is None else _op(*sent) for sent in placed))
        return replace(self._given, ranks=tuple(programs))

    @cached_property
    def events(self) -> tuple[Event, ...]:
        ranks, stages, kinds, microbatches, *times = self._found.events()
        return tuple(map(Event, ranks, map(_op, stages, kinds, microbatches), *times))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        stages, kinds, microbatches, *times = self._found.transfers()
        return tuple(map(Transfer, map(_op, stages, kinds, microbatches), *times))


def _op(stage: int, kind: int, microbatch: int) -> Op:
    return Op(stage, KINDS[kind], microbatch)
