"""Pictures of a simulated schedule: lines of text, or a PNG."""

from collections.abc import Sequence
from pathlib import Path

from megatron_merak.pipeline_parallel.ops import Kind
from megatron_merak.pipeline_parallel.simulate import Event, Timeline

# Face colours of the even and the odd stages of a rank, so that virtual stages can be told apart.
_COLOURS = {
    Kind.F: ("#4C86C6", "#8DB8E8"),
    Kind.B: ("#E8953A", "#F6C177"),
    Kind.R: ("#9A7FC1", "#C3AEE0"),
    Kind.W: ("#4FA37C", "#93CFB1"),
}
_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.R: "recompute", Kind.W: "weight gradient"}
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def draw_text(timeline: Timeline, unit: float = 1.0) -> str:
    """One line per rank, three columns per `unit` seconds: an op is its kind, micro-batch and dashes; a dot is idle.

    Exact where all times are multiples of the unit, else rounded to columns. Ops run together overprint each other.
    """
    columns = round(timeline.makespan / unit)
    lines = []
    for rank in range(len(timeline.busy)):
        cells = list(".  " * columns)
        for event in timeline.events:
            if event.rank == rank:
                start, end = 3 * round(event.start / unit), 3 * round(event.end / unit)
                label = f"{event.op.kind}{event.op.microbatch}"
                cells[start:end] = label.ljust(end - start - 1, "-")[: end - start - 1].ljust(end - start)
        lines.append(f"rank {rank} | " + "".join(cells).rstrip())
    return "\n".join(lines)


def draw(timeline: Timeline, path: str | Path, title: str | None = None) -> None:
    """Writes a PNG: a row per pipeline rank, ops coloured by kind with their micro-batch, the bubble in the margin.

    Needs matplotlib, and no display.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ranks = len(timeline.busy)
    scale, unit = next(((s, u) for s, u in _UNITS if timeline.makespan >= s), _UNITS[-1])
    span = timeline.makespan / scale or 1.0
    figure = Figure(figsize=(min(24.0, max(10.0, 0.42 * _columns(timeline) + 2.4)), 1.7 + 0.46 * ranks), dpi=150)
    FigureCanvasAgg(figure)
    left, right, top, bottom = 0.85, 1.55, 0.95, 0.55
    width, height = figure.get_size_inches()
    axes = figure.add_axes(
        (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    )
    axes.set(xlim=(0, span), ylim=(ranks - 0.4, -0.6), yticks=range(ranks), xlabel=f"time ({unit})")
    axes.set_yticklabels([f"rank {rank}" for rank in range(ranks)])
    axes.tick_params(length=0, labelsize=9, colors="#3A3F47")
    axes.set_facecolor("#EEF0F3")
    axes.spines[:].set_visible(False)
    for rank in range(1, ranks):
        axes.axhline(rank - 0.5, color="white", linewidth=2, zorder=1)
    _boxes(axes, timeline, scale, points=72 * (width - left - right) / span)
    _margin(axes, timeline, span)
    schedule = timeline.schedule
    title = title or f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} micro-batches"
    figure.text(left / width, 1 - 0.36 / height, title, fontsize=13, fontweight="bold", color="#22262C")
    summary = f"makespan {span:.4g} {unit},  bubble {timeline.bubble:.1%}"
    figure.text(left / width, 1 - 0.66 / height, summary, fontsize=10, color="#3A3F47")
    _legend(figure, timeline, (1 - 0.12 / width, 1 - 0.18 / height))
    figure.savefig(path, format="png", facecolor="white")


def _columns(timeline: Timeline) -> float:
    """The makespan in units of the median op."""
    times = sorted(event.end - event.start for event in timeline.events)
    median = times[len(times) // 2]
    return timeline.makespan / median if median else 0.0


def _boxes(axes, timeline: Timeline, scale: float, points: float) -> None:
    """`points` is the width in typographic points of one unit of the time axis."""
    ranks, digits = len(timeline.busy), len(str(timeline.schedule.microbatches - 1))
    for event in timeline.events:
        start, duration = event.start / scale, (event.end - event.start) / scale
        height = 0.78 / event.parts
        low = event.rank - 0.39 + event.part * height
        colour = _COLOURS[event.op.kind][event.op.stage // ranks % 2]
        border = min(0.8, 0.12 * duration * points)
        axes.broken_barh(
            [(start, duration)], (low, height), facecolor=colour, edgecolor="white", linewidth=border, zorder=2
        )
        size = min(9.0 if event.parts == 1 else 6.5, duration * points * 0.8 / (0.62 * digits))
        if size >= 4.5:
            middle = (start + duration / 2, low + height / 2)
            style = {"ha": "center", "va": "center_baseline", "color": _ink(event), "clip_on": True}
            axes.text(*middle, str(event.op.microbatch), fontsize=size, zorder=3, **style)


def _ink(event: Event) -> str:
    return "white" if event.op.kind in (Kind.F, Kind.R, Kind.W) else "#3B2405"


def _margin(axes, timeline: Timeline, span: float) -> None:
    ranks = len(timeline.busy)
    columns: Sequence[tuple[float, str]] = ((0.62, "bubble"), (1.32, "in flight"))
    inch = span / (axes.get_position().width * axes.figure.get_size_inches()[0])
    for offset, header in columns:
        axes.text(span + offset * inch, -0.62, header, ha="right", va="bottom", fontsize=8, color="#7A808A")
    for rank in range(ranks):
        held = sum(timeline.peak_in_flight[rank::ranks])
        for (offset, _), text in zip(columns, (f"{timeline.bubbles[rank]:.1%}", str(held)), strict=True):
            axes.text(span + offset * inch, rank, text, ha="right", va="center", fontsize=9, color="#3A3F47")


def _legend(figure, timeline: Timeline, corner: tuple[float, float]) -> None:
    from matplotlib.patches import Patch

    present = {event.op.kind for event in timeline.events}
    patches = [Patch(color=_COLOURS[kind][0], label=_NAMES[kind]) for kind in _COLOURS if kind in present]
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
