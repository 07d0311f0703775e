"""What --save-increment-interval costs a run, and how fast its steps are repeated.

    python -m benchmarks increments --json result.json     # 15 minutes and 10 GB of disk
    python -m benchmarks increments --quick                # a few steps, once: does it all still run?

merak-pretrain trains with checkpoints alone and with increments between them, in turns, on one rank and on two whose
gradients are divided. Then the last step before a checkpoint is recovered from the checkpoint before that.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import ROOT
from benchmarks.checkpoints.saves import RUN, seconds
from benchmarks.runs import add_from, circumstances, heading, parsed, show

BEGIN = "<!-- written by: python -m benchmarks increments -->"
END = "<!-- end of increments -->"

RANKS = {
    "one": "",
    "two, ZeRO-2": "--nproc-per-node 2 --data-parallel-sharding-strategy optim_grads",
}
WAYS = {"none": 0, "of 5 steps": 5, "of 1 step": 1}
WAITED = re.compile(r"saved increments of (\d+) steps?, ([0-9,]+) bytes .* waited ([0-9.]+) s")
REPEATED = re.compile(r"repeated (\d+) updates? from increments in ([0-9.]+) s")

Found = dict[str, list[float]]


def pretrain(place: Path, flags: str, metrics: Path | None = None) -> str:
    """Run merak-pretrain; return what it printed."""
    more = [] if metrics is None else ["--metrics", str(metrics)]
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *flags.split(), "--save", str(place), *more],
        check=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    return done.stdout


def run(place: Path, flags: str, interval: int, steps: int, every: int) -> Found:
    """Train once, and recover a step; return what was measured, in seconds and bytes."""
    shutil.rmtree(place, ignore_errors=True)
    metrics = place.with_suffix(".jsonl")
    metrics.unlink(missing_ok=True)
    given = f"{RUN.format(steps=steps)} {flags} --save-interval {every}"
    given += f" --save-increment-interval {interval}" if interval else ""
    os.sync()
    told = pretrain(place, given, metrics)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    found: Found = {"steps": [median(row["seconds"] for row in rows if row["kind"] == "train")]}
    newest = max(place.glob("iter_*"))
    found["checkpoint"] = [sum(path.stat().st_size for path in newest.iterdir())]
    if not interval:
        return found
    waited = WAITED.findall(told)
    found["waits"] = [float(wait) / int(count) for count, _, wait in waited]
    written = [path.stat().st_size for path in place.glob("increments_*/*/*")]
    found["bytes"] = [sum(written) / steps]
    again = f"{given} --load {place} --ckpt-step {steps - 1} --skip-train"
    repeated = REPEATED.search(pretrain(place, again))
    assert repeated is not None, "no step was repeated"
    found["repeats"] = [float(repeated[2]) / int(repeated[1])]
    return found


def measured(root: Path, options: argparse.Namespace) -> dict[str, dict[str, Found]]:
    """The measurements of all ways, in turns."""
    steps = 12 if options.quick else 40
    every = 6 if options.quick else 20
    found: dict[str, dict[str, Found]] = {}
    for ranks in RANKS:
        found[ranks] = {way: {} for way in WAYS}
    for _ in range(options.repeats):
        for ranks, flags in RANKS.items():
            for number, (way, interval) in enumerate(WAYS.items()):
                place = root / str(number)
                for name, values in run(place, flags, interval, steps, every).items():
                    found[ranks][way].setdefault(name, []).extend(values)
                shutil.rmtree(place)
    return found


def table(found: dict[str, Any]) -> str:
    """A row per way."""
    lines = [
        "| ranks | increments | a step | training waits for it | of the step | MB of it | MB of a checkpoint "
        "| a step repeated |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for ranks, ways in found["ranks"].items():
        for way, each in ways.items():
            cells = [ranks, way, seconds(each["steps"], 3)]
            whole = f"{median(each['checkpoint']) / 1e6:.0f}"
            if "waits" in each:
                share = median(each["waits"]) / median(each["steps"])
                size = f"{median(each['bytes']) / 1e6:.0f}"
                again = seconds(each["repeats"], 3)
                cells += [seconds(each["waits"], 3), f"{share:.1%}", size, whole, again]
            else:
                cells += ["", "", "", whole, ""]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page(path: Path) -> str:
    """The table of a file that a run wrote."""
    saved = json.loads(path.read_text())
    return f"{heading(saved, saved['repeats'], 'all')}\n\n{table(saved)}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, help="of the disk to measure [a temporary one]")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each way (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements here")
    parser.add_argument("--quick", action="store_true", help="a few steps, once: a smoke test")
    add_from(parser)
    options = parsed(parser, argv)
    if options.saved:
        return show(page(options.saved), options.into, BEGIN, END)
    options.repeats = 1 if options.quick else options.repeats
    with tempfile.TemporaryDirectory(prefix="merak_bench_", dir=options.directory) as scratch:
        found = {"ranks": measured(Path(scratch), options), "repeats": options.repeats}
    found |= circumstances()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    return 0
