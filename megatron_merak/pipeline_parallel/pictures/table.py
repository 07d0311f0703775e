"""The figures of timelines as rows of text: one row per timeline, or per rank. The first row is the
header.
"""

from collections.abc import Callable, Sequence

from megatron_merak.pipeline_parallel.pictures.palette import time_text
from megatron_merak.pipeline_parallel.pictures.view import View

Rows = list[tuple[str, ...]]


def summary_rows(views: Sequence[View]) -> Rows:
    """Return a row per timeline, with times relative to the first; steps and bytes if
    known of any.
    """
    first = views[0].timeline.makespan

    def against_first(view: View) -> str:
        return f"{view.timeline.makespan / first:.3f}x" if first else "-"

    def of_ranks(view: View) -> str:
        bubbles = view.timeline.bubbles
        return f"{min(bubbles):.1%} to {max(bubbles):.1%}"

    columns: list[tuple[str, Callable[[View], str]]] = [
        ("schedule", lambda view: view.name),
        ("times", lambda view: view.clock),
        ("makespan", lambda view: time_text(view.timeline.makespan)),
    ]
    if len(views) > 1:
        columns.append(("against the first", against_first))
    if any(view.step for view in views):
        columns.append(("step", lambda view: time_text(view.step) if view.step else "-"))
    columns += [
        ("bubble", lambda view: f"{view.timeline.bubble:.1%}"),
        ("of the ranks", of_ranks),
        ("in flight", lambda view: str(max(view.peak_in_flight()))),
    ]
    if any(view.memory for view in views):
        columns.append(
            ("peak bytes", lambda view: bytes_text(max(view.peak_bytes())) if view.memory else "-")
        )
    rows: Rows = [tuple(name for name, _ in columns)]
    rows += [tuple(cell(view) for _, cell in columns) for view in views]
    return rows


def rank_rows(view: View) -> Rows:
    """Return a row per pipeline rank."""
    timeline = view.timeline
    peak = view.peak_in_flight()
    known = bool(view.memory)
    rows: Rows = [("rank", "stages", "busy", "idle", "bubble", "in flight")]
    if known:
        rows[0] += ("peak bytes",)
    for rank, busy in enumerate(timeline.busy):
        stages = ",".join(map(str, view.stages_of(rank)))
        times = (
            time_text(busy),
            time_text(timeline.makespan - busy),
            f"{timeline.bubbles[rank]:.1%}",
        )
        size = (bytes_text(view.peak_bytes()[rank]),) if known else ()
        rows.append((str(rank), stages, *times, str(peak[rank]), *size))
    return rows


def bytes_text(count: int) -> str:
    """Return a size in a readable unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def aligned(rows: Rows) -> str:
    """Return the rows as aligned lines of text, the first column to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)
