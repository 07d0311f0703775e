"""Charts as HTML: lines are SVG that stretches with its box, labels are text that does not.

The page's script reads the same values from JSON, to show them under the pointer.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from megatron_merak.report.axis import Axis, short, whole_ticks

Points = Sequence[tuple[int, float | None]]
SIDE = 1000  # of the square that every SVG is drawn in, before it is stretched
MOST = 5000  # points of a drawn line; of a longer one every pixel's lowest and highest
SMOOTH = 200  # points from which on a running mean is drawn
# how many times the median the highest value is where only a logarithmic scale shows both
_LOG = 60.0


@dataclass(frozen=True)
class Line:
    """One line of a chart: its name, its points by iteration (None: a gap), its colour 1 to 4, and
    whether its points stand alone, as dots."""

    name: str
    points: Points
    colour: int = 1
    dots: bool = False

    def values(self) -> list[float]:
        return [value for _, value in self.points if value is not None]


@dataclass(frozen=True)
class Chart:
    """A chart.

    key:    of its values in the page's JSON.
    unit:   of the values, in words.
    zero:   the axis starts at 0.
    logs:   a logarithmic scale may be used.
    marks:  iterations to mark at the bottom.
    digits: of values under the pointer; 0 for integers.
    """

    key: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    zero: bool = False
    logs: bool = False
    marks: tuple[int, ...] = ()
    digits: int = 4
    wide: bool = field(default=False)

    def axis(self) -> Axis:
        values = [value for line in self.lines for value in line.values()]
        positive = sorted(value for value in values if value > 0)
        log = self.logs and bool(positive) and positive[-1] > _LOG * positive[len(positive) // 2]
        return Axis.around(values, log, self.zero and not log)


def data(chart: Chart) -> dict[str, Any]:
    """Return what the page's script needs of a chart."""
    axis = chart.axis()
    lines = [
        {
            "name": line.name,
            "colour": line.colour,
            "x": [iteration for iteration, _ in line.points],
            "y": [None if value is None else float(f"{value:.7g}") for _, value in line.points],
        }
        for line in chart.lines
    ]
    scale = {"low": axis.low, "high": axis.high, "log": axis.log}
    return {"key": chart.key, "title": chart.title, "digits": chart.digits, "lines": lines, **scale}


def drawn(chart: Chart, first: int, last: int, restarts: Sequence[int] = ()) -> str:
    """Return a chart over the iterations ``first`` to ``last``. restarts: iterations after which
    the run was restarted.
    """
    axis = chart.axis()
    across = _Across(first, last)
    ticks = [
        (1 - axis.place(value), text) for value, text in axis.ticks() if 0 <= axis.place(value) <= 1
    ]
    grid = "".join(f"M0 {SIDE * place:.1f}H{SIDE}" for place, _ in ticks)
    paths = [
        f'<path class="grid" d="{grid}"/>',
        *(path for line in chart.lines for path in _paths(line, axis, across)),
    ]
    if chart.marks:
        marks = "".join(f"M{SIDE * across.place(mark):.2f} {SIDE}v-40" for mark in chart.marks)
        paths.append(f'<path class="skipped" d="{marks}"/>')
    labels = [
        f'<span class="y" style="top:{100 * place:.2f}%">{escape(text)}</span>'
        for place, text in ticks
    ]
    labels += [
        f'<span class="x" style="left:{100 * across.place(tick):.2f}%">{tick:,}</span>'
        for tick in whole_ticks(first, last)
    ]
    labels += [
        f'<i class="restart" style="left:{100 * across.place(at):.2f}%" title="restart behind '
        f'iteration {at:,}"></i>'
        for at in restarts
        if first <= at < last
    ]
    names = "".join(
        f'<span class="c{line.colour}">{escape(line.name)}</span>' for line in chart.lines
    )
    legend = f'<span class="legend">{names}</span>' if len(chart.lines) > 1 else ""
    scale = ", logarithmic" if axis.log else ""
    return (
        f'<figure class="card chart{" wide" if chart.wide else ""}" data-chart="{chart.key}">'
        f"<figcaption><b>{escape(chart.title)}</b> "
        f"<small>{escape(chart.unit)}{scale}</small>{legend}</figcaption>"
        f'<div class="plot" tabindex="0" role="img" aria-label="{escape(spoken(chart))}">'
        f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" '
        f'aria-hidden="true">{"".join(paths)}</svg>'
        f"{''.join(labels)}</div></figure>"
    )


def spoken(chart: Chart) -> str:
    """Describe a chart in words, for screen readers."""
    parts = []
    for line in chart.lines:
        points = [(iteration, value) for iteration, value in line.points if value is not None]
        if points:
            (first, start), (last, end) = points[0], points[-1]
            parts.append(
                f"{line.name} from {short(start)} at iteration {first} to {short(end)} at "
                f"iteration {last}"
            )
    return f"{chart.title}: {'; '.join(parts) or 'no values'}"


@dataclass(frozen=True)
class _Across:
    """The horizontal axis of iterations."""

    first: int
    last: int

    def place(self, iteration: int) -> float:
        return (
            (iteration - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        )


def _paths(line: Line, axis: Axis, across: _Across) -> Iterator[str]:
    count = len(line.points)
    smooth = not line.dots and count >= SMOOTH
    if line.dots:
        places = [
            (SIDE * across.place(at), SIDE * (1 - axis.place(value)))
            for at, value in line.points
            if value is not None
        ]
        between = "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in places) if len(places) > 1 else ""
        dots = "".join(f"M{x:.2f} {y:.2f}h.01" for x, y in places)
        yield f'<path class="between c{line.colour}" d="{between}"/>'
        yield f'<path class="dots c{line.colour}" data-points="{count}" d="{dots}"/>'
        return
    shown = line.points if count <= MOST else _envelope(line.points)
    kind = "raw" if smooth else "line"
    yield (
        f'<path class="{kind} c{line.colour}" data-points="{count}" '
        f'd="{_line(shown, axis, across)}"/>'
    )
    if smooth:
        mean = running_mean(line.points, max(5, count // 50))
        yield (
            f'<path class="line c{line.colour}" '
            f'd="{_line(mean[:: -(-count // MOST)], axis, across)}"/>'
        )


def _line(points: Points, axis: Axis, across: _Across) -> str:
    """Return the path through the points, with a gap where a value is missing."""
    parts = []
    down = False
    for iteration, value in points:
        if value is None:
            down = False
            continue
        x = SIDE * across.place(iteration)
        y = SIDE * (1 - axis.place(value))
        parts.append(f"{'L' if down else 'M'}{x:.2f} {y:.2f}")
        down = True
    if len(parts) == 1:
        parts.append("h.01")  # a single point is a dot
    return "".join(parts)


def _envelope(points: Points) -> Points:
    """Return the lowest and the highest point of each of so many parts, in order: a line through
    them looks the same.
    """
    size = -(-2 * len(points) // MOST)
    envelope: list[tuple[int, float | None]] = []
    for start in range(0, len(points), size):
        part = [(value, at) for at, value in points[start : start + size] if value is not None]
        if not part:
            envelope.append((points[start][0], None))
            continue
        ends = {min(part), max(part)}
        envelope += [(at, value) for value, at in sorted(ends, key=lambda end: end[1])]
    return envelope


def running_mean(points: Points, window: int) -> Points:
    """Return at each point the mean of the last ``window`` known values."""
    means = []
    recent = []
    for iteration, value in points:
        if value is not None:
            recent.append(value)
            del recent[:-window]
        means.append((iteration, math.fsum(recent) / len(recent) if recent else None))
    return means
