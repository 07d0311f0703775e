"""Ways to train on two replicas, through the trainers as shipped: speed and memory of one script.

    python -m benchmarks data_parallel --json result.json   # 5 repeats in turns; 20 minutes on two idle cores
    python -m benchmarks data_parallel --quick              # a tiny model, once: does it all still run?
    python -m benchmarks data_parallel --from result.json --into docs/evidence/data_parallel.md   # no run

The script is that of two_lines.py. HuggingFace's Trainer runs it under DistributedDataParallel; on CPUs it ignores fsdp
without a word, so that FSDP2 and DDP with ZeroRedundancyOptimizer are torch's own, out of the box, over HuggingFace's
model, as is DeepSpeed's ZeRO stage 1 where deepspeed is installed (benchmarks/peers). MerakTrainer
has all state on every replica, or optimizer state shared, or everything.
"""

import argparse
import sys
from importlib.util import find_spec
from itertools import product
from statistics import median

from benchmarks.runs import add_options, parsed, show, spread
from benchmarks.step.cases import DATA, PRECISIONS, Case
from benchmarks.trainers.rows import OURS, Row, check_chosen, disagreement, page, save
from benchmarks.trainers.two_lines import FULL, QUICK, run_script, shape_of, timed_peer

SCRIPTS = {  # contestant -> training arguments beside those of the script
    "HF Trainer, DDP": {},
    OURS: {},
    f"{OURS}, use_distributed_optimizer": {"use_distributed_optimizer": True},
    f"{OURS}, fsdp full_shard": {"fsdp": "full_shard"},
}
PEERS = {"torch DDP, ZeroRedundancyOptimizer": "torch-zero-1", "torch FSDP2": "torch-fsdp2"}
if find_spec("deepspeed"):
    PEERS["DeepSpeed, ZeRO stage 1"] = "deepspeed-zero-1"
WAYS = ("HF Trainer, DDP", *PEERS, *list(SCRIPTS)[1:])
BEGIN, END = (
    "<!-- written by: python -m benchmarks data_parallel -->",
    "<!-- end of data_parallel -->",
)


def table(rows: list[Row]) -> str:
    """A row per precision and way: tokens per second, its ratio to DDP, and the peak of a rank."""
    lines = ["| two replicas | | tokens/s | | peak of a rank, MiB |", "|---|---|--:|--:|--:|"]
    for row in rows:
        first = next(each for each in rows if each.precision == row.precision)
        ratio = f"{median(row.rates) / median(first.rates):.2f}x"
        peak = f"{median(row.peaks):.0f}"
        cells = (row.precision, row.contestant, spread(row.rates), ratio, peak)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="rows with TEXT in 'fp32 torch FSDP2'-like names"
    )
    add_options(parser, repeats=5, timeout=900)
    return parsed(parser, argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, or show what was measured; 1 where losses disagree, 2 for a page without marks."""
    given = parse(argv)
    if given.saved:
        return show(page(given.saved, table), given.into, BEGIN, END)
    options = FULL | {"steps": 4} | (QUICK if given.quick else {})
    shape = shape_of(options)
    rows = [
        Row(precision, DATA, name, script=name in SCRIPTS)
        for precision, name in product(PRECISIONS, WAYS)
    ]
    rows = [row for row in rows if given.only in f"{row.precision} {row.contestant}"]
    check_chosen(rows, given.only)
    for repeat in range(1 if given.quick else given.repeats):
        for row in rows:
            if row.script:
                run_script(row, options | {"more": SCRIPTS[row.contestant]}, 0, given.timeout)
            else:
                case = Case(PEERS[row.contestant], DATA, row.precision, tuned=False)
                steps = options["steps"]
                timed_peer(row, case, shape, warmup=0, steps=steps, timeout=given.timeout)
            text = f"[{repeat + 1}] {row.precision} {row.contestant}: {row.rates[-1]:.0f} tokens/s, {row.peaks[-1]} MiB"
            print(text, file=sys.stderr, flush=True)
        if given.json:
            save(given.json, rows, options)
    print(table(rows))
    if wrong := disagreement(rows):
        print(f"Losses differ. {wrong}")
        return 1
    return 0
