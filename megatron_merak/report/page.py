"""The page of a run: one HTML file that needs no network and no other file.

Charts and tables do not need JavaScript; the script shows values under the pointer.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files

from megatron_merak.plan import batch, layout, prediction, stage_rows
from megatron_merak.planner.picture import view
from megatron_merak.report import pipeline
from megatron_merak.report.chart import data, drawn
from megatron_merak.report.facts import Facts
from megatron_merak.report.figures import charts, notes, span, tiles

Rows = Sequence[Sequence[str]]


def page(facts: Facts) -> str:
    """Return the page of a run."""
    first, last = span(facts.history)
    shown = charts(facts)
    restarts = [start.iteration for start in facts.history.starts[1:]]
    values = {"first": first, "last": last, "charts": [data(chart) for chart in shown]}
    fills = {
        "TITLE": escape(facts.name),
        "STYLE": f"{_asset('report.css')}\n{pipeline.styles()}",
        "ABOUT": escape(about(facts)),
        "TILES": "".join(
            f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(more)}</dd></div>'
            for name, value, more in tiles(facts)
        ),
        "NOTES": _notes(notes(facts)),
        "CHARTS": "\n".join(drawn(chart, first, last, restarts) for chart in shown)
        or '<p class="none">There are no values of iterations yet.</p>',
        "PIPELINE": _pipeline(facts),
        "TABLES": _tables(facts),
        "DATA": json.dumps(values, separators=(",", ":")).replace("<", "\\u003c"),
        "SCRIPT": _asset("report.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fills[match[1]], _asset("report.html"))


def about(facts: Facts) -> str:
    """Return a run in one line."""
    start = facts.start
    plan = facts.plan
    parts = [layout(plan) if plan is not None else "", str(start.get("device_name") or "")]
    if plan is not None:
        parts.append(batch(plan))
    parts.append(
        f"started {str(facts.starts[0].get('time', ''))[:16].replace('T', ' ')} UTC"
        if facts.starts
        else ""
    )
    return " · ".join(part for part in parts if part)


def _notes(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in lines)
    return f'<ul class="notes">{items}</ul>' if items else ""


def _pipeline(facts: Facts) -> str:
    predicted = None if facts.plan is None else view(facts.plan)
    if facts.measured is None and predicted is None:
        return ""
    parts = ["<h2>Pipeline</h2>"]
    if facts.measured is not None:
        parts.append(pipeline.step(facts.measured, facts.measured.clock))
    if predicted is not None:
        parts.append(pipeline.step(predicted, "predicted"))
    same = predicted is None or facts.measured is None or predicted.ranks == facts.measured.ranks
    parts.append(_table(pipeline.rank_rows(predicted, facts.measured if same else None)))
    if facts.plan is not None:
        parts.append(pipeline.memory(facts.plan))
    return "\n".join(parts)


def _tables(facts: Facts) -> str:
    parts = []
    if facts.plan is not None:
        rows = stage_rows(facts.plan)
        note = prediction(facts.plan)
        parts.append(f"<h2>Plan</h2>{_table(rows, left=(2,))}<p>{escape(note)}</p>")
    settings = facts.start.get("settings")
    if isinstance(settings, Mapping) and settings:
        changed = [
            (name, *map(str, pair)) for name, pair in settings.items() if isinstance(pair, list)
        ]
        rows = [("setting", "value", "default"), *changed]
        parts.append(f"<h2>Settings that differ from defaults</h2>{_table(rows, left=(1, 2))}")
    if facts.arguments:
        rows = [
            ("argument", "value"),
            *((name, str(value)) for name, value in sorted(facts.arguments.items())),
        ]
        parts.append(_folded("Arguments of the trainer", _table(rows, left=(1,))))
    if len(facts.starts) > 1:
        rows = [
            ("start", "time", "iteration", "ranks", "layout", "repeated iterations"),
            *_starts(facts),
        ]
        parts.append(f"<h2>Starts</h2>{_table(rows, left=(1, 4))}")
    versions = facts.start.get("versions")
    if isinstance(versions, Mapping) and versions:
        rows = [
            ("library", "version"),
            *((name, str(version)) for name, version in versions.items()),
        ]
        parts.append(f"<h2>Libraries</h2>{_table(rows, left=(1,))}")
    if facts.start.get("command"):
        parts.append(f"<h2>Command</h2><pre>{escape(str(facts.start['command']))}</pre>")
    return "\n".join(f"<section>{part}</section>" for part in parts)


def _starts(facts: Facts) -> Iterable[tuple[str, ...]]:
    trained = {start.number: start for start in facts.history.starts}
    for number, start in enumerate(facts.starts):
        trained_from = trained.get(number)
        iteration, repeated = (
            ("-", "-")
            if trained_from is None
            else (f"{trained_from.iteration:,}", f"{trained_from.repeated:,}")
        )
        time = str(start.get("time", ""))[:19].replace("T", " ")
        yield (
            str(number + 1),
            time,
            iteration,
            str(start.get("ranks", "-")),
            str(start.get("layout", "-")),
            repeated,
        )


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _table(rows: Rows, left: Sequence[int] = ()) -> str:
    """Return a table; the first row is the header, the first column names the row; columns ``left``
    are text.
    """
    kinds = [' class="text"' if column in left else "" for column in range(len(rows[0]))]
    head = "".join(
        f'<th scope="col"{kind}>{escape(cell)}</th>'
        for cell, kind in zip(rows[0], kinds, strict=True)
    )
    body = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(
            f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row[1:], kinds[1:], strict=True)
        )
        + "</tr>"
        for row in rows[1:]
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")
