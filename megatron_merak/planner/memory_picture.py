"""A bar chart of the memory of each pipeline rank."""

from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from megatron_merak.plan import Plan, limits_of
from megatron_merak.planner.memory import StageMemory, rank_memory

GIB = 2**30
# One per field of StageMemory, distinguishable with colour blindness (Okabe and Ito).
_COLORS = ("#2F7FC1", "#56B4E9", "#12936F", "#E69F00", "#D55E00", "#B5659A")


def draw_memory(plan: Plan, path: str | Path, limit: float = 0) -> None:
    """Write a PNG: a stacked bar per pipeline rank, in GiB, and a line at ``limit`` bytes where it
    is not 0, or at what plans use of each rank's device where nodes differ.

    Needs matplotlib, but no display.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ranks = rank_memory(plan)
    figure = Figure(figsize=(max(6.0, 2.4 + 0.55 * len(ranks)), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _stack(axes, ranks)
    limits = limits_of(plan.cluster, plan.grid, limit)
    line: dict[str, Any] = {"color": "#14181D", "linestyle": "--", "linewidth": 1}
    if limit and len(set(limits)) > 1:
        for rank, own in enumerate(limits):
            axes.hlines(own / GIB, rank - 0.45, rank + 0.45, **line)
            axes.annotate(f"{own / GIB:.0f} GiB", (rank, own / GIB), ha="center", va="bottom")
    elif limit:
        axes.axhline(limits[0] / GIB, **line)
        axes.annotate(
            f"{limits[0] / GIB:.0f} GiB",
            (1, limits[0] / GIB),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
        )
    axes.set_xticks(range(len(ranks)))
    axes.set_xlabel("pipeline rank")
    axes.set_ylabel("GiB (modelled peak of one rank)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"{plan.schedule.name}, {plan.num_microbatches} micro-batches of {plan.micro_batch_size}",
        loc="left",
    )
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False)
    figure.savefig(path, format="png", dpi=120)


def _stack(axes, ranks: Sequence[StageMemory]) -> None:
    below = [0.0] * len(ranks)
    columns = list(zip(*map(astuple, ranks), strict=True))
    for field, color, column in zip(fields(StageMemory), _COLORS, columns, strict=True):
        heights = [size / GIB for size in column]
        axes.bar(
            range(len(ranks)),
            heights,
            0.72,
            below,
            color=color,
            edgecolor="white",
            linewidth=0.6,
            label=field.name,
        )
        below = [a + b for a, b in zip(below, heights, strict=True)]
