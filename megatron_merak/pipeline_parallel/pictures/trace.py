"""Timelines as trace files: Chrome's JSON format, which ui.perfetto.dev opens as it is, and which
reads back.

The file of one or several timelines is an object. ``traceEvents`` holds a process per pipeline rank
with its compute, its messages, arrows between them and counters of what it holds; times are
microseconds. ``otherData`` says what trace events cannot: ``format`` 1 and, in ``views``, one
object per timeline with its ``title``, ``clock`` ("modelled" or "measured"), ``detail``,
``schedule`` (as text), ``capacity`` in bytes, ``timed`` and ``step`` (see ``View``) and
``process``, the number of the process of its rank 0.
"""

from collections.abc import Mapping, Sequence

from megatron_merak.errors import MerakError, ScheduleError
from megatron_merak.pipeline_parallel.check import peak_in_flight
from megatron_merak.pipeline_parallel.ops import COMPUTE, Kind, Op, Schedule
from megatron_merak.pipeline_parallel.pictures.palette import NAMES
from megatron_merak.pipeline_parallel.pictures.view import Curve, View, in_flight
from megatron_merak.pipeline_parallel.simulate import Event, Timeline, Transfer

FORMAT = 1
_MICRO = 1e6
_BYTES = "bytes held"
_HELD = "micro-batches in flight"
# Threads of a process: compute (with one more for each further op of a group), then messages of
# each kind.
_THREADS = {Kind.SEND_F: 100, Kind.SEND_B: 200}


def to_trace(views: Sequence[View]) -> dict:
    """Return a JSON-safe trace; the inverse of ``from_trace`` up to the rounding of times."""
    events: list[dict] = []
    descriptions: list[dict] = []
    process = 0
    for view in views:
        prefix = f"{view.name}, " if len(views) > 1 else ""
        events += (
            _names(view, process, prefix)
            + _spans(view.timeline, process)
            + _messages(view.timeline, process)
        )
        events += _arrows(view.timeline, process) + _counters(view, process)
        words = {
            "title": view.title,
            "clock": view.clock,
            "detail": view.detail,
            "capacity": view.capacity,
        }
        words |= {"timed": view.timed, "step": view.step}
        descriptions.append({**words, "process": process, "schedule": str(view.timeline.schedule)})
        process += view.ranks
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"producer": "megatron_merak", "format": FORMAT, "views": descriptions},
    }


def from_trace(trace: Mapping) -> tuple[View, ...]:
    """Return the views of a trace that ``to_trace`` made. Raises ScheduleError for any other."""
    try:
        other = trace["otherData"]
        if other["format"] != FORMAT:
            raise ValueError(f"its format is {other['format']}, {FORMAT} is known")
        return tuple(_view(words, trace["traceEvents"]) for words in other["views"])
    except MerakError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        found = f"it has no {error.args[0]}" if isinstance(error, KeyError) else str(error)
        reason = f"it does not describe a pipeline's timeline ({found})"
        remedy = (
            "Give a file that --timeline FILE.json of a run or --perfetto of "
            "tools/simulate.py wrote"
        )
        raise ScheduleError("trace", "JSON", reason, remedy) from error


def _view(words: Mapping, rows: Sequence[Mapping]) -> View:
    schedule = Schedule.parse(words["schedule"])
    first = words["process"]
    ranks = range(first, first + len(schedule.ranks))
    events: list[Event] = []
    transfers: list[Transfer] = []
    memory: list[list[tuple[float, int]]] = [[] for _ in ranks]
    for row in rows:
        if row["pid"] not in ranks:
            continue
        if row["ph"] == "C" and row["name"] == _BYTES:
            memory[row["pid"] - first].append((row["ts"] / _MICRO, row["args"]["held"]))
        if row["ph"] != "X":
            continue
        values = row["args"]
        op = Op(values["stage"], Kind(values["kind"]), values["microbatch"])
        start = row["ts"] / _MICRO
        end = start + row["dur"] / _MICRO
        if op.kind in COMPUTE:
            events.append(
                Event(
                    row["pid"] - first, op, start, end, part=values["part"], parts=values["parts"]
                )
            )
        else:
            transfers.append(Transfer(op, *schedule.channel(op)[:2], start, end))
    curves: tuple[Curve, ...] = tuple(map(tuple, memory)) if any(memory) else ()
    return View(
        timeline_of(schedule, events, transfers),
        title=words["title"],
        clock=words["clock"],
        detail=words["detail"],
        memory=curves,
        capacity=words["capacity"],
        timed=words["timed"],
        step=words.get("step", 0.0),
    )


def timeline_of(
    schedule: Schedule, events: Sequence[Event], transfers: Sequence[Transfer]
) -> Timeline:
    """Return the timeline of these events, in seconds; a group of ops counts once as busy time."""
    busy = [0.0] * len(schedule.ranks)
    for event in events:
        if event.part == 0:
            busy[event.rank] += event.end - event.start
    makespan = max((event.end for event in events), default=0.0)
    return Timeline(
        schedule,
        tuple(events),
        tuple(transfers),
        makespan,
        busy=tuple(busy),
        peak_in_flight=peak_in_flight(schedule),
    )


def messages_between(schedule: Schedule, events: Sequence[Event]) -> tuple[Transfer, ...]:
    """Return messages of events whose messages were not timed.

    Each lasts from the end of its producer to the start of its consumer, the longest that it can
    have been in flight.
    """
    placed = {event.op: event for event in events}
    transfers = []
    for op, event in placed.items():
        step, kind = {Kind.F: (1, Kind.SEND_F), Kind.B: (-1, Kind.SEND_B)}.get(
            op.kind, (0, op.kind)
        )
        reader = (
            placed.get(Op(op.stage + step, op.kind, op.microbatch))
            if step and op.stage + step >= 0
            else None
        )
        if reader is not None and reader.rank != event.rank:
            sent = Op(op.stage, kind, op.microbatch)
            transfers.append(Transfer(sent, event.rank, reader.rank, event.end, end=reader.start))
    return tuple(transfers)


def _names(view: View, process: int, prefix: str) -> list[dict]:
    rows = []
    for rank in range(view.ranks):
        rows.append(
            _metadata(
                process + rank, "process_name", name=f"{prefix}pipeline rank {rank} ({view.clock})"
            )
        )
        rows.append(_metadata(process + rank, "process_sort_index", sort_index=process + rank))
    threads = {
        (event.rank, event.part): "compute, run together" if event.part else "compute"
        for event in view.timeline.events
    }
    for (rank, thread), name in sorted(threads.items()):
        rows.append(_metadata(process + rank, "thread_name", thread, name=name))
    return rows


def _metadata(process: int, what: str, thread: int = 0, **args) -> dict:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _spans(timeline: Timeline, process: int) -> list[dict]:
    return [
        _span(
            event.op,
            process + event.rank,
            event.part,
            event.start,
            event.end,
            part=event.part,
            parts=event.parts,
        )
        for event in timeline.events
    ]


def _span(op: Op, process: int, thread: int, start: float, end: float, **more) -> dict:
    times = {"ts": start * _MICRO, "dur": (end - start) * _MICRO}
    args = {"stage": op.stage, "kind": op.kind.value, "microbatch": op.microbatch, **more}
    return {
        "ph": "X",
        "name": str(op),
        "cat": NAMES[op.kind],
        "pid": process,
        "tid": thread,
        **times,
        "args": args,
    }


def _messages(timeline: Timeline, process: int) -> list[dict]:
    """Return spans on as many threads as messages of a kind are in flight at once: spans of a
    thread must not cross.
    """
    free: dict[tuple[int, Kind], list[float]] = {}
    rows: list[dict] = []
    for message in timeline.transfers:
        rank = message.source
        kind = message.op.kind
        lanes = free.setdefault((rank, kind), [])
        lane = next((lane for lane, end in enumerate(lanes) if end <= message.start), len(lanes))
        if lane == len(lanes):
            lanes.append(0.0)
            name = NAMES[kind] + f" ({lane + 1})" * (lane > 0)
            rows.append(_metadata(process + rank, "thread_name", _THREADS[kind] + lane, name=name))
        lanes[lane] = message.end
        rows.append(
            _span(message.op, process + rank, _THREADS[kind] + lane, message.start, message.end)
        )
    return rows


def _arrows(timeline: Timeline, process: int) -> list[dict]:
    """Return arrows from the producer of a message to its consumer; Perfetto draws from the end of
    the former.
    """
    placed = {event.op: event for event in timeline.events}
    rows = []
    for number, message in enumerate(timeline.transfers):
        receive = message.op.counterpart()
        kind = Kind.F if message.op.kind is Kind.SEND_F else Kind.B
        ends = [placed.get(Op(op.stage, kind, op.microbatch)) for op in (message.op, receive)]
        for phase, event in zip(("s", "f"), ends, strict=True):
            if event is not None and None not in ends:
                place = {"pid": process + event.rank, "tid": event.part, "ts": event.start * _MICRO}
                name = {
                    "ph": phase,
                    "id": process * 10**6 + number,
                    "name": NAMES[message.op.kind],
                    "cat": "message",
                }
                rows.append({**name, **place} | ({"bp": "e"} if phase == "f" else {}))
    return rows


def _counters(view: View, process: int) -> list[dict]:
    rows = []
    for name, curves in ((_HELD, in_flight(view.timeline)), (_BYTES, view.memory)):
        for rank, curve in enumerate(curves):
            for time, value in curve:
                place = {"ph": "C", "name": name, "pid": process + rank, "tid": 0}
                rows.append({**place, "ts": time * _MICRO, "args": {"held": value}})
    return rows
