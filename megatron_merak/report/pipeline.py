"""The pipeline of a run as HTML: one step as predicted and measured, and the memory of
every rank.
"""

from collections.abc import Sequence
from dataclasses import astuple, fields
from html import escape

from megatron_merak.pipeline_parallel.pictures.palette import FACES, NAMES, ink, time_text
from megatron_merak.pipeline_parallel.pictures.view import View
from megatron_merak.pipeline_parallel.simulate import Event
from megatron_merak.plan import Plan, bytes_text, limits_of
from megatron_merak.planner.memory import StageMemory, rank_memory
from megatron_merak.report.axis import Axis

BOXES = 1600  # ops that are drawn with their micro-batch; of more, only the shapes
# One per field of StageMemory, for any colour vision (Okabe, Ito).
_PARTS = ("#2F7FC1", "#86BBE3", "#12936F", "#E69F00", "#D55E00", "#B5659A")


def styles() -> str:
    """Return the colours of ops and of parts of memory, as CSS."""
    rules = [
        f".op-{kind.value}{shade}{{background:{face};color:{ink(face)};fill:{face}}}"
        for kind, faces in FACES.items()
        for shade, face in enumerate(faces)
    ]
    rules += [f".part-{index}{{background:{face}}}" for index, face in enumerate(_PARTS)]
    return "\n".join(rules)


def step(view: View, word: str) -> str:
    """Return a timeline: a row per pipeline rank, a box per op; empty space is idle time. word: the
    origin of its times.
    """
    timeline = view.timeline
    axis = Axis(0.0, timeline.makespan or 1.0)
    lanes = "".join(
        f'<div class="who">rank {rank}</div><div class="lane">{_boxes(view, rank)}</div>'
        f'<div class="share">{timeline.bubbles[rank]:.1%}</div>'
        for rank in range(view.ranks)
    )
    ticks = "".join(
        '<span class="x" '
        f'style="left:{100 * axis.place(value):.2f}%">{time_text(value) if value else "0"}</span>'
        for value, _ in axis.ticks(6)
    )
    kinds = [kind for kind in FACES if any(event.op.kind is kind for event in timeline.events)]
    names = "".join(f'<span><i class="op-{kind.value}0"></i>{NAMES[kind]}</span>' for kind in kinds)
    head = f"{word}: {time_text(timeline.makespan)}, bubble {timeline.bubble:.1%}"
    return (
        f'<figure class="card step"><figcaption><b>One step, {escape(head)}</b> '
        f"<small>{escape(timeline.schedule.name)}, {escape(view.size)}</small>"
        f'<span class="legend boxes">{names}<span><i '
        'class="idle"></i>idle</span></span></figcaption>'
        f'<div class="lanes"><div class="who"></div><div></div><div class="share">idle</div>{lanes}'
        f'<div class="who"></div><div class="times">{ticks}</div><div></div></div></figure>'
    )


def _boxes(view: View, rank: int) -> str:
    shades = {stage: place % 2 for place, stage in enumerate(view.stages_of(rank))}
    events = [event for event in view.timeline.events if event.rank == rank]
    total = view.timeline.makespan or 1.0
    if len(view.timeline.events) > BOXES:
        return _shapes(events, shades, total)
    boxes = []
    for event in events:
        low = 100 * event.start / total
        wide = 100 * (event.end - event.start) / total
        part = (
            f"top:{100 * event.part / event.parts:.0f}%;height:{100 / event.parts:.0f}%;"
            if event.parts > 1
            else ""
        )
        boxes.append(
            f'<b class="op-{event.op.kind.value}{shades[event.op.stage]}" title="{_text(event)}" '
            f'style="{part}left:{low:.3f}%;width:{wide:.3f}%"><span>{event.op.microbatch}</span></b>'
        )
    return "".join(boxes)


def _shapes(events: Sequence[Event], shades: dict[int, int], total: float) -> str:
    """Return one path per colour."""
    paths: dict[str, list[str]] = {}
    for event in events:
        low = 1000 * event.start / total
        wide = 1000 * (event.end - event.start) / total
        box = (
            f"M{low:.3f} "
            f"{100 * event.part / event.parts:.0f}h{wide:.3f}v{100 / event.parts:.0f}h-{wide:.3f}z"
        )
        paths.setdefault(f"op-{event.op.kind.value}{shades[event.op.stage]}", []).append(box)
    drawn = "".join(f'<path class="{name}" d="{"".join(boxes)}"/>' for name, boxes in paths.items())
    return (
        f'<svg viewBox="0 0 1000 100" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg>'
    )


def _text(event: Event) -> str:
    op = event.op
    return (
        f"{NAMES[op.kind]} of micro-batch {op.microbatch}, stage {op.stage}: "
        f"{time_text(event.end - event.start)}"
    )


def rank_rows(predicted: View | None, measured: View | None) -> list[tuple[str, ...]]:
    """Return a row per pipeline rank, after the header: what was predicted and measured of
    a step.
    """
    shown = [view for view in (predicted, measured) if view is not None]
    peaks = predicted.peak_bytes() if predicted is not None and predicted.memory else None
    head = ["pipeline rank", "stages"]
    for view in shown:
        word = "predicted" if view is predicted else view.clock
        head += [f"{word} busy", "idle", "bubble"]
    if peaks is not None:
        head.append("predicted memory")
    rows = [tuple(head)]
    for rank in range(shown[0].ranks):
        cells = [str(rank), ", ".join(map(str, shown[0].stages_of(rank)))]
        for view in shown:
            busy = view.timeline.busy[rank]
            makespan = view.timeline.makespan
            cells += [
                time_text(busy),
                time_text(makespan - busy),
                f"{view.timeline.bubbles[rank]:.1%}",
            ]
        if peaks is not None:
            cells.append(bytes_text(peaks[rank]))
        rows.append(tuple(cells))
    return rows


def memory(plan: Plan) -> str:
    """Return a bar per pipeline rank of the predicted contents of its memory at the peak."""
    ranks = rank_memory(plan)
    names = [part.name for part in fields(StageMemory)]
    capacity = plan.cluster.most_usable
    limits = limits_of(plan.cluster, plan.grid, capacity)
    most = max(one.total for one in ranks) or 1
    full = capacity if 0 < capacity < 4 * most else most
    alike = len(set(limits)) == 1
    own = ["" if alike else f" of {bytes_text(int(limit))}" for limit in limits]
    largest = max(plan.cluster.devices, key=lambda device: device.usable)
    rows = []
    for rank, one in enumerate(ranks):
        parts = "".join(
            f'<b class="part-{index}" style="width:{100 * size / full:.3f}%" '
            f'title="{names[index]}: '
            f'{bytes_text(size)}"></b>'
            for index, size in enumerate(astuple(one))
            if size
        )
        rows.append(
            f'<div class="who">rank {rank}</div><div class="lane bar">{parts}</div>'
            f'<div class="share">{bytes_text(one.total)}{own[rank]}</div>'
        )
    used = [index for index in range(len(names)) if any(astuple(one)[index] for one in ranks)]
    legend = "".join(f'<span><i class="part-{index}"></i>{names[index]}</span>' for index in used)
    of = (
        f"of {bytes_text(capacity)} that plans use of {escape(largest.name)}'s "
        f"{bytes_text(largest.memory)}"
        if full == capacity
        else "of one rank at its peak"
    )
    return (
        f'<figure class="card step"><figcaption><b>Memory, predicted</b> <small>{of}</small>'
        f'<span class="legend boxes">{legend}</span></figcaption><div '
        f'class="lanes">{"".join(rows)}</div></figure>'
    )
