"""How good are searched schedules? 200 random pipelines, against builders and a lower bound.

    python -m benchmarks search                    # into docs/evidence/search.md; two minutes on one core
    python -m benchmarks search --instances 20 --out /tmp/search.md

Every time is modelled: what `simulate` says. Only the search itself is timed, in CPU seconds of this process.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks import EVIDENCE
from benchmarks.schedules.search_instances import Instance, instance
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.pipeline_parallel.search.search import builder_makespans
from megatron_merak.pipeline_parallel.search.shift import shift_recompute
from megatron_merak.pipeline_parallel.simulate import simulate

REACHED = 1e-6  # relative difference that still counts as equal


@dataclass(frozen=True)
class Row:
    """One instance: makespans relative to that of auto, the bound too; None where there is none."""

    instance: Instance
    bound: float
    builder: float
    plain: float
    shifted: float | None
    general: float | None
    seconds: float
    timed: int


def measure(one: Instance) -> Row:
    started = time.process_time()
    found = one.search()
    seconds = time.process_time() - started
    builders = builder_makespans(one.problem())
    general = None
    if one.recomputing:
        plain = build_schedule("1f1b", one.stages, one.microbatches)
        general = (
            simulate(shift_recompute(plain, one.costs, one.limits), one.costs).makespan
            / found.makespan
        )
    shifted = (
        builders["shifted"] / found.makespan if one.recomputing and "shifted" in builders else None
    )
    relative = [
        value / found.makespan for value in (found.bound, found.builder_makespan, builders["1f1b"])
    ]
    return Row(one, *relative, shifted, general, seconds, found.evaluations)


ABLATION = {
    "1F1B, every stage recomputes": None,
    "(a) the last stage does not": {"drain": False, "warmup": False},
    "(a) and (b) R in the drain": {"warmup": False},
    "(a) and (c) R in the warm-up": {"drain": False},
    "(a), (b) and (c)": {},
}


def ablate(one: Instance) -> list[float]:
    """The makespans of the parts of the shifted critical path on 1F1B, relative to none of them."""
    plain = build_schedule("1f1b", one.stages, one.microbatches)
    everywhere = replace(one.costs, recompute=one.costs.forward)
    base = simulate(plain, everywhere).makespan
    times = [base]
    for options in list(ABLATION.values())[1:]:
        times.append(
            simulate(shift_recompute(plain, one.costs, one.limits, **options), one.costs).makespan
        )
    return [value / base for value in times]


def spread(values: Sequence[float]) -> str:
    """Median, and in brackets the 10th and 90th percentile and the largest: of ratios, as percent
    above 1.
    """
    if not values:
        return "-"
    ordered = sorted(100 * (value - 1) for value in values)
    tenth, ninetieth = (ordered[round(part * (len(ordered) - 1))] for part in (0.1, 0.9))
    middle, low, high, most = (
        round(value, 1) + 0.0 for value in (median(ordered), tenth, ninetieth, ordered[-1])
    )
    return f"{middle} ({low}, {high}, {most})"


GROUPS: dict[str, Callable[[Instance], bool]] = {
    "all": lambda one: True,
    "even stages": lambda one: not one.uneven,
    "uneven stages": lambda one: one.uneven,
    "fast links": lambda one: not one.slow,
    "slow links": lambda one: one.slow,
    "no recomputation": lambda one: not one.recomputing,
    "recomputation": lambda one: one.recomputing,
    "no memory cap": lambda one: not one.capped,
    "memory cap": lambda one: one.capped,
    "B only": lambda one: not one.split,
    "W may be split": lambda one: one.split,
}


def table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| instances | | at the bound | above the bound, % | better than every builder | best builder longer, % "
        "| 1F1B longer, % | shifted longer, % | general shift longer, % | search, CPU s: median, most |",
        "|---|" + "---:|" * 9,
    ]
    for name, belongs in GROUPS.items():
        some = [row for row in rows if belongs(row.instance)]
        if not some:
            continue
        reached = sum(row.bound > 1 - REACHED for row in some) / len(some)
        better = sum(row.builder > 1 + REACHED for row in some) / len(some)
        seconds = [row.seconds for row in some]
        cells = [
            name,
            str(len(some)),
            f"{reached:.0%}",
            spread([1 / row.bound for row in some]),
            f"{better:.0%}",
            spread([row.builder for row in some]),
            spread([row.plain for row in some]),
            spread([row.shifted for row in some if row.shifted]),
            spread([row.general for row in some if row.general]),
            f"{median(seconds):.2f}, {max(seconds):.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def ablation_table(rows: Sequence[Row]) -> list[str]:
    some = [row.instance for row in rows if row.instance.recomputing]
    times = list(zip(*map(ablate, some), strict=True)) if some else []
    groups = {
        name: GROUPS[name]
        for name in ("all", "even stages", "uneven stages", "fast links", "slow links")
    }
    lines = [
        "| time of 1F1B saved, % | " + " | ".join(groups) + " |",
        "|---|" + "---:|" * len(groups),
    ]
    for name, values in zip(ABLATION, times, strict=False):
        saved = []
        for belongs in groups.values():
            part = [
                100 * (1 - value) for value, one in zip(values, some, strict=True) if belongs(one)
            ]
            saved.append(f"{median(part):.1f}" if part else "-")
        lines.append(f"| {name} | " + " | ".join(saved) + " |")
    return lines


TEXT = """# Quality of searched schedules

This page shows how good the schedules are that `--pipeline-schedule auto` finds. `python -m benchmarks search` writes
it. It searches a schedule for {0} pipelines, each generated from its number by
`benchmarks/schedules/search_instances.py`: 2 to 8 stages, one to four times as many micro-batches, even or uneven
stages, transfers that take a hundredth of a forward or up to a full one, with and without recomputation, memory caps
and separate weight gradients. **All times except those of the search are modelled.**

- Ratios are medians, with the 10th percentile, the 90th percentile and the maximum in brackets.
- The bound (`pipeline_parallel/search/bound.py`) is a lower bound: no schedule beats it, and possibly none reaches it.
- The best builder is the best of naive, gpipe, 1f1b, shifted, early-recompute and zb-h1 that respects the memory cap
  and the permission to split W. *Shifted* is Merak's order unchanged, on instances that recompute and have the memory
  for it. The *general shift* is `shift_recompute` of 1F1B, on all instances that recompute.
- The search times at most {1} schedules and stops at the bound. It does not depend on a clock, so its result is
  reproducible.
- Here every rank has one stage. `--pipeline-schedule auto` also searches with several, in turn or in a V, and compares
  what it finds with every builder.
"""
ABLATION_TEXT = """## The parts of the shifted critical path, with general costs

The table shows the time that 1F1B saves by (a) a last stage that keeps its activations, (b) recomputation while a
stage waits after its last forward, (c) recomputation before its last forward, with a forward moved earlier if that
helps. Values are medians over the instances that recompute.
"""


def report(rows: Sequence[Row], picture: bool) -> str:
    counts = f"{len(rows)} random", max(row.timed for row in rows)
    lines = [TEXT.format(*counts), *table(rows), "", ABLATION_TEXT, *ablation_table(rows)]
    if picture:
        lines += ["", "![how much longer other schedules take](search.png)"]
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Row], path: Path) -> bool:
    """Cumulative distributions; False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    curves = {
        "bound": [1 / row.bound for row in rows],
        "best builder": [row.builder for row in rows],
        "1F1B": [row.plain for row in rows],
        "shifted (Merak)": [row.shifted for row in rows if row.shifted],
        "general shift of 1F1B": [row.general for row in rows if row.general],
    }
    for name, values in curves.items():
        ordered = sorted(100 * (value - 1) for value in values)
        label = f"auto above the {name}" if name == "bound" else f"{name} above auto"
        shares = [100 * (i + 1) / len(ordered) for i in range(len(ordered))]
        axes.step(
            ordered, shares, where="post", label=label, linestyle="--" if name == "bound" else "-"
        )
    axes.set(xlabel="longer by, % (modelled)", ylabel="instances, %", xlim=(0, None), ylim=(0, 101))
    axes.set_title(f"Schedules by search on {len(rows)} random pipelines")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    FigureCanvasAgg(figure).print_png(str(path))
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument(
        "--out",
        type=Path,
        default=EVIDENCE / "search.md",
        help="the picture goes beside it, as .png",
    )
    options = parser.parse_args()
    rows = []
    for seed in range(options.instances):
        rows.append(measure(instance(seed)))
        done = f"{seed + 1}/{options.instances} instances, {sum(row.seconds for row in rows):.0f} s of search"
        print(f"\r{done}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    picture = draw(rows, options.out.with_suffix(".png"))
    options.out.write_text(report(rows, picture))
    print(options.out.read_text())
