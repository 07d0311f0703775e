"""The page of `schedules.py`: tables of modelled and of measured times, never in one column."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.schedules import unflushed
from benchmarks.schedules.cells import Cell

NEAR, FASTER = 0.03, 1.01  # of its own simulation; of torch's time


@dataclass(frozen=True)
class Modelled:
    """Seconds of a step: in closed form (None where there is none), simulated, and emulated."""

    formula: float | None
    simulated: float
    emulated: float

    @property
    def distance(self) -> float:
        """Between the most different two, as a fraction of the simulation."""
        values = [value for value in vars(self).values() if value is not None]
        return (max(values) - min(values)) / self.simulated


@dataclass(frozen=True)
class Measured:
    """Seconds of each repeat of a step, ours and torch's, and whether both have the same gradients
    to the bit.
    """

    simulated: float
    ours: list[float]
    torch: list[float]
    same_gradients: bool

    @classmethod
    def of(cls, simulated: float, ranks: Sequence[Any]) -> "Measured":
        """Of what each rank measured: a step lasts from its start to the end of the last rank."""
        steps = {}
        for name in ranks[0].steps:
            each = zip(*(rank.steps[name] for rank in ranks), strict=True)
            steps[name] = [max(end for _, end in step) - step[0][0] for step in each]
        same = all(
            rank.gradients.get("torch", rank.gradients["ours"]) == rank.gradients["ours"]
            for rank in ranks
        )
        return cls(simulated, steps["ours"], steps.get("torch", []), same)

    @property
    def excess(self) -> float:
        """Of ours over its simulation, as a fraction of that."""
        return median(self.ours) / self.simulated - 1

    @property
    def ratio(self) -> float | None:
        """Our time over torch's."""
        return median(self.ours) / median(self.torch) if self.torch else None

    def line(self) -> str:
        text = f"{median(self.ours):.3f} s, {self.excess:+.1%} of {self.simulated:.3f} s simulated"
        return text + (f", torch {median(self.torch):.3f} s" if self.torch else "")


def page(
    cells: Sequence[Cell],
    modelled: Mapping[Cell, Modelled],
    timed: Sequence[Cell],
    measured: Mapping[Cell, Measured],
    options: argparse.Namespace,
    load: float,
) -> str:
    """All of docs/evidence/schedules.md."""
    sections = [INTRODUCTION, _modelled_summary(modelled)]
    for ranks in sorted({cell.ranks for cell in cells}):
        sections.append(
            f"### {ranks} ranks\n\n"
            + _modelled_table([c for c in cells if c.ranks == ranks], modelled)
        )
    sections.append("## Without a flush\n\n" + unflushed.section())
    sections.append(
        MEASURED.format(
            forward=options.forward_ms, backward=2 * options.forward_ms, n=options.repeats
        )
    )
    if not measured:
        sections.append("Not measured in the run that wrote this page.")
    else:
        sections.append(_measured_summary(measured, load, options.at_once))
        for ranks in sorted({cell.ranks for cell in timed}):
            rows = [cell for cell in timed if cell.ranks == ranks]
            sections.append(f"### {ranks} ranks, measured\n\n" + _measured_table(rows, measured))
    return "\n\n".join(section.strip() for section in sections) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _milliseconds(seconds: float | None) -> str:
    return "none" if seconds is None else f"{1e3 * seconds:.1f}"


def _modelled_table(cells: Sequence[Cell], modelled: Mapping[Cell, Modelled]) -> str:
    header = [
        "schedule",
        "micro-batches",
        "formula, ms",
        "simulated, ms",
        "emulated, ms",
        "bubble",
        "relative to 1f1b",
    ]
    rows = []
    for cell in cells:
        start = [cell.schedule, str(cell.microbatches)]
        if cell.outside:
            rows.append([*start, f"not applicable: {cell.outside}", "", "", "", ""])
            continue
        found = modelled[cell]
        plain = modelled[Cell("1f1b", cell.ranks, cell.microbatches, cell.forward)].simulated
        times = map(_milliseconds, (found.formula, found.simulated, found.emulated))
        rows.append(
            [
                *start,
                *times,
                f"{1 - cell.work / found.simulated:.1%}",
                f"{found.simulated / plain:.3f}x",
            ]
        )
    return table(header, rows)


def _modelled_summary(modelled: Mapping[Cell, Modelled]) -> str:
    closed = [one for one in modelled.values() if one.formula is not None]
    return (
        f"Of {len(modelled)} cells {len(closed)} have a closed form. Formula, simulation and emulation differ by at "
        f"most {max(one.distance for one in modelled.values()):.1e} of a cell's time."
    )


def _measured_table(cells: Sequence[Cell], measured: Mapping[Cell, Measured]) -> str:
    header = [
        "schedule",
        "micro-batches",
        "simulated, ms (modelled)",
        "ours, ms",
        "from - to",
        "ours / simulated",
    ]
    header += ["torch, ms", "ours / torch"]
    rows = []
    for cell in cells:
        start = [cell.schedule, str(cell.microbatches)]
        if cell not in measured:
            rows.append([*start, f"not applicable: {cell.outside}", *[""] * 5])
            continue
        one = measured[cell]
        spread = f"{1e3 * min(one.ours):.1f} - {1e3 * max(one.ours):.1f}"
        ours = [
            _milliseconds(one.simulated),
            _milliseconds(median(one.ours)),
            spread,
            f"{1 + one.excess:.3f}",
        ]
        theirs = (
            [_milliseconds(median(one.torch)), f"{one.ratio:.3f}"] if one.torch else ["none", ""]
        )
        rows.append([*start, *ours, *theirs])
    return table(header, rows)


def _measured_summary(measured: Mapping[Cell, Measured], load: float, at_once: int) -> str:
    found = list(measured.values())
    beside = [one for one in found if one.torch]
    near = sum(one.excess <= NEAR for one in found)
    faster = sum(one.ratio <= FASTER for one in beside)
    lines = [
        f"- {os.cpu_count()} cores; load average {load:.1f} before the run; pipelines at the same time: {at_once}.",
        f"- {near} of {len(found)} cells are within {NEAR:.0%} of their own simulation: the median is "
        f"{median(one.excess for one in found):+.2%}, the worst {max(one.excess for one in found):+.2%}.",
    ]
    if beside:
        ratios = [one.ratio for one in beside]
        lines.append(
            f"- {faster} of {len(beside)} cells that torch has too are faster than torch or within {FASTER - 1:.0%} of "
            f"it: the median of ours / torch is {median(ratios):.3f}, the worst {max(ratios):.3f}."
        )
        same = sum(one.same_gradients for one in beside)
        lines.append(f"- Gradients are bitwise equal to torch's in {same} of {len(beside)} cells.")
    return "\n".join(lines)


INTRODUCTION = """
# Schedules

This page compares the step time of every pipeline schedule: with its closed form, in simulation, in emulation, and
measured beside `torch.distributed.pipelining`. `--pipeline-schedule NAME` selects a schedule; `--schedule-file` runs
one that you wrote ([schedule_files.md](../schedule_files.md)). `python -m benchmarks schedules` writes
the page.

## Modelled

Under every schedule, a rank takes 50 ms for the forward of a micro-batch and 100 ms for its backward, half of that
for the weight gradient. If a rank has two stages (`interleaved`, `zb-v`), each takes half of these times. Under
`shifted` and `early-recompute`, all stages except the last recompute their forward, which takes another 50 ms.
Transfers take no time. All times in this section are **modelled**:

- *formula*: the closed form of the schedule, if there is one;
- *simulated*: `pipeline_parallel/simulate.py`;
- *emulated*: real processes with real transfers run the real executor on a logical clock (backend `emu`);
- *bubble*: the part of the step in which a rank runs neither forwards nor backwards (it waits or recomputes).
"""

MEASURED = """
## Measured

Times are measured on the machine's clock. Kernels sleep, {forward:.0f} ms for the forward of a **stage** and
{backward:.0f} ms for its backward, so a rank with two stages has twice the work here. Everything else is real: one
process per rank, messages of 64 KiB over gloo, the executor, the gradients. A step lasts from a start that all ranks
agree on to the end of the last rank; the tables show medians of {n} steps. *torch* is `torch.distributed.pipelining`
on the same stages in the same processes, alternating with ours: `ScheduleGPipe`, `Schedule1F1B`,
`ScheduleInterleaved1F1B`, `ScheduleZBVZeroBubble`, and for zb-h1 `ScheduleInterleavedZeroBubble` with one stage per
rank.
"""
