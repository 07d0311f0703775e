"""What is in a checkpoint, and what differs between two, as text."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..counting import counted
from ..pipeline_parallel.pictures.table import Rows, aligned, bytes_text

_LONGEST = 60  # characters of a setting's value

Facts = Mapping[str, Any]


def inspected_text(facts: Facts) -> str:
    """Return what is in a checkpoint."""
    parts = [_head(facts), _kinds(facts["kinds"])]
    parts += filter(None, (_increments(facts), _others(facts)))
    if "tensors" in facts:
        parts.append(_tensors(facts["tensors"]))
    if "health" in facts:
        parts += _health(facts["health"])
    return "\n\n".join(parts)


def difference_text(facts: Facts) -> str:
    """Return what differs between two checkpoints."""
    first = facts["first"]
    second = facts["second"]
    rows = [("", "A", "B"), ("path", first["path"], second["path"])]
    ours = _said(first)
    theirs = _said(second)
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        rows.append((name, ours.get(name, "-"), theirs.get(name, "-")))
    parts = [_lines(rows), _settings(facts["settings"], facts["settings_of_one"])]
    parts += [text for kind, each in facts["kinds"].items() for text in _kind(kind, each)]
    return "\n\n".join(parts)


def _said(facts: Facts) -> dict[str, str]:
    """Return what is said of a checkpoint as a whole, by what it is."""
    said = {"iteration": f"{facts['iteration']:,}"}
    program = facts["program"] or "a program that it does not name"
    said["written by"] = f"{program}, {facts['model']}" if facts["model"] else program
    if facts["consumed_samples"] is not None:
        epoch = "" if facts["epoch"] is None else f" of epoch {facts['epoch'] + 1}"
        said["consumed samples"] = f"{facts['consumed_samples']:,}{epoch}"
    if (layout := facts["layout"]) is not None:
        ranks = math.prod(layout[axis] for axis in ("tp", "cp", "pp", "dp"))
        degrees = " x ".join(f"{axis} {layout[axis]}" for axis in ("tp", "cp", "dp", "pp"))
        said["layout"] = f"{counted(ranks, 'rank')} = {degrees}, sharding {layout['sharding']}"
    said["parameters"] = f"{facts['parameters']:,}"
    said["files"] = f"{facts['files']:,}, {bytes_text(facts['bytes'])}"
    return said


def _head(facts: Facts) -> str:
    return "\n".join([facts["path"], _lines([*_said(facts).items()])])


def _kinds(kinds: Facts) -> str:
    rows: Rows = [("kind", "data type", "tensors", "elements", "size")]
    for kind, each in kinds.items():
        dtypes = ", ".join(each["dtypes"]) or "-"
        counts = (f"{each['tensors']:,}", f"{each['elements']:,}")
        rows.append((kind, dtypes, *counts, bytes_text(each["bytes"])))
    return aligned(rows)


def _increments(facts: Facts) -> str:
    """Return the steps between checkpoints; "" if there are none."""
    if not facts["increments"]:
        return ""
    rows: Rows = []
    for each in facts["increments"]:
        steps = f"steps {each['first']:,} to {each['last']:,}"
        rows.append((steps, Path(each["path"]).name, bytes_text(each["bytes"])))
    lines = [f"  {line}" for line in aligned(rows).splitlines()]
    return "\n".join([f"increments in {Path(facts['path']).parent}", *lines])


def _others(facts: Facts) -> str:
    """Return the other checkpoints of the directory; "" if it has none."""
    lines = [f"other checkpoints in {Path(facts['path']).parent}"] if facts["others"] else []
    rows: Rows = [(Path(each["path"]).name, bytes_text(each["bytes"])) for each in facts["others"]]
    lines += [f"  {line}" for line in aligned(rows).splitlines()] if rows else []
    lines += [f"passed over: {fault}" for fault in facts["faults"]]
    return "\n".join(lines)


def _tensors(tensors: Sequence[Facts]) -> str:
    rows: Rows = [("tensor", "shape", "data type", "parts")]
    for each in tensors:
        name = f"{each['kind']}/{each['name']}"
        rows.append((name, _shape(each["shape"]), each["dtype"], f"{each['parts']:,}"))
    return aligned(rows)


def _health(health: Facts) -> Iterator[str]:
    for kind, each in health.items():
        rows: Rows = [(kind, "NaN", "inf", "min", "max", "rms"), ("all", *_values(each))]
        rows += [(tensor["name"], *_values(tensor)) for tensor in each["tensors"]]
        yield aligned(rows)


def _values(values: Facts) -> tuple[str, ...]:
    numbers = tuple(_number(values[name]) for name in ("min", "max", "rms"))
    return (f"{values['nan']:,}", f"{values['inf']:,}", *numbers)


def _settings(settings: Sequence[Facts], of_one: Sequence[str]) -> str:
    parts = []
    if settings:
        rows = [("setting", "A", "B")]
        rows += [(each["name"], _value(each["first"]), _value(each["second"])) for each in settings]
        parts.append(_lines(rows))
    if of_one:
        parts.append(f"Only one of the two runs has settings of {', '.join(of_one)}.")
    return "\n\n".join(parts) or "The settings of the two runs are the same."


def _kind(kind: str, each: Facts) -> Iterator[str]:
    """Return what differs between the tensors of one kind: a summary, then tables."""
    if each["compared"]:
        compared = counted(each["compared"], "tensor")
        change = f"relative change {_number(each['relative_change'])}"
        yield f"{kind}: {each['equal']:,} of {compared} equal bit for bit, {change}"
    for name, where in (("only_first", "A"), ("only_second", "B")):
        if each[name]:
            yield "\n".join([f"{kind} tensors only in {where}", *_indented(each[name])])
    for name, what in (("shapes", "shape"), ("dtypes", "data type")):
        if each[name]:
            rows = [(f"{kind} tensors of another {what}", "A", "B")]
            for tensor in each[name]:
                rows.append((tensor["name"], _kept(tensor["first"]), _kept(tensor["second"])))
            yield _lines(rows)
    if each["most_changed"]:
        table: Rows = [(f"{kind} tensors that changed most", "relative", "largest difference")]
        for tensor in each["most_changed"]:
            change = _number(tensor["relative_change"])
            table.append((tensor["name"], change, _number(tensor["largest_difference"])))
        yield aligned(table)


def _lines(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows as lines whose columns begin one below the other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _indented(names: Sequence[str]) -> list[str]:
    return [f"  {name}" for name in names]


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _kept(value: str | Sequence[int]) -> str:
    return value if isinstance(value, str) else _shape(value)


def _number(value: float) -> str:
    return f"{value:.4g}"


def _value(value: Any) -> str:
    """Return a setting's value; "-" for none."""
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
