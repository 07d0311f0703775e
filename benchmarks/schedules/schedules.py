"""How long a step takes under each pipeline schedule: by formula, simulated, emulated, and on the machine's clock.

    python -m benchmarks schedules                 # into docs/evidence/schedules.md; 70 minutes, wants quiet
    python -m benchmarks schedules --at-once 5     # the same in 15 minutes; pipelines disturb each other by 1 to 3 %
    python -m benchmarks schedules --modelled      # prints all that no other work on the machine can disturb
    python -m benchmarks schedules --quick         # prints few cells with short kernels: does it all still run?

On the machine's clock kernels sleep, so that eight ranks need no eight cores; transfers, gradients and the executor are
real. Beside ours the schedules of torch.distributed.pipelining run on the same stages.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import EVIDENCE
from benchmarks.schedules import worlds
from benchmarks.schedules.cells import FACTORS, RANKS, TIMED_RANKS, Cell, all_cells
from benchmarks.schedules.page import Measured, Modelled, page

PAGE = EVIDENCE / "schedules.md"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--modelled", action="store_true", help="formula, simulation and emulation only"
    )
    parser.add_argument("--quick", action="store_true", help="few cells, short kernels, one repeat")
    parser.add_argument("--repeats", type=int, default=5, help="measured steps per cell (5)")
    parser.add_argument(
        "--forward-ms", type=float, default=50.0, help="a stage's forward where kernels sleep (50)"
    )
    parser.add_argument(
        "--at-once", type=int, default=1, help="how many pipelines sleep at the same time (1)"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="SCHEDULE", help="measure these schedules"
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=list(TIMED_RANKS), help="measure these sizes (4 8)"
    )
    parser.add_argument(
        "--factors",
        type=int,
        nargs="+",
        default=list(FACTORS),
        help="micro-batches by ranks (1 2 4 8)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page here")
    return parser.parse_args(argv)


def model(cells: Sequence[Cell]) -> dict[Cell, Modelled]:
    """Formula, simulation and emulation of every cell that there is."""
    from benchmarks.schedules.timed_runs import emulate

    found: dict[Cell, Modelled] = {}
    inside = [cell for cell in cells if not cell.outside]
    groups = [
        [cell for cell in inside if cell.ranks == ranks]
        for ranks in sorted({cell.ranks for cell in inside})
    ]
    work = [
        sum(cell.microbatches * cell.chunks for cell in group) * group[0].ranks / 300
        for group in groups
    ]
    jobs = [
        worlds.Job(
            f"emulation of {group[0].ranks} ranks", emulate, group[0].ranks, (group,), seconds
        )
        for group, seconds in zip(groups, work, strict=True)
    ]

    def done(job: worlds.Job, ranks: list[list[float]]) -> str:
        for cell, seconds in zip(job.args[0], zip(*ranks, strict=True), strict=True):
            found[cell] = Modelled(cell.formula(), cell.simulated(), max(seconds))
        return f"{len(job.args[0])} schedules"

    worlds.run_jobs(jobs, 1, done)
    return found


def measure(cells: Sequence[Cell], repeats: int, at_once: int) -> dict[Cell, Measured]:
    """Steps on the machine's clock, of every cell that there is."""
    from benchmarks.schedules.timed_runs import measure

    found: dict[Cell, Measured] = {}
    simulated = {cell: cell.simulated() for cell in cells if not cell.outside}
    jobs = []
    for cell, seconds in simulated.items():
        name = f"{cell.schedule}, {cell.ranks} ranks, {cell.microbatches} micro-batches"
        lasts = 3 + repeats * seconds * (2 if cell.peer else 1)
        jobs.append(worlds.Job(name, measure, cell.ranks, (cell, repeats), lasts))

    def done(job: worlds.Job, ranks: list) -> str:
        cell = job.args[0]
        found[cell] = Measured.of(simulated[cell], ranks)
        return found[cell].line()

    worlds.run_jobs(jobs, at_once, done)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    load = os.getloadavg()[0]
    if options.quick:
        options.forward_ms = 5.0
        options.repeats = 1
        options.ranks = [2]
        options.factors = [1, 2]
    sizes, factors = (2,) if options.quick else RANKS, tuple(options.factors)
    worlds.prepare("benchmarks.schedules.timed_runs")
    modelled = model(all_cells(sizes, factors))
    timed = (
        []
        if options.modelled
        else all_cells(tuple(options.ranks), factors, options.forward_ms / 1e3)
    )
    timed = [replace(cell, forward=cell.forward * cell.chunks) for cell in timed]
    timed = [cell for cell in timed if cell.schedule in (options.only or [cell.schedule])]
    measured = measure(timed, options.repeats, options.at_once)
    text = page(all_cells(sizes, factors), modelled, timed, measured, options=options, load=load)
    partial = options.quick or options.modelled or options.only
    complete = not partial and (factors, tuple(options.ranks)) == (FACTORS, TIMED_RANKS)
    if out := options.out or (PAGE if complete else None):
        out.write_text(text, encoding="utf-8")
        print(f"written: {out}", file=sys.stderr)
    else:
        print(text)
    wrong = [cell for cell, one in measured.items() if not one.same_gradients]
    wrong += [cell for cell, one in modelled.items() if one.distance > 0.01]
    return 1 if wrong else 0
