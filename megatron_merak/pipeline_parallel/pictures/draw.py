"""Pictures of timelines: lines of text, or a PNG of one or several below each other over one time
axis.
"""

from collections.abc import Sequence
from pathlib import Path

from megatron_merak.pipeline_parallel.pictures.palette import FACES, NAMES, SHADES, ink, time_unit
from megatron_merak.pipeline_parallel.pictures.view import View
from megatron_merak.pipeline_parallel.simulate import Event, Timeline

# Inches: of a row, and around the rows of a view.
_ROW = 0.46
_LEFT = 0.85
_RIGHT = 1.55
_ABOVE = 0.78
_BELOW = 0.12
_LAST = 0.5


def draw_text(timeline: Timeline, unit: float = 1.0) -> str:
    """Return one line per rank, three columns per `unit` seconds: an op is its kind, micro-batch
    and dashes; a dot is idle.

    Exact if all times are multiples of the unit, else rounded to columns. Ops that run together
    overprint each other.
    """
    columns = round(timeline.makespan / unit)
    lines = []
    for rank in range(len(timeline.busy)):
        cells = list(".  " * columns)
        for event in timeline.events:
            if event.rank == rank:
                start = 3 * round(event.start / unit)
                end = 3 * round(event.end / unit)
                label = f"{event.op.kind}{event.op.microbatch}"
                cells[start:end] = label.ljust(end - start - 1, "-")[: end - start - 1].ljust(
                    end - start
                )
        lines.append(f"rank {rank} | " + "".join(cells).rstrip())
    return "\n".join(lines)


def draw(views: Sequence[View], path: str | Path) -> None:
    """Write a PNG: a row per pipeline rank, ops coloured by kind with their micro-batch, the bubble
    in the margin.

    Several views share the time axis. Needs matplotlib, and no display.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    longest = max(view.timeline.makespan for view in views)
    scale, unit = time_unit(longest)
    span = longest / scale or 1.0
    columns = max(_columns(view.timeline) for view in views)
    width = min(24.0, max(10.0, 0.42 * columns + _LEFT + _RIGHT))
    height = 0.3 + _LAST + sum(_ABOVE + _BELOW + _ROW * view.ranks for view in views)
    figure = Figure(figsize=(width, height), dpi=150)
    FigureCanvasAgg(figure)
    top = 0.3
    for place, view in enumerate(views):
        top += _ABOVE
        tall = _ROW * view.ranks
        box = (
            _LEFT / width,
            1 - (top + tall) / height,
            (width - _LEFT - _RIGHT) / width,
            tall / height,
        )
        axes = figure.add_axes(box)
        _title(figure, view, (_LEFT / width, 1 - (top - 0.28) / height))
        _rows(axes, view, span)
        _idle(axes, view.timeline, scale)
        _boxes(axes, view, scale, points=72 * (width - _LEFT - _RIGHT) / span)
        _margin(axes, view, span)
        if place == len(views) - 1:
            axes.set_xlabel(f"time ({unit}), {_clocks(views)}", fontsize=9, color="#3A3F47")
        else:
            axes.tick_params(labelbottom=False)
        top += tall + _BELOW
    _legend(figure, views, (1 - 0.12 / width, 1 - 0.14 / height))
    figure.savefig(path, format="png", facecolor="white")


def _clocks(views: Sequence[View]) -> str:
    return " and ".join(sorted({view.clock for view in views}))


def _columns(timeline: Timeline) -> float:
    """Return the makespan in units of the median op."""
    times = sorted(event.end - event.start for event in timeline.events)
    median = times[len(times) // 2]
    return timeline.makespan / median if median else 0.0


def _title(figure, view: View, corner: tuple[float, float]) -> None:
    timeline = view.timeline
    scale, unit = time_unit(timeline.makespan)
    words = figure.text(
        *corner, view.name, fontsize=13, fontweight="bold", color="#22262C", va="bottom"
    )
    figures = f"   {view.size},  {view.clock} makespan {timeline.makespan / scale:.4g} {unit},  "
    figures += f"bubble {timeline.bubble:.1%}"
    style = {"fontsize": 10, "color": "#3A3F47", "va": "bottom", "annotation_clip": False}
    figure.axes[-1].annotate(figures, (1, 0), xycoords=words, **style)


def _rows(axes, view: View, span: float) -> None:
    axes.set(xlim=(0, span), ylim=(view.ranks - 0.4, -0.6), yticks=range(view.ranks))
    axes.set_yticklabels([f"rank {rank}" for rank in range(view.ranks)])
    axes.tick_params(length=0, labelsize=9, colors="#3A3F47")
    axes.set_facecolor("#FFFFFF")
    axes.spines[:].set_visible(False)


def _idle(axes, timeline: Timeline, scale: float) -> None:
    """Hatch the rows up to the end of the step: what no op covers is bubble."""
    for rank in range(len(timeline.busy)):
        lane = {
            "facecolor": "#F5EBE3",
            "edgecolor": "#D3B69F",
            "hatch": "////",
            "linewidth": 0,
            "zorder": 1,
        }
        axes.broken_barh([(0, timeline.makespan / scale)], (rank - 0.39, 0.78), **lane)


def _boxes(axes, view: View, scale: float, points: float) -> None:
    """Draw the ops. points: the width of one unit of the time axis, in typographic points."""
    from matplotlib.collections import PolyCollection

    shades = {
        stage: place % SHADES
        for rank in range(view.ranks)
        for place, stage in enumerate(view.stages_of(rank))
    }
    digits = len(str(view.timeline.schedule.microbatches - 1))
    corners = []
    faces = []
    borders = []
    for event in view.timeline.events:
        start = event.start / scale
        end = event.end / scale
        height = 0.78 / event.parts
        low = event.rank - 0.39 + event.part * height
        face = FACES[event.op.kind][shades[event.op.stage]]
        corners.append([(start, low), (end, low), (end, low + height), (start, low + height)])
        faces.append(face)
        borders.append(min(0.8, 0.12 * (end - start) * points))
        _label(
            axes,
            event,
            ((start + end) / 2, low + height / 2),
            (end - start) * points,
            digits=digits,
            colour=ink(face),
        )
    boxes = PolyCollection(
        corners, facecolors=faces, edgecolors="white", linewidths=borders, zorder=2
    )
    axes.add_collection(boxes, autolim=False)


def _label(
    axes, event: Event, middle: tuple[float, float], points: float, digits: int, colour: str
) -> None:
    """Return the kind and the micro-batch, or the latter alone if that is all there is room for."""
    number = str(event.op.microbatch)
    most = 9.0 if event.parts == 1 else 6.5
    for text, least in ((event.op.kind.value + number, 6.5), (number, 4.5)):
        size = min(most, points * 0.86 / (0.62 * (len(text) - len(number) + digits)))
        if size >= least:
            style = {"ha": "center", "va": "center_baseline", "color": colour, "clip_on": True}
            axes.text(*middle, text, fontsize=size, zorder=3, **style)
            return


def _margin(axes, view: View, span: float) -> None:
    columns: Sequence[tuple[float, str]] = ((0.62, "bubble"), (1.32, "in flight"))
    inch = span / (axes.get_position().width * axes.figure.get_size_inches()[0])
    peak = view.peak_in_flight()
    for offset, header in columns:
        axes.text(
            span + offset * inch,
            -0.62,
            header,
            ha="right",
            va="bottom",
            fontsize=8,
            color="#7A808A",
        )
    for rank in range(view.ranks):
        for (offset, _), text in zip(
            columns, (f"{view.timeline.bubbles[rank]:.1%}", str(peak[rank])), strict=True
        ):
            axes.text(
                span + offset * inch,
                rank,
                text,
                ha="right",
                va="center",
                fontsize=9,
                color="#3A3F47",
            )


def _legend(figure, views: Sequence[View], corner: tuple[float, float]) -> None:
    from matplotlib.patches import Patch

    present = {event.op.kind for view in views for event in view.timeline.events}
    patches = [Patch(color=FACES[kind][0], label=NAMES[kind]) for kind in FACES if kind in present]
    patches.append(
        Patch(facecolor="#F5EBE3", edgecolor="#D3B69F", hatch="////", linewidth=0, label="bubble")
    )
    figure.legend(
        handles=patches,
        loc="upper right",
        bbox_to_anchor=corner,
        ncols=len(patches),
        frameon=False,
        fontsize=9,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.4,
        borderpad=0,
    )
