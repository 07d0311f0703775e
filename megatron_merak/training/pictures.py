"""Pictures of a run: the loss curve, and the measured pipeline timeline of a step."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..parallel.agree import gather_json
from ..parallel.mesh import Mesh
from ..pipeline_parallel.ops import Op, Schedule, ops_of
from ..pipeline_parallel.pictures.trace import messages_between, timeline_of
from ..pipeline_parallel.pictures.view import View
from ..pipeline_parallel.simulate import Event

Trace = Sequence[tuple[str, float, float]]


def step_view(schedule: Schedule, trace: Trace, mesh: Mesh) -> View:
    """Return the traces of the first replica's pipeline ranks (tensor rank 0) as one timeline.
    Collective over all ranks.

    trace: (op, start, end) in seconds of ``mesh.clock``, in the order of the schedule.

    Ranks on hosts with different clocks cannot be compared. Messages are not timed: each is drawn
    from the end of its producer to the start of its consumer.
    """
    traces = gather_json(list(trace), mesh.control, "cpu")
    rows = [traces[mesh.grid.rank(pp=pp)] for pp in range(mesh.grid.pp)]
    origin = min(start for row in rows for _, start, _ in row)
    events: list[Event] = []
    for rank, row in enumerate(rows):
        groups = [
            ops for entry in schedule.ranks[rank] if (ops := ops_of(entry))[0].kind.is_compute
        ]
        places = [(part, len(ops)) for ops in groups for part in range(len(ops))]
        for (op, start, end), (part, parts) in zip(row, places, strict=True):
            events.append(
                Event(rank, Op.parse(op), start - origin, end - origin, part=part, parts=parts)
            )
    words = f"{schedule.name}, one step"
    timeline = timeline_of(schedule, events, messages_between(schedule, events))
    return View(
        timeline,
        words,
        "modelled" if mesh.clock.label else "measured",
        mesh.clock.label,
        timed=False,
    )


def draw_curve(
    records: Iterable[Mapping], path: str | Path, levels: Mapping[str, float] | None = None
) -> None:
    """Write a PNG of training and validation loss (nats per token) over iterations.

    records: rows of ``Report.note``.
    levels:  labelled horizontal lines.

    Needs matplotlib, and no display.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(records)
    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    styles: tuple[tuple[str, dict[str, Any]], ...] = (
        ("train", {"lw": 1.2, "color": "#2B6CB0"}),
        ("valid", {"marker": "o", "ms": 5, "color": "#C05621"}),
    )
    for kind, style in styles:
        # A run that was killed and resumed did some iterations twice: the last time counts.
        points = {
            row["iteration"]: row["loss"] for row in rows if row["kind"] == kind and "loss" in row
        }
        if points:
            axes.plot(
                *zip(*sorted(points.items()), strict=True),
                label={"train": "training", "valid": "validation"}[kind],
                **style,
            )
    for name, value in (levels or {}).items():
        axes.axhline(value, ls="--", lw=1, color="#718096")
        axes.annotate(
            f"{name} {value:.2f}",
            (1, value),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            color="#4A5568",
        )
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path)
