"""The vocabulary of pipeline schedules: an ``Op``, and a ``Schedule`` that lists the ops of every
rank in order.

A schedule is plain data. Builders write it, passes rewrite it, and the checker, the simulator and
the runtime iterate the same object. It reads and writes itself as text, one rank per line::

    1f1b stages=2 microbatches=2
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1

``0F3`` is the forward of micro-batch 3 on stage 0, and ``0F4|0B3`` are two ops that run together.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from megatron_merak.errors import ScheduleError


class Kind(StrEnum):
    """What an op does. Compute: ``F`` forward, ``B`` backward, ``W`` weight gradient, ``R``
    recompute.

    ``B`` yields the input gradient, and the weight gradient too unless a ``W`` of the same
    micro-batch follows. A stage that keeps no activations recomputes inside ``B`` unless an ``R``
    of the same micro-batch came before. ``*_F`` moves an activation from stage s to s+1, ``*_B`` a
    gradient from stage s+1 to s.
    """

    F = "F"
    B = "B"
    W = "W"
    R = "R"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    __hash__ = str.__hash__  # Enum's own is written in Python, and ops are hashed millions of times

    @property
    def is_compute(self) -> bool:
        return self in COMPUTE


COMPUTE = frozenset({Kind.F, Kind.B, Kind.W, Kind.R})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})

_COUNTERPART = {
    Kind.SEND_F: (Kind.RECV_F, +1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, +1),
}
_NUMBER = "([0-9]{1,9})"
_OP = re.compile(f"{_NUMBER}(SEND_F|RECV_F|SEND_B|RECV_B|F|B|W|R){_NUMBER}")
_PLACEMENT = "([0-9]{1,9}(?:,[0-9]{1,9})*)"
UNORDERED = "sums=unordered"  # in the first line of a text
_SIZE = f"stages={_NUMBER} microbatches={_NUMBER}"
_UPDATES = f"updates={_NUMBER}:{_PLACEMENT}"
_HEADER = re.compile(rf"(\S+) {_SIZE}(?: placement={_PLACEMENT})?( {UNORDERED})?(?: {_UPDATES})?")
_RANK = re.compile(f"rank {_NUMBER}:(.*)")


@dataclass(frozen=True, slots=True)
class Op:
    """One step of one stage for one micro-batch: a compute step, or one end of a transfer."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Op":
        """Return the op of a text such as ``0RECV_F3``. Raises ScheduleError."""
        match = _OP.fullmatch(text)
        if match is None:
            reason = "it is not a stage, a kind and a micro-batch"
            raise ScheduleError("schedule op", repr(text), reason, "Write ops like 0F3 or 1RECV_F0")
        return cls(int(match[1]), Kind(match[2]), int(match[3]))

    def counterpart(self) -> "Op":
        """Return the other end of a transfer: ``0SEND_F3`` <-> ``1RECV_F3``, ``1SEND_B3`` <->
        ``0RECV_B3``.
        """
        kind, step = _COUNTERPART[self.kind]
        return Op(self.stage + step, kind, self.microbatch)


Entry = Op | tuple[Op, ...]


def ops_of(entry: Entry) -> tuple[Op, ...]:
    """Return the ops of one entry of a rank's program."""
    return (entry,) if isinstance(entry, Op) else entry


def entry_text(entry: Entry) -> str:
    return "|".join(map(str, ops_of(entry)))


def parse_entry(text: str) -> Entry:
    ops = tuple(Op.parse(part) for part in text.split("|"))
    return ops[0] if len(ops) == 1 else ops


@dataclass(frozen=True)
class Updates:
    """Updates of the weights inside a schedule, which no flush of the pipeline precedes.

    every:  micro-batches whose gradients one update adds up.
    delays: by stage, how many updates the weights of a micro-batch are older than those that its
            own gradient is applied to, once so many were done.
    """

    every: int
    delays: tuple[int, ...]

    def version(self, op: Op) -> int:
        """Return how many updates the weights have seen that an op computes with."""
        return max(0, op.microbatch // self.every - self.delays[op.stage])

    def staleness(self, op: Op) -> int:
        """Return how many updates later the gradient of an op's micro-batch is applied to."""
        return op.microbatch // self.every - self.version(op)

    def __str__(self) -> str:
        return f"updates={self.every}:{','.join(map(str, self.delays))}"


@dataclass(frozen=True)
class Schedule:
    """Who computes (and sends, and receives) what, in which order.

    ``ranks[r]`` is the program of pipeline rank r: a tuple of entries, each an Op or a tuple of two
    or more Ops that run together. Stage s lives on rank ``placement[s]``; without a placement on
    ``s % len(ranks)``, so there may be several (virtual) stages per rank.

    With ``ordered_sums`` every stage adds gradients in the order of the micro-batches, so that all
    such schedules give equal bits. Without, backwards and weight gradients have any order, and
    gradients differ by rounding.

    Without ``updates`` weights are updated once, after all ops. With them each stage also updates
    its own after the last backward of every ``updates.every`` micro-batches but the last ones.
    """

    name: str
    stages: int
    microbatches: int
    ranks: tuple[tuple[Entry, ...], ...]
    placement: tuple[int, ...] = ()
    ordered_sums: bool = True
    updates: Updates | None = None

    def __post_init__(self):
        if not re.fullmatch(r"\S+", self.name):
            raise ScheduleError(
                "schedule name", repr(self.name), "it is empty or has blanks", "Use one word"
            )
        if not 1 <= len(self.ranks) <= self.stages:
            reason = f"it has {len(self.ranks)} ranks for {self.stages} stages"
            raise ScheduleError("schedule", self.name, reason, "Give every rank at least one stage")
        if self.placement and (
            len(self.placement) != self.stages or {*self.placement} != {*range(len(self.ranks))}
        ):
            reason = (
                f"its {self.stages} stages on {len(self.ranks)} ranks have the placement "
                f"{self.placement}"
            )
            raise ScheduleError(
                "schedule",
                self.name,
                reason,
                "Name the rank of each stage, every rank at least once",
            )
        for entry in self.entries():
            if not isinstance(entry, Op) and len(entry) < 2:
                reason = f"the group ({entry_text(entry)}) has fewer than two ops"
                raise ScheduleError("schedule", self.name, reason, "Write a bare op")

    def rank_of(self, stage: int) -> int:
        return self.placement[stage] if self.placement else stage % len(self.ranks)

    @property
    def homes(self) -> tuple[int, ...]:
        """The rank that has each stage."""
        return tuple(map(self.rank_of, range(self.stages)))

    def entries(self) -> Iterator[Entry]:
        """Yield every entry, rank after rank."""
        for program in self.ranks:
            yield from program

    def channel(self, op: Op) -> tuple[int, int, Kind]:
        """Return the channel of a transfer: (source rank, destination rank, SEND_F or SEND_B).

        Messages of one channel are matched by order alone, so both ends must post them in the same
        order.
        """
        send = op if op.kind in SENDS else op.counterpart()
        return self.rank_of(send.stage), self.rank_of(send.counterpart().stage), send.kind

    @cached_property
    def has_communication(self) -> bool:
        return any(not op.kind.is_compute for entry in self.entries() for op in ops_of(entry))

    def __str__(self) -> str:
        placement = f" placement={','.join(map(str, self.placement))}" if self.placement else ""
        sums = "" if self.ordered_sums else f" {UNORDERED}"
        updates = "" if self.updates is None else f" {self.updates}"
        lines = [
            f"{self.name} stages={self.stages} microbatches={self.microbatches}{placement}{sums}"
            f"{updates}"
        ]
        lines += [
            f"rank {r}: " + " ".join(map(entry_text, program))
            for r, program in enumerate(self.ranks)
        ]
        return "\n".join(lines)

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Return the schedule of a text; blank lines are skipped. Raises ScheduleError."""
        lines = [(at, line.strip()) for at, line in enumerate(text.splitlines(), 1) if line.strip()]
        header = _HEADER.fullmatch(lines[0][1]) if lines else None
        if header is None:
            reason = "its first line does not name it"
            remedy = "Start with a line like '1f1b stages=4 microbatches=8'"
            raise ScheduleError(
                "schedule text", repr(lines[0][1][:40] if lines else ""), reason, remedy
            )
        programs = []
        for rank, (at, line) in enumerate(lines[1:]):
            match = _RANK.fullmatch(line)
            if match is None or int(match[1]) != rank:
                reason = f"the program of rank {rank} belongs here"
                remedy = f"Start the line with 'rank {rank}:'"
                raise ScheduleError(f"line {at} of a schedule", repr(line[:40]), reason, remedy)
            try:
                programs.append(tuple(map(parse_entry, match[2].split())))
            except ScheduleError as error:
                raise ScheduleError(
                    f"{error.what} in line {at}", error.value, error.reason, error.remedy
                ) from None
        placement = _numbers(header[4]) if header[4] else ()
        updates = Updates(int(header[6]), _numbers(header[7])) if header[6] else None
        return cls(
            header[1],
            int(header[2]),
            int(header[3]),
            tuple(programs),
            placement=placement,
            ordered_sums=not header[5],
            updates=updates,
        )

    def to_dict(self) -> dict:
        """JSON-safe; inverse of ``from_dict``."""
        values: dict = {
            "name": self.name,
            "stages": self.stages,
            "microbatches": self.microbatches,
            "ranks": [[entry_text(entry) for entry in program] for program in self.ranks],
            "placement": list(self.placement),
        }
        if not self.ordered_sums:
            values["ordered_sums"] = False
        if self.updates is not None:
            values["updates"] = {"every": self.updates.every, "delays": [*self.updates.delays]}
        return values

    @classmethod
    def from_dict(cls, values: Mapping) -> "Schedule":
        for name in ("stages", "microbatches"):
            if type(values[name]) is not int:
                raise TypeError(f"{name} is {values[name]!r:.40}")
        programs = tuple(tuple(map(parse_entry, program)) for program in values["ranks"])
        placement = tuple(values.get("placement", ()))
        ordered = values.get("ordered_sums", True)
        if type(ordered) is not bool:
            raise TypeError(f"ordered_sums is {ordered!r:.40}")
        return cls(
            values["name"],
            values["stages"],
            values["microbatches"],
            programs,
            placement=placement,
            ordered_sums=ordered,
            updates=_updates(values.get("updates")),
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _updates(values: Mapping | None) -> Updates | None:
    if values is None:
        return None
    numbers = (values["every"], *values["delays"])
    if any(type(number) is not int or number < 0 for number in numbers):
        raise TypeError(f"updates are {values!r:.40}")
    return Updates(values["every"], tuple(values["delays"]))
