"""The simulator: how long a schedule takes, where its ranks wait, and how many micro-batches are in
flight.
"""

from collections import deque
from dataclasses import astuple, dataclass
from functools import reduce
from itertools import chain
from operator import add

from megatron_merak import _native
from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.check import check, peak_in_flight
from megatron_merak.pipeline_parallel.doubles import are_doubles
from megatron_merak.pipeline_parallel.ops import SENDS, Kind, Op, Schedule, ops_of
from megatron_merak.pipeline_parallel.order import execution_order, needs
from megatron_merak.pipeline_parallel.passes import add_communication
from megatron_merak.pipeline_parallel.timeline import (
    KINDS,
    CompiledTimeline,
    Event,
    Timeline,
    Transfer,
)


@dataclass(frozen=True)
class StageCosts:
    """Seconds of one micro-batch, one value per stage; transfers have one value per boundary (stage
    b to b+1).

    forward:   of F.
    backward:  of the full backward, B and W.
    weight:    the part of it that a separate W takes over.
    recompute: of R; added to a B that had none (0: the stage stores its activations).
    transfer:  for which a message occupies the wire.
    latency:   after which it arrives.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    recompute: tuple[float, ...]
    transfer: tuple[float, ...]
    latency: tuple[float, ...]

    def __post_init__(self):
        stages = len(self.forward)
        for name, values in vars(self).items():
            expected = stages - 1 if name in ("transfer", "latency") else stages
            if len(values) != expected or any(not value >= 0 for value in values):
                reason = f"{stages} stages need {expected} values, none negative"
                raise ScheduleError(f"{name} times", values, reason, "Correct the list")
        for stage, (weight, backward) in enumerate(zip(self.weight, self.backward, strict=True)):
            if weight > backward:
                reason = (
                    f"on stage {stage} it exceeds the backward ({backward}), of which it is a part"
                )
                raise ScheduleError("weight time", weight, reason, "Lower it")

    @classmethod
    def uniform(
        cls,
        stages: int,
        forward: float = 1.0,
        backward: float = 2.0,
        weight: float = 0.0,
        recompute: float = 0.0,
        transfer: float = 0.0,
        latency: float = 0.0,
    ) -> "StageCosts":
        """The same costs on every stage and boundary."""
        compute = [(value,) * stages for value in (forward, backward, weight, recompute)]
        return cls(*compute, *[(value,) * (stages - 1) for value in (transfer, latency)])


def simulate(schedule: Schedule, costs: StageCosts, overlap: float = 0.0) -> Timeline:
    """Run the schedule on a clock: a rank starts an entry when it is free and all messages that it
    consumes have arrived.

    overlap: ops that run together take the sum of their times minus ``overlap`` (0..1) times all
             but the longest.

    ``add_communication`` is applied if there is none. A transfer starts when it is sent, its
    receive is posted, and those from the same rank to the same rank that were ready before it are
    done; it takes no time of its ranks. Raises ScheduleError as ``check`` does.
    """
    if len(costs.forward) != schedule.stages:
        reason = f"it has {schedule.stages} stages, the costs {len(costs.forward)}"
        raise ScheduleError("schedule", schedule.name, reason, "Give one cost per stage")
    return _compiled(schedule, costs, overlap) or _walked(schedule, costs, overlap)


def _compiled(schedule: Schedule, costs: StageCosts, overlap: float) -> Timeline | None:
    """Simulate by ``csrc/py/simulate.cpp``; None if that is absent or has no result: `_walked` then
    has one or raises.
    """
    host = _native.host()
    if (
        host is None
        or not 0 <= overlap <= 1
        or not are_doubles(chain.from_iterable(astuple(costs)))
    ):
        return None
    home = list(map(schedule.rank_of, range(schedule.stages)))
    compiled = host.simulate(
        tuple(schedule.ranks), KINDS, schedule.microbatches, home, astuple(costs), overlap
    )
    return None if compiled is None else CompiledTimeline(compiled, schedule)


def _walked(schedule: Schedule, costs: StageCosts, overlap: float) -> Timeline:
    """Simulate in Python: the reference implementation."""
    check(schedule)
    if not schedule.has_communication:
        schedule = add_communication(schedule)
    durations = _Durations(schedule, costs)
    wires: dict[tuple[int, int], _Wire] = {}
    over: dict[Op, float] = {}
    clock = [0.0] * len(schedule.ranks)
    busy = [0.0] * len(schedule.ranks)
    events: list[Event] = []
    for rank, entry in execution_order(schedule):
        if isinstance(entry, Op) and not entry.kind.is_compute:
            ends = schedule.channel(entry)[:2]
            wires.setdefault(ends, _Wire(*ends, costs)).post(entry, clock[rank])
            over[entry] = clock[rank]
            continue
        ops = ops_of(entry)
        awaited = [need for op in ops for need in needs(schedule, op)]
        over.update(
            (need, wires[schedule.channel(need)[:2]].arrival(need))
            for need in awaited
            if need.kind in SENDS
        )
        start = max([clock[rank], *(over[need] for need in awaited)])
        times = [durations.of(op) for op in ops]
        total = reduce(add, times)
        duration = total - overlap * (total - max(times))
        clock[rank] = start + duration
        busy[rank] += duration
        for part, op in enumerate(ops):
            over[op] = clock[rank]
            events.append(Event(rank, op, start, clock[rank], part=part, parts=len(ops)))
    transfers = tuple(message for wire in wires.values() for message in wire.delivered.values())
    return Timeline(
        schedule,
        tuple(events),
        transfers,
        max(clock),
        busy=tuple(busy),
        peak_in_flight=peak_in_flight(schedule),
    )


class _Durations:
    """The time of a compute op, given which micro-batches have separate W and R ops."""

    def __init__(self, schedule: Schedule, costs: StageCosts):
        self.costs = costs
        ops = [op for entry in schedule.entries() for op in ops_of(entry)]
        self.separate = {op for op in ops if op.kind in (Kind.W, Kind.R)}

    def of(self, op: Op) -> float:
        stage = op.stage
        match op.kind:
            case Kind.F:
                return self.costs.forward[stage]
            case Kind.W:
                return self.costs.weight[stage]
            case Kind.R:
                return self.costs.recompute[stage]
        weight = (
            self.costs.weight[stage] if Op(stage, Kind.W, op.microbatch) in self.separate else 0.0
        )
        recompute = (
            0.0
            if Op(stage, Kind.R, op.microbatch) in self.separate
            else self.costs.recompute[stage]
        )
        return self.costs.backward[stage] - weight + recompute


class _Wire:
    """The messages from one rank to another, of all stages and both kinds: one at a time, in the
    order in which they become ready, i.e. are sent and have their receive posted.
    """

    def __init__(self, source: int, destination: int, costs: StageCosts):
        self.source = source
        self.destination = destination
        self.costs = costs
        self.sent: deque[tuple[Op, float]] = deque()
        self.posted: dict[Op, float] = {}
        self.read: dict[Op, float] = {}
        self.free = 0.0
        self.delivered: dict[Op, Transfer] = {}

    def post(self, op: Op, time: float) -> None:
        if op.kind in SENDS:
            self.sent.append((op, time))
        else:
            self.posted[op.counterpart()] = time

    def arrival(self, send: Op) -> float:
        """Return when the message of a send, whose receive is posted, has arrived.

        Its receiver waits in the order of posting, and knows this and all earlier sends, as in a
        run.
        """
        if send not in self.delivered:
            while send not in self.read:
                op, time = self.sent.popleft()
                self.read[op] = time
            ready = {
                op: max(time, self.posted[op])
                for op, time in self.read.items()
                if op in self.posted
            }
            for op in sorted(ready, key=ready.__getitem__):
                self._deliver(op, ready[op])
                if op == send:
                    break
        return self.delivered[send].end

    def _deliver(self, send: Op, ready: float) -> None:
        del self.read[send]
        boundary = send.stage if send.kind is Kind.SEND_F else send.stage - 1
        start = max(ready, self.free)
        self.free = start + self.costs.transfer[boundary]
        end = self.free + self.costs.latency[boundary]
        self.delivered[send] = Transfer(send, self.source, self.destination, start, end=end)
