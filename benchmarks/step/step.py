"""Time one optimizer step, ours beside its peers: same model, weights and data, one core and one
thread per process.

    python -m benchmarks step                    # everything; about an hour on two idle cores
    python -m benchmarks step --only 'fp32 pp2' --repeats 7 --json result.json
    python -m benchmarks step --quick            # a tiny model, one repeat: does it all still run?

Contestants of a group alternate (A B C A B C ...), each time in fresh processes. It is an error if
losses disagree.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from benchmarks.step.cases import QUICK, RECIPE, Case, ModelShape, all_cases
from benchmarks.step.launcher import RankFailed, Settings, run_case
from benchmarks.step.report import Series, disagreements, ratios, table
from benchmarks.two_lines_page import processor


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="run cases with TEXT in their name",
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="TEXT",
        help="skip cases with TEXT in their name",
    )
    parser.add_argument("--steps", type=int, default=3, help="measured steps per run (3)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (2)")
    parser.add_argument("--repeats", type=int, default=5, help="fresh runs per case (5)")
    parser.add_argument(
        "--splits",
        type=int,
        nargs="+",
        default=[6, 7],
        help="tuned pipeline: layers before the cut (6 7)",
    )
    parser.add_argument(
        "--cores", type=int, nargs="+", help="cores to pin ranks to (all this process may use)"
    )
    parser.add_argument(
        "--keep-memory", action="store_true", help="every rank's allocator keeps freed memory"
    )
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds one run may take (600)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements here")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, once: a smoke test, not a measurement"
    )
    return parser.parse_args(argv)


def run_group(
    cases: Iterable[Case], shape: ModelShape, settings: Settings, repeats: int
) -> list[Series]:
    """Measure the cases of one group in turn, `repeats` times."""
    series = [Series(case) for case in cases]
    for repeat in range(repeats):
        for one in series:
            ranks = run_case(one.case, shape, settings)
            one.runs.append(ranks)
            wall = 1e3 * max(sum(rank["wall_s"]) for rank in ranks) / settings.steps
            print(
                f"[{repeat + 1}/{repeats}] {one.case.name}: {wall:.0f} ms per step",
                file=sys.stderr,
                flush=True,
            )
    return series


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    shape = ModelShape()
    if options.quick:
        shape = QUICK
        options.splits = [1]
        options.repeats = 1
        options.warmup = 1
        options.steps = 2
    wanted = [case for case in all_cases(shape, tuple(options.splits)) if selected(case, options)]
    if options.list:
        print("\n".join(case.name for case in wanted))
        return 0
    if not wanted:
        print(
            f"--only {options.only} --without {options.without}: no case is left; --list shows them",
            file=sys.stderr,
        )
        return 2
    cores = tuple(options.cores or available_cores())
    settings = Settings(
        warmup=options.warmup,
        steps=options.steps,
        seed=options.seed,
        timeout=options.timeout,
        cores=cores,
        keep_memory=options.keep_memory,
    )
    series: list[Series] = []
    try:
        for _, cases in groupby(wanted, key=lambda case: case.group):
            series += run_group(cases, shape, settings, options.repeats)
    except RankFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    print(table(series, shape))
    wrong = disagreements(series)
    print("\n".join(["Losses differ:", *wrong]) if wrong else "Losses of all contestants agree.")
    if options.json:
        options.json.write_text(
            json.dumps(document(series, shape, settings, wrong), indent=1) + "\n"
        )
    return 1 if wrong else 0


def selected(case: Case, options: argparse.Namespace) -> bool:
    chosen = not options.only or any(text in case.name for text in options.only)
    return chosen and not any(text in case.name for text in options.without)


def available_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def document(series: list[Series], shape: ModelShape, settings: Settings, wrong: list[str]) -> dict:
    machine = {"processor": processor(), "cores": os.cpu_count(), "system": platform.platform()}
    return {
        "machine": machine,
        "model": {**asdict(shape), "parameters": shape.parameters},
        "recipe": asdict(RECIPE),
        "settings": asdict(settings),
        "cases": [one.to_dict(shape) for one in series],
        "ratios": ratios(series, shape),
        "disagreements": wrong,
    }
