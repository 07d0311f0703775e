"""One HTML page of timelines that needs nothing else: no network, no other file, any current
browser.

The page holds its data as JSON, from which ``views_of`` reads the timelines back. It is drawn by
the files in ``assets``; tables of figures are there without JavaScript as well. The same views give
the same bytes.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.ops import SENDS, Kind, Op, Schedule
from megatron_merak.pipeline_parallel.pictures.palette import FACES, MESSAGES, NAMES, ink
from megatron_merak.pipeline_parallel.pictures.table import rank_rows, summary_rows
from megatron_merak.pipeline_parallel.pictures.trace import timeline_of
from megatron_merak.pipeline_parallel.pictures.view import Curve, View
from megatron_merak.pipeline_parallel.simulate import Event, Transfer

_SCRIPTS = ("model.js", "axis.js", "panel.js", "overview.js", "page.js")
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def page(views: Sequence[View], title: str = "") -> str:
    """Return the page of these views, below each other over one time axis. Raises ScheduleError
    without any.
    """
    if not views:
        raise ScheduleError("page", "views", "there are none", "Give one or more timelines")
    title = title or " · ".join(view.name for view in views)
    fills = {
        "TITLE": escape(title),
        "STYLE": _asset("page.css"),
        "SUMMARY": _table(summary_rows(views), "figures"),
        "RANKS": "\n".join(_ranks(view) for view in views),
        "DATA": json.dumps(encode(views), separators=(",", ":"), ensure_ascii=False).replace(
            "<", "\\u003c"
        ),
        "SCRIPT": "\n".join(_asset(name) for name in _SCRIPTS),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fills[match[1]], _asset("page.html"))


def views_of(html: str) -> tuple[View, ...]:
    """Return the views of a page. Raises ScheduleError for a file that is no such page."""
    match = _DATA.search(html)
    if match is None:
        raise ScheduleError(
            "page", "HTML", "it holds no timelines", "Give a page that tools/simulate.py wrote"
        )
    return decode(json.loads(match[1]))


def encode(views: Sequence[View]) -> dict:
    """Return the data of the page's script: colours, and each view with its events in columns;
    times in seconds.
    """
    return {
        "format": 1,
        "names": {kind.value: name for kind, name in NAMES.items()},
        "faces": {
            kind.value: [[face, ink(face)] for face in faces] for kind, faces in FACES.items()
        },
        "messages": {kind.value: colour for kind, colour in MESSAGES.items()},
        "views": [_encode(view) for view in views],
    }


def decode(data: Mapping) -> tuple[View, ...]:
    """Undo ``encode``."""
    return tuple(_decode(view) for view in data["views"])


def _encode(view: View) -> dict:
    timeline = view.timeline
    return {
        "title": view.title,
        "name": view.name,
        "clock": view.clock,
        "detail": view.detail,
        "size": view.size,
        "schedule": str(timeline.schedule),
        "placement": [
            timeline.schedule.rank_of(stage) for stage in range(timeline.schedule.stages)
        ],
        "makespan": timeline.makespan,
        "busy": timeline.busy,
        "events": _columns(timeline.events)
        | {
            "part": [event.part for event in timeline.events],
            "parts": [event.parts for event in timeline.events],
        },
        "transfers": _columns(timeline.transfers),
        "memory": [
            [[time for time, _ in curve], [value for _, value in curve]] for curve in view.memory
        ],
        "capacity": view.capacity,
        "timed": view.timed,
        "step": view.step,
    }


def _columns(items: Sequence[Event] | Sequence[Transfer]) -> dict:
    """Return a letter per op: that of its kind; of a message F for an activation and B for a
    gradient.
    """
    return {
        "kind": "".join(item.op.kind.value[-1] for item in items),
        "stage": [item.op.stage for item in items],
        "microbatch": [item.op.microbatch for item in items],
        "start": [item.start for item in items],
        "end": [item.end for item in items],
    }


def _decode(data: Mapping) -> View:
    schedule = Schedule.parse(data["schedule"])
    rows = data["events"]
    messages = data["transfers"]
    events = [
        Event(schedule.rank_of(op.stage), op, start, end, part=part, parts=parts)
        for op, start, end, part, parts in zip(
            _ops(rows, {}), rows["start"], rows["end"], rows["part"], rows["parts"], strict=True
        )
    ]
    sends = {kind.value[-1]: kind for kind in SENDS}
    transfers = [
        Transfer(op, *schedule.channel(op)[:2], start, end)
        for op, start, end in zip(
            _ops(messages, sends), messages["start"], messages["end"], strict=True
        )
    ]
    memory: tuple[Curve, ...] = tuple(
        tuple(zip(*columns, strict=True)) for columns in data["memory"]
    )
    timeline = replace(
        timeline_of(schedule, events, transfers),
        makespan=data["makespan"],
        busy=tuple(data["busy"]),
    )
    return View(
        timeline,
        title=data["title"],
        clock=data["clock"],
        detail=data["detail"],
        memory=memory,
        capacity=data["capacity"],
        timed=data["timed"],
        step=data.get("step", 0.0),
    )


def _ops(rows: Mapping, kinds: Mapping[str, Kind]) -> list[Op]:
    columns = zip(rows["stage"], rows["kind"], rows["microbatch"], strict=True)
    return [
        Op(stage, kinds.get(letter) or Kind(letter), microbatch)
        for stage, letter, microbatch in columns
    ]


def _ranks(view: View) -> str:
    head = f"<summary>{escape(view.name)}, rank by rank</summary>"
    return f"<details>{head}{_table(rank_rows(view), 'ranks')}</details>"


def _table(rows: Sequence[Sequence[str]], kind: str) -> str:
    """Return a table; the first row is the header, the first column names the row."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    body = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows[1:]
    )
    return (
        '<div class="wide"><table '
        f'class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")
